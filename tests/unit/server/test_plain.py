"""The plain way of receiving: its costs are what it is for. What it takes in, checks and keeps: test_receive.py."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from support.leaks import LeakCheck, eventually
from support.raw_client import RawClient

from weightwire.cache.quarantine import FOLDER
from weightwire.cache.reading import ReadingStopped
from weightwire.cache.store import TensorCache
from weightwire.cache.workers import Workers
from weightwire.hashing import fnv1a64
from weightwire.server import Destination, Server, plain
from weightwire.transport import memory
from weightwire.wire import CACHE_THRESHOLD, Command

BIG = CACHE_THRESHOLD + 1
HEAD = 305
PAYLOAD = random.Random(1).randbytes(BIG)


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much memory was cleared for each message and entry, bytes."""
    found: list[int] = []
    real = memory.cleared_memory

    def watched(nbytes: int, what: str) -> memoryview:
        found.append(nbytes)
        return real(nbytes, what)

    monkeypatch.setattr(plain, "cleared_memory", watched)
    return found


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, str]]:
    """Of everything that is hashed its bytes, whether by the plain loop alone, and the thread."""
    found: list[tuple[int, bool, str]] = []
    real = plain.hash_payloads

    def watched(payloads: Any, **options: Any) -> list[int]:
        found.extend((each.nbytes, options["plain"], threading.current_thread().name) for each in payloads)
        return real(payloads, **options)

    monkeypatch.setattr(plain, "hash_payloads", watched)
    return found


class Host(Destination):
    """Memory behind a hook."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        super().__init__(nbytes)
        self.data = bytearray(nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        self.data[offset : offset + view.nbytes] = view

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = self.data[offset : offset + view.nbytes]


@pytest.mark.parametrize("destination", [None, Host])
def test_whole_messages_on_the_thread_that_serves(
    destination: type[Host] | None,
    cleared: list[int],
    hashed: list[tuple[int, bool, str]],
    tmp_path: Path,
    no_leaks: LeakCheck,
) -> None:
    with Server(port=0, cache=tmp_path, destination=destination, optimized=False) as server:
        with RawClient(server.port) as client:
            serving = f"weightwire-{client.name}"
            tensor = client.place("t", BIG, client.allocate(BIG))
            assert not client.set_from_cache(tensor, fnv1a64(PAYLOAD))
            assert cleared == []
            client.set(tensor, PAYLOAD, flag=1)
            client.barrier()
            assert cleared == [HEAD + BIG]
            # In place before the next request is read: nobody has waited for anything.
            assert (tmp_path / f"{fnv1a64(PAYLOAD):016x}").read_bytes() == PAYLOAD
            again = client.place("again", BIG, client.allocate(BIG))
            assert client.set_from_cache(again, fnv1a64(PAYLOAD))
            assert cleared == [HEAD + BIG, BIG]
            assert client.get(again) == PAYLOAD
            mine = {thread.name for thread in threading.enumerate() if thread.name.startswith("weightwire-")}
        assert mine == {"weightwire-accept", serving}
        assert hashed == [(BIG, True, serving)] * 2


@pytest.mark.parametrize("destination", [None, Host])
def test_the_name_of_a_new_entry_is_synced(
    destination: type[Host] | None, tmp_path: Path, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next request is read, and only where there is one."""
    synced: list[list[str]] = []
    monkeypatch.setattr(TensorCache, "sync_names", lambda self: synced.append(os.listdir(self.directory)))
    with (
        Server(port=0, cache=tmp_path, destination=destination, optimized=False) as server,
        RawClient(server.port) as client,
    ):
        tensor = client.place("t", BIG, client.allocate(BIG))
        for _ in range(2):
            client.set(tensor, PAYLOAD, flag=1)
            client.barrier()
            assert synced == [[f"{fnv1a64(PAYLOAD):016x}"]]


