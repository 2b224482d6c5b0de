"""What a client sees of a server whose disk does nothing any more: it is waited for once, not once for each tensor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.leaks import LeakCheck, eventually
from support.raw_client import RawClient

from weightwire.cache import progress, saving
from weightwire.cache.directory import entry_name
from weightwire.hashing import fnv1a64
from weightwire.server import Destination, Server
from weightwire.server.buffers import Block
from weightwire.wire import Command

COUNT = 6
SIZE = 1 << 20
ALL = COUNT * SIZE


def content(seed: int) -> bytes:
    return bytes([seed + 1]) * SIZE


class Hook(Destination):
    """Memory that the server does not know of."""

    def __init__(self, nbytes: int, device: int) -> None:
        super().__init__(nbytes)
        self._memory = bytearray(nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        self._memory[offset : offset + view.nbytes] = view

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = self._memory[offset : offset + view.nbytes]

    def close(self) -> None: ...


class Stuck:
    """A disk that takes nothing until it is opened; counts who waited for it in vain."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self.in_vain = 0
        real = saving.write_back
        monkeypatch.setattr(progress, "PATIENCE", 0.2)

        def held(*arguments: Any, **options: Any) -> None:
            self.reached.set()
            assert self.open.wait(60)
            real(*arguments, **options)

        monkeypatch.setattr(saving, "write_back", held)

    def watch(self, server: Server) -> None:
        assert server._saver is not None
        condition = server._saver.condition
        real = condition.wait_for

        def wait_for(predicate: Callable[[], object], timeout: float | None = None) -> object:
            met = real(predicate, timeout)
            self.in_vain += timeout is not None and not met
            return met

        condition.wait_for = wait_for  # type: ignore[method-assign, assignment]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    made = Stuck(monkeypatch)
    yield made
    made.open.set()


def clear(client: RawClient, buffer: tuple[int, int]) -> None:
    client.tell(Command.BUFFER_CLEAR, client.dialect.encode_buffer_clear(buffer[0], 9))


def set_whole(client: RawClient, buffer: tuple[int, int]) -> None:
    client.set(client.place("whole", ALL, buffer), bytes([9]) * ALL)


def set_each(client: RawClient, buffer: tuple[int, int]) -> None:
    for at in range(COUNT):
        client.set(client.place(f"n{at}", SIZE, buffer, at * SIZE), bytes([9]) * SIZE)


def keep_each(client: RawClient, buffer: tuple[int, int]) -> None:
    """Each is hashed once it is there, which is no progress of the disk's."""
    for at in range(COUNT):
        client.set(client.place(f"n{at}", SIZE, buffer, at * SIZE), bytes([9]) * SIZE, flag=1)
        client.barrier()


def fill_each(client: RawClient, buffer: tuple[int, int]) -> None:
    for at in range(COUNT):
        tensor = client.place(f"n{at}", SIZE, buffer, at * SIZE)
        assert client.set_from_cache(tensor, fnv1a64(bytes([9]) * SIZE))


def memset(client: RawClient, buffer: tuple[int, int]) -> None:
    body = client.dialect.encode_memset(client.place("whole", ALL, buffer), 0, ALL, 9)
    client.tell(Command.MEMSET_TENSOR, body)


def rows(client: RawClient, buffer: tuple[int, int]) -> None:
    whole = client.place("whole", ALL, buffer)
    body = client.dialect.encode_set_tensor_2d(whole, 0, SIZE, COUNT, SIZE)
    client.tell(Command.SET_TENSOR_2D, body + bytes([9]) * ALL)


def copy(client: RawClient, buffer: tuple[int, int]) -> None:
    other = client.place("source", ALL, client.allocate(ALL))
    client.set(other, bytes([9]) * ALL)
    body = client.dialect.encode_copy_tensor(other, client.place("whole", ALL, buffer))
    client.ask(Command.COPY_TENSOR, body)


@pytest.mark.parametrize("overwrite", [clear, set_whole, set_each, keep_each, fill_each, memset, rows, copy])
def test_who_overwrites_waits_once_for_all(
    overwrite: Callable[[RawClient, tuple[int, int]], None], stuck: Stuck, tmp_path: Path, no_leaks: LeakCheck
) -> None:
    there = entry_name(fnv1a64(bytes([9]) * SIZE))
    (tmp_path / there).write_bytes(bytes([9]) * SIZE)
    with Server(port=0, cache=tmp_path, protocol="8.0") as server:
        stuck.watch(server)
        with RawClient(server.port, "8.0") as client:
            buffer = client.allocate(ALL)
            for at in range(COUNT):
                client.set(client.place(f"t{at}", SIZE, buffer, at * SIZE), content(at), flag=1)
            client.barrier()
            assert stuck.reached.wait(60)
            overwrite(client, buffer)
            client.barrier()
            assert stuck.in_vain == 1
            assert client.get(client.place("whole", ALL, buffer)) == bytes([9]) * ALL
        stuck.open.set()
    assert os.listdir(tmp_path) == [there]


def test_a_disk_that_gets_on_again_is_waited_for_again(stuck: Stuck, tmp_path: Path, no_leaks: LeakCheck) -> None:
    with Server(port=0, cache=tmp_path) as server, RawClient(server.port) as client:
        stuck.watch(server)
        buffer = client.allocate(ALL)
        client.set(client.place("a", SIZE, buffer), content(1), flag=1)
        assert stuck.reached.wait(60)
        clear(client, buffer)
        client.barrier()
        assert stuck.in_vain == 1
        stuck.open.set()
        assert server._saver is not None
        assert eventually(lambda: server._saver is not None and not server._saver._pending)
        stuck.open.clear()
        stuck.reached.clear()
        client.set(client.place("b", SIZE, buffer), content(2), flag=1)
        assert stuck.reached.wait(60)
        clear(client, buffer)
        client.barrier()
        assert stuck.in_vain == 2
        stuck.open.set()
    assert os.listdir(tmp_path) == []


def test_files_for_a_stuck_disk_do_not_pile_up(
    stuck: Stuck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    """Of a hook's destination the session writes them itself: up to so many wait for the disk, others are lost."""
    monkeypatch.setattr(saving, "_MAX_FILES", 2)
    with Server(port=0, cache=tmp_path, destination=Hook) as server, RawClient(server.port) as client:
        stuck.watch(server)
        buffer = client.allocate(ALL)
        for at in range(COUNT):
            client.set(client.place(f"t{at}", SIZE, buffer, at * SIZE), content(at), flag=1)
            if not at:
                client.barrier()
                assert stuck.reached.wait(60)  # the first is at the disk, none waits for it
        client.barrier()
        assert stuck.in_vain == 1
        assert len(os.listdir(tmp_path)) == 3
        assert server.stats().cache_save_failures == COUNT - 3
        stuck.open.set()
    assert sorted(os.listdir(tmp_path)) == sorted(entry_name(fnv1a64(content(at))) for at in range(3))


def test_a_disk_that_gets_on_too_slowly_has_one_deadline_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    left: list[float | None] = []

    class Slow:
        window = memoryview(b"1234")

        def settle(self, end: int | None = None, longest: float | None = None) -> None:
            nonlocal now
            left.append(longest)
            now += 8.0

    monkeypatch.setattr("weightwire.server.buffers.time.monotonic", lambda: now)
    Block.settle([(0, 4, Slow())] * 4, 4)  # type: ignore[list-item]
    assert left == [20.0, 12.0, 4.0, 0.0]
