"""SET_TENSOR_HASH: questions that come in a row, and what happens around them."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.leaks import LeakCheck, eventually
from support.raw_client import RawClient
from support.reads import around_reads

from weightwire.cache.directory import entry_name
from weightwire.cache.quarantine import FOLDER
from weightwire.cache.reading import PIECE
from weightwire.errors import ConfigError
from weightwire.hashing import fnv1a64
from weightwire.server import Server, filling
from weightwire.wire import Command, RpcTensor

SIZE = 300_000


def data(seed: int, nbytes: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.fixture
def server(tmp_path: Path, no_leaks: LeakCheck) -> Iterator[Server]:
    with Server(port=0, cache=tmp_path) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[RawClient]:
    with RawClient(server.port) as connected:
        yield connected


def store(directory: Path, payload: bytes) -> int:
    content_hash = fnv1a64(payload)
    (directory / entry_name(content_hash)).write_bytes(payload)
    return content_hash


def question(client: RawClient, tensor: RpcTensor, content_hash: int, offset: int = 0) -> bytes:
    body = client.dialect.encode_set_tensor_hash(tensor, offset, content_hash)
    return struct.pack("<BQ", Command.SET_TENSOR_HASH, len(body)) + body


def write(client: RawClient, tensor: RpcTensor, payload: bytes, flag: int = 0) -> bytes:
    body = client.dialect.encode_set_tensor(tensor, 0, flag) + payload
    return struct.pack("<BQ", Command.SET_TENSOR, len(body)) + body


class Slow:
    """Holds reads of one file back, and knows which files have been read from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: Path) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.seen: set[str] = set()

        def around(fd: int, offset: int, read: Callable[[], None]) -> None:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            if name == held.name:
                self.reached.set()
                assert self.open.wait(20)
            read()
            self.seen.add(name)

        around_reads(monkeypatch, around)


def test_a_long_row_is_answered_in_order(client: RawClient, server: Server, tmp_path: Path) -> None:
    payloads = [data(seed, 1000 + 100_000 * (seed % 4)) for seed in range(40)]
    buffer = client.allocate(sum(map(len, payloads)))
    asked, at, tensors = b"", 0, []
    for index, payload in enumerate(payloads):
        tensors.append(client.place(f"t{index}", len(payload), buffer, at))
        at += len(payload)
        content_hash = store(tmp_path, payload) if index % 3 else fnv1a64(payload)
        asked += question(client, tensors[-1], content_hash)
    client.socket.sendall(asked)
    answers = [client.answer() for _ in payloads]
    assert answers == [b"\1" if index % 3 else b"\0" for index in range(40)]
    for index, (tensor, payload) in enumerate(zip(tensors, payloads, strict=True)):
        if index % 3:
            assert client.get(tensor) == payload
    assert sorted(server.tensors) == sorted(f"t{index}" for index in range(40) if index % 3)