@pytest.mark.parametrize("hook", [False, True])
def test_a_server_that_ends_does_not_wait_for_a_comparison(
    hook: bool, tmp_path: Path, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an entry of the same name and size that is there, in memory or from a hook's temporary file."""
    content_hash = fnv1a64(PAYLOAD)
    (tmp_path / f"{content_hash:016x}").write_bytes(PAYLOAD)
    cache, workers = TensorCache(tmp_path), Workers()
    saver = plain.PlainSaver(cache, workers)
    read, looks = os.pread, 0

    def ended(fd: int, nbytes: int, offset: int) -> bytes:
        nonlocal looks
        looks += 1
        saver._until = 0.0
        return read(fd, nbytes, offset)

    writer = cache.writer()
    writer.write(PAYLOAD)
    monkeypatch.setattr(os, "pread", ended)
    with pytest.raises(ReadingStopped):
        if hook:
            saver.put(writer, content_hash, BIG)
        else:
            writer.abort()
            saver.keep(plain.PlainSave(saver, memoryview(PAYLOAD)), memoryview(PAYLOAD))
    assert looks == (2 if hook else 1)
    assert saver.counts() == (0, 1, 0)
    assert os.listdir(tmp_path) == [f"{content_hash:016x}"]
    workers.close()


def test_rows_are_one_message_too(cleared: list[int], no_leaks: LeakCheck) -> None:
    with Server(port=0, protocol="8.0", optimized=False) as server, RawClient(server.port, "8.0") as client:
        tensor = client.place("t", 400_000, client.allocate(400_000))
        row = random.Random(2).randbytes(50_000)
        head = client.dialect.encode_set_tensor_2d(tensor, 0, 50_000, 3, 100_000)
        client.tell(Command.SET_TENSOR_2D, head + 3 * row)
        gap = bytes(50_000)
        assert client.get(tensor) == row + gap + row + gap + row + gap + bytes(100_000)
        assert len(cleared) == 1


def test_one_question_at_a_time(no_leaks: LeakCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions that have come at once are answered in order, each with one file in memory."""
    contents = [random.Random(seed).randbytes(1000) for seed in range(4)]
    for content in contents:
        (tmp_path / f"{fnv1a64(content):016x}").write_bytes(content)
    open_now: list[int] = []
    real = TensorCache.lookup

    def watched(self: TensorCache, content_hash: int, nbytes: int) -> int | None:
        fd = real(self, content_hash, nbytes)
        open_now.append(sum(str(tmp_path) in link for link in links()))
        return fd

    monkeypatch.setattr(TensorCache, "lookup", watched)
    with Server(port=0, cache=tmp_path, optimized=False) as server, RawClient(server.port) as client:
        tensors = [client.place(f"t{at}", 1000, client.allocate(1000)) for at in range(4)]
        sent = b""
        for tensor, content in zip(tensors, contents, strict=True):
            body = client.dialect.encode_set_tensor_hash(tensor, 0, fnv1a64(content))
            sent += bytes((Command.SET_TENSOR_HASH,)) + len(body).to_bytes(8, "little") + body
        client.socket.sendall(sent)
        for _ in tensors:
            assert client.answer() == b"\1"
        assert [client.get(tensor) for tensor in tensors] == contents
    assert open_now == [1] * 4


def links() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def test_a_bad_entry_touches_nothing(tmp_path: Path, no_leaks: LeakCheck) -> None:
    """It is looked at before it is copied, so what was there stays."""
    with Server(port=0, cache=tmp_path, optimized=False) as server, RawClient(server.port) as client:
        tensor = client.place("t", 100, client.allocate(100))
        client.set(tensor, b"y" * 100)
        (tmp_path / f"{5:016x}").write_bytes(b"x" * 100)
        assert not client.set_from_cache(tensor, 5)
        assert client.get(tensor) == b"y" * 100
        assert server.tensors["t"].view() == b"y" * 100
        assert os.listdir(tmp_path) == [FOLDER]


def test_an_entry_that_cannot_be_read(
    tmp_path: Path, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = tmp_path / f"{fnv1a64(b'x' * 100):016x}"
    entry.write_bytes(b"x" * 100)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(plain, "read_exactly", fail)
    with Server(port=0, cache=tmp_path, optimized=False) as server, RawClient(server.port) as client:
        tensor = client.place("t", 100, client.allocate(100))
        assert not client.set_from_cache(tensor, fnv1a64(b"x" * 100))
        client.barrier()
    assert "cannot be read" in caplog.text
    assert not entry.exists()


def test_no_memory_for_a_message_ends_its_client_with_one_line(
    no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "weightwire")
    nbytes = 65 << 20
    with Server(port=0, memory=1 << 30, optimized=False) as server:
        monkeypatch.setattr(memory, "available_memory", lambda: nbytes)
        with RawClient(server.port) as client:
            tensor = client.place("t", nbytes, client.allocate(nbytes))
            client.send(Command.SET_TENSOR, client.dialect.encode_set_tensor(tensor, 0, 0), size=HEAD + nbytes)
            assert client.closed()
        assert "t" not in server.tensors
        with RawClient(server.port) as client:
            client.barrier()
    (line,) = caplog.messages
    assert "SET_TENSOR of tensor 't' failed: AllocationError: there is no memory" in line
    assert str(HEAD + nbytes) in line


def test_a_server_that_ends_does_not_wait_for_ever(
    tmp_path: Path, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry that is still being hashed when the server ends is given up after a while, and nothing is left of it."""
    monkeypatch.setattr(plain, "_AT_THE_END", 0.1)
    begun = threading.Event()

    def endless(payloads: Any, *, check: Any, plain: bool) -> list[int]:
        begun.set()
        while True:
            check()

    monkeypatch.setattr(plain, "hash_payloads", endless)
    server = Server(port=0, cache=tmp_path, optimized=False).start()
    with RawClient(server.port) as client:
        client.set(client.place("t", BIG, client.allocate(BIG)), PAYLOAD, flag=1)
        assert begun.wait(30)
        assert server.stats().cache_pending == 1
        server.close()
        assert client.closed()
    assert eventually(lambda: not server.clients)
    assert os.listdir(tmp_path) == []
    stats = server.stats()
    assert (stats.cache_saved, stats.cache_save_failures, stats.cache_pending) == (0, 1, 0)
