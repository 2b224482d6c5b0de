"""What a client sees of a server whose disk is slower than the network."""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forks import in_a_fork
from support.leaks import LeakCheck, eventually
from support.raw_client import RawClient

from weightwire.cache.directory import entry_name
from weightwire.hashing import fnv1a64
from weightwire.server import Server
from weightwire.wire import Command

SIZE = 9 << 20


def data(seed: int, nbytes: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def on_writing(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Have ``do`` called before each write of an entry's bytes."""
    real = os.write

    def write(fd: int, content: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".tmp"):
            do()
        return real(fd, content)

    monkeypatch.setattr("weightwire.cache.store.os.write", write)


class Held:
    """Holds every write of an entry back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        on_writing(monkeypatch, self._wait)

    def _wait(self) -> None:
        self.reached.set()
        assert self.open.wait(20)


def whole(directory: Path, payloads: list[bytes]) -> bool:
    names = {entry_name(fnv1a64(payload)): payload for payload in payloads}
    if set(os.listdir(directory)) != set(names):
        return False
    return all((directory / name).read_bytes() == payload for name, payload in names.items())


def free_memory(client: RawClient) -> int:
    body = client.dialect.encode_device(Command.GET_DEVICE_MEMORY, 0)
    free, _ = struct.unpack("<QQ", client.ask(Command.GET_DEVICE_MEMORY, body))
    return int(free)


def test_one_buffer_for_all_tensors_keeps_every_one(
    tmp_path: Path, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `warm` fills a cache."""
    monkeypatch.setattr("weightwire.cache.progress.PATIENCE", 2.0)
    on_writing(monkeypatch, lambda: time.sleep(0.1))
    payloads = [data(seed) for seed in range(8)]
    with Server(port=0, cache=tmp_path) as server:
        with RawClient(server.port) as client:
            buffer = client.allocate(SIZE)
            for index, payload in enumerate(payloads):
                client.set(client.place(f"t{index}", SIZE, buffer), payload, flag=1)
            client.barrier()
        assert eventually(lambda: whole(tmp_path, payloads))


def test_a_disk_that_does_nothing_holds_no_push_up(
    tmp_path: Path, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    payloads = [data(seed, 1 << 20) for seed in range(300)]
    with Server(port=0, cache=tmp_path) as server:
        with RawClient(server.port) as client:
            buffer = client.allocate(len(payloads) << 20)
            for index, payload in enumerate(payloads):
                client.set(client.place(f"t{index}", 1 << 20, buffer, index << 20), payload, flag=1)
            client.barrier()
        assert held.reached.wait(20)
        held.open.set()
        assert eventually(lambda: whole(tmp_path, payloads))


def test_memory_that_was_freed_can_be_had_before_the_disk_has_it(
    tmp_path: Path, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    payload = data(3)
    with Server(port=0, cache=tmp_path, memory=SIZE) as server:
        with RawClient(server.port) as client:
            buffer = client.allocate(SIZE)
            client.set(client.place("t", SIZE, buffer), payload, flag=1)
            client.barrier()
            assert held.reached.wait(20)
            client.tell(Command.FREE_BUFFER, client.dialect.encode_handle(buffer[0]))
            assert free_memory(client) == SIZE
            threading.Timer(0.2, held.open.set).start()
            client.allocate(SIZE)
        assert eventually(lambda: whole(tmp_path, [payload]))


def test_a_client_is_worth_more_than_an_entry(
    tmp_path: Path, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightwire.cache.progress.PATIENCE", 0.2)
    held = Held(monkeypatch)
    first, second = data(4), data(5)
    with Server(port=0, cache=tmp_path, memory=2 * SIZE) as server:
        with RawClient(server.port) as client:
            buffers = [client.allocate(SIZE) for _ in range(2)]
            client.set(client.place("t", SIZE, buffers[0]), first, flag=1)
            client.barrier()
            assert held.reached.wait(20)
            # The second one waits behind the first, which the disk has its hands on.
            client.set(client.place("t", SIZE, buffers[1]), second, flag=1)
            client.barrier()
            client.tell(Command.FREE_BUFFER, client.dialect.encode_handle(buffers[1][0]))
            client.allocate(SIZE)
            held.open.set()
        assert eventually(lambda: whole(tmp_path, [first]))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_fork_leaves_what_is_being_kept_alone(
    tmp_path: Path, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    payload = data(6)
    with Server(port=0, cache=tmp_path) as server:
        with RawClient(server.port) as client:
            client.set(client.place("t", SIZE, client.allocate(SIZE)), payload, flag=1)
            client.barrier()
            assert held.reached.wait(20)
            assert in_a_fork(server.close) == 0
            assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
            held.open.set()
        assert eventually(lambda: whole(tmp_path, [payload]))