def test_the_next_ones_are_read_while_the_first_is_slow(
    client: RawClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries larger than what the client's own thread would read itself, so that workers take them."""
    payloads = [data(seed, PIECE) for seed in range(3)]
    hashes = [store(tmp_path, payload) for payload in payloads]
    slow = Slow(monkeypatch, tmp_path / entry_name(hashes[0]))
    buffer = client.allocate(3 * PIECE)
    tensors = [client.place(f"t{index}", PIECE, buffer, index * PIECE) for index in range(3)]
    client.socket.sendall(b"".join(question(client, *pair) for pair in zip(tensors, hashes, strict=True)))
    assert eventually(lambda: {entry_name(hashes[1]), entry_name(hashes[2])} <= slow.seen)
    assert entry_name(hashes[0]) not in slow.seen
    client.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.socket.recv(1)
    client.socket.settimeout(30)
    slow.open.set()
    assert [client.answer() for _ in range(3)] == [b"\1"] * 3
    assert [client.get(tensor) for tensor in tensors] == payloads


def test_a_question_cut_in_the_middle_waits_for_its_rest(client: RawClient, tmp_path: Path) -> None:
    hashes = [store(tmp_path, data(seed)) for seed in range(2)]
    buffer = client.allocate(2 * SIZE)
    tensors = [client.place(f"t{index}", SIZE, buffer, index * SIZE) for index in range(2)]
    one, two = (question(client, *pair) for pair in zip(tensors, hashes, strict=True))
    for cut in (1, 5, 9, 100, len(two) - 1):
        client.socket.sendall(one + two[:cut])
        assert client.answer() == b"\1"
        client.socket.sendall(two[cut:])
        assert client.answer() == b"\1"


@pytest.mark.parametrize("shift", [0, 1, SIZE - 1, SIZE])
def test_questions_for_the_same_bytes_have_their_effect_in_order(
    client: RawClient, server: Server, tmp_path: Path, shift: int
) -> None:
    one, two = data(1), data(2)
    buffer = client.allocate(2 * SIZE)
    first, second = client.place("first", SIZE, buffer), client.place("second", SIZE, buffer, shift)
    row = [question(client, first, store(tmp_path, one)), question(client, second, store(tmp_path, two))] * 3
    client.socket.sendall(b"".join(row))
    assert [client.answer() for _ in row] == [b"\1"] * 6
    memory = bytearray(2 * SIZE)
    memory[:SIZE] = one
    memory[shift : shift + SIZE] = two
    assert client.get(client.place("all", 2 * SIZE, buffer)) == memory
    assert set(server.tensors) == ({"first", "second"} if shift == SIZE else {"second"})


def test_what_follows_a_row_sees_its_effect(client: RawClient, tmp_path: Path) -> None:
    hashes = [store(tmp_path, data(seed)) for seed in range(2)]
    buffer = client.allocate(2 * SIZE)
    tensors = [client.place(f"t{index}", SIZE, buffer, index * SIZE) for index in range(2)]
    row = b"".join(question(client, *pair) for pair in zip(tensors, hashes, strict=True))
    client.socket.sendall(row + write(client, tensors[1], b"over" * 10) + row[: len(row) // 2])
    assert [client.answer() for _ in range(3)] == [b"\1"] * 3
    assert client.get(tensors[1]) == b"over" * 10 + data(1)[40:]
    handle = struct.pack("<BQ", Command.FREE_BUFFER, 8) + client.dialect.encode_handle(buffer[0])
    client.socket.sendall(row + handle)
    assert [client.answer() for _ in range(2)] == [b"\1"] * 2
    client.barrier()


def test_one_that_is_not_in_order_ends_the_client_after_those_before_it(
    client: RawClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content_hash = store(tmp_path, data(1))
    buffer = client.allocate(2 * SIZE)
    good, outside = client.place("good", SIZE, buffer), client.place("outside", SIZE, buffer, SIZE + 1)
    client.socket.sendall(question(client, good, content_hash) + question(client, outside, content_hash))
    assert client.answer() == b"\1"
    assert client.closed()
    assert "SET_TENSOR_HASH of tensor 'outside'" in caplog.text


def test_a_bad_one_in_a_row_spoils_itself_only(client: RawClient, server: Server, tmp_path: Path) -> None:
    hashes = [store(tmp_path, data(seed)) for seed in range(4)]
    (tmp_path / entry_name(hashes[1])).write_bytes(bytes(SIZE))
    (tmp_path / entry_name(hashes[2])).write_bytes(b"short")
    buffer = client.allocate(5 * SIZE)
    tensors = [client.place(f"t{index}", SIZE, buffer, index * SIZE) for index in range(5)]
    # The flipped one is wanted twice: the second time it is in quarantine already, or being read.
    row = [*zip(tensors, hashes, strict=False), (tensors[4], hashes[1])]
    client.socket.sendall(b"".join(question(client, *pair) for pair in row))
    assert [client.answer() for _ in row] == [b"\1", b"\0", b"\0", b"\1", b"\0"]
    assert sorted(server.tensors) == ["t0", "t3"]
    assert len(os.listdir(tmp_path / FOLDER)) == 2
    client.set(tensors[1], data(1))
    assert client.get(tensors[1]) == data(1)


def test_a_client_that_leaves_in_a_row_leaves_nothing_open(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = [store(tmp_path, data(seed, PIECE)) for seed in range(3)]
    slow = Slow(monkeypatch, tmp_path / entry_name(hashes[0]))
    with RawClient(server.port) as client:
        buffer = client.allocate(3 * PIECE)
        for index, content_hash in enumerate(hashes):
            client.socket.sendall(
                question(client, client.place(f"t{index}", PIECE, buffer, index * PIECE), content_hash)
            )
        assert slow.reached.wait(20)
    slow.open.set()
    assert eventually(lambda: server.clients == 0)
    assert not server.tensors


def test_the_server_closes_while_an_entry_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture
) -> None:
    content_hash = store(tmp_path, data(1, 8 * PIECE))
    slow = Slow(monkeypatch, tmp_path / entry_name(content_hash))
    server = Server(port=0, cache=tmp_path).start()
    with RawClient(server.port) as client:
        tensor = client.place("t", 8 * PIECE, client.allocate(8 * PIECE))
        client.socket.sendall(question(client, tensor, content_hash))
        assert slow.reached.wait(20)
        release = threading.Timer(0.2, slow.open.set)
        release.start()
        server.close()
        release.join()
        assert client.closed()
    assert not caplog.records


def test_a_question_waits_for_the_save_it_asks_for(
    server: Server, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another connection too, and however long the disk takes to sync."""
    go, real = threading.Event(), os.fsync
    monkeypatch.setattr("weightwire.cache.store.os.fsync", lambda fd: go.wait(20) and real(fd))
    payload = data(3)
    client.set(client.place("t", SIZE, client.allocate(SIZE)), payload, flag=1)
    client.barrier()  # which does not wait for the disk
    with RawClient(server.port) as other:
        tensor = other.place("again", SIZE, other.allocate(SIZE))
        other.socket.sendall(question(other, tensor, fnv1a64(payload)))
        other.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.socket.recv(1)
        other.socket.settimeout(30)
        go.set()
        assert other.answer() == b"\1"
        assert other.get(tensor) == payload


@pytest.mark.parametrize("how", ["set", "hash", "memset", "clear", "copy"])
def test_whatever_overwrites_a_tensor_that_is_being_kept_waits(
    server: Server, client: RawClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    go, reached, real = threading.Event(), threading.Event(), os.write

    def held(fd: int, content: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".tmp"):
            reached.set()
            assert go.wait(20)
        return real(fd, content)

    other = store(tmp_path, data(5))
    monkeypatch.setattr("weightwire.cache.store.os.write", held)
    buffer = client.allocate(2 * SIZE)
    tensor, source = client.place("t", SIZE, buffer), client.place("s", SIZE, buffer, SIZE)
    client.set(tensor, data(4), flag=1)
    assert reached.wait(20)
    dialect = client.dialect
    if how == "set":
        client.socket.sendall(write(client, tensor, bytes(SIZE)))
    elif how == "hash":
        client.socket.sendall(question(client, tensor, other))
    elif how == "memset":
        client.send(Command.MEMSET_TENSOR, dialect.encode_memset(tensor, 0, SIZE, 7))
    elif how == "clear":
        client.send(Command.BUFFER_CLEAR, dialect.encode_buffer_clear(buffer[0], 7))
    else:
        client.send(Command.COPY_TENSOR, dialect.encode_copy_tensor(source, tensor))
    client.send(Command.GET_DEVICE_MEMORY, dialect.encode_device(Command.GET_DEVICE_MEMORY, 0))
    client.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.socket.recv(1)
    client.socket.settimeout(30)
    go.set()
    if how in ("hash", "copy"):
        assert client.answer() == b"\1"
    assert len(client.answer()) == 16
    server.close()
    assert (tmp_path / entry_name(fnv1a64(data(4)))).read_bytes() == data(4)


def test_a_client_that_leaves_at_once_has_its_tensors_kept_and_its_memory_back(
    tmp_path: Path, no_leaks: LeakCheck
) -> None:
    payload = data(6, 4 * PIECE)
    with Server(port=0, cache=tmp_path, memory=len(payload)) as server:
        for _ in range(3):
            with RawClient(server.port) as client:
                client.set(client.place("t", len(payload), client.allocate(len(payload))), payload, flag=1)
                client.barrier()
            assert eventually(lambda: server.clients == 0)
    assert (tmp_path / entry_name(fnv1a64(payload))).read_bytes() == payload
    assert os.listdir(tmp_path) == [entry_name(fnv1a64(payload))]


def test_a_hit_is_noted_in_the_time_of_access_and_nowhere_else(client: RawClient, tmp_path: Path) -> None:
    path = tmp_path / entry_name(store(tmp_path, data(7)))
    os.utime(path, ns=(10**18, 10**18))
    tensor = client.place("t", SIZE, client.allocate(SIZE))
    assert client.set_from_cache(tensor, fnv1a64(data(7)))
    assert path.stat().st_atime_ns > 1.7 * 10**18
    assert path.stat().st_mtime_ns == 10**18


@pytest.mark.parametrize("verify", ["content", "size"])
def test_what_is_checked_can_be_chosen(tmp_path: Path, no_leaks: LeakCheck, verify: str) -> None:
    (tmp_path / entry_name(5)).write_bytes(data(8))
    (tmp_path / entry_name(6)).write_bytes(data(8)[:-1])
    with Server(port=0, cache=tmp_path, cache_verify=verify) as server, RawClient(server.port) as client:
        tensor = client.place("t", SIZE, client.allocate(SIZE))
        assert client.set_from_cache(tensor, 5) == (verify == "size")
        assert not client.set_from_cache(tensor, 6)
        if verify == "size":
            assert client.get(tensor) == data(8)


def test_what_cannot_be_chosen(tmp_path: Path) -> None:
    from weightwire.cache import TensorCache

    with pytest.raises(ConfigError, match="cache_verify"):
        Server(cache=tmp_path, cache_verify="never")
    with pytest.raises(ConfigError, match="directory"):
        Server(cache=TensorCache(tmp_path), cache_verify="size")
    with pytest.raises(ConfigError, match="verify"):
        TensorCache(tmp_path, verify="sometimes")


def test_no_more_are_read_ahead_than_is_bounded(
    client: RawClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "MAX_AHEAD", 2 * PIECE)
    hashes = [store(tmp_path, data(seed, PIECE)) for seed in range(6)]
    slow = Slow(monkeypatch, tmp_path / entry_name(hashes[0]))
    buffer = client.allocate(6 * PIECE)
    tensors = [client.place(f"t{index}", PIECE, buffer, index * PIECE) for index in range(6)]
    client.socket.sendall(b"".join(question(client, *pair) for pair in zip(tensors, hashes, strict=True)))
    assert eventually(lambda: {entry_name(h) for h in hashes[1:3]} <= slow.seen)
    assert not {entry_name(h) for h in hashes[3:]} & slow.seen
    slow.open.set()
    assert [client.answer() for _ in range(6)] == [b"\1"] * 6


NEVER_CLOSED = """
import sys
from support.raw_client import RawClient
from support.reads import around_reads
from weightwire.server import Server
server = Server(port=0, cache=sys.argv[1]).start()
client = RawClient(server.port)
payload = bytes(8 << 20)
client.set(client.place("t", len(payload), client.allocate(len(payload))), payload, flag=1)
client.barrier()
"""


def test_a_server_that_is_never_closed_leaves_whole_entries(tmp_path: Path) -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", NEVER_CLOSED, str(tmp_path)], env=environment, check=True, timeout=60)
    (name,) = os.listdir(tmp_path)
    assert (tmp_path / name).read_bytes() == bytes(8 << 20)
    assert name == entry_name(fnv1a64(bytes(8 << 20)))
