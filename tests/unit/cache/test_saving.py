"""Tensors kept while the next ones are received."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.leaks import LeakCheck, eventually

from weightwire.cache import saving, store
from weightwire.cache.saving import Save, Saver
from weightwire.cache.store import TensorCache
from weightwire.cache.workers import Workers
from weightwire.hashing import fnv1a64

SIZE = 5 << 20


def data(seed: int = 0, nbytes: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path)


@pytest.fixture
def saver(cache: TensorCache, no_leaks: LeakCheck) -> Iterator[Saver]:
    workers = Workers()
    made = Saver(cache, workers)
    yield made
    made.close()
    workers.close()


def receive(saver: Saver, memory: bytearray, step: int = 1 << 20) -> Save:
    save = saver.begin(memoryview(memory))
    assert save is not None
    for end in range(step, len(memory) + step, step):
        save.landed(min(end, len(memory)))
    save.complete()
    return save


class Gate:
    """Holds calls of an `os` function back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        real: Callable[..., object] = getattr(os, name)

        def held(*arguments: object, **options: object) -> object:
            self.reached.set()
            assert self.open.wait(20)
            return real(*arguments, **options)

        monkeypatch.setattr(store.os, name, held)


@pytest.mark.parametrize("nbytes", [1, 100_000, SIZE])
def test_kept(cache: TensorCache, saver: Saver, nbytes: int) -> None:
    memory = bytearray(data(1, nbytes))
    receive(saver, memory, 30_000)
    saver.settled(fnv1a64(memory), nbytes)
    assert cache.path_for(fnv1a64(memory)).read_bytes() == memory
    assert os.listdir(cache.directory) == [cache.path_for(fnv1a64(memory)).name]


def test_memory_is_not_changed_under_the_writer(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "write")
    memory = bytearray(data(2))
    save = receive(saver, memory)
    assert gate.reached.wait(20)
    free = threading.Event()

    def overwrite() -> None:
        save.settle()
        memory[:] = bytes(SIZE)
        free.set()

    thread = threading.Thread(target=overwrite)
    thread.start()
    assert not free.wait(0.2)
    gate.open.set()
    thread.join(20)
    assert free.is_set()
    saver.settled(fnv1a64(data(2)), SIZE)
    assert cache.path_for(fnv1a64(data(2))).read_bytes() == data(2)


def test_memory_is_free_while_the_disk_syncs(cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "fsync")
    memory = bytearray(data(3))
    save = receive(saver, memory)
    save.settle()
    memory[:] = bytes(SIZE)
    assert gate.reached.wait(20)
    assert not cache.path_for(fnv1a64(data(3))).exists()
    gate.open.set()
    saver.settled(fnv1a64(data(3)), SIZE)
    assert cache.path_for(fnv1a64(data(3))).read_bytes() == data(3)


def test_a_disk_too_slow_for_who_overwrites_loses_the_entry(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "PATIENCE", 0.05)
    gate = Gate(monkeypatch, "write")
    memory = bytearray(data(4))
    save = receive(saver, memory)
    assert gate.reached.wait(20)
    save.settle()
    memory[:] = bytes(SIZE)
    gate.open.set()
    assert eventually(lambda: os.listdir(cache.directory) == [])
    assert eventually(lambda: not saver._pending)


def test_too_much_at_once_waits_and_then_is_not_kept(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "PATIENCE", 0.05)
    monkeypatch.setattr(saving, "MAX_UNWRITTEN", 2 * SIZE)
    gate = Gate(monkeypatch, "write")
    for seed in (5, 6):
        receive(saver, bytearray(data(seed)))
    for _ in range(2):
        assert saver.begin(memoryview(bytearray(SIZE))) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cannot keep up" in caplog.text
    monkeypatch.setattr(saving, "PATIENCE", 20)
    gate.open.set()
    receive(saver, bytearray(data(7)))  # waits until there is room
    saver.settled(fnv1a64(data(7)), SIZE)
    assert len(os.listdir(cache.directory)) == 3


def test_what_did_not_arrive_is_not_kept(cache: TensorCache, saver: Saver) -> None:
    save = saver.begin(memoryview(bytearray(SIZE)))
    assert save is not None
    save.landed(SIZE // 2)
    save.abandon()
    assert eventually(lambda: not saver._pending)
    assert saver.unwritten == 0
    assert os.listdir(cache.directory) == []


def test_the_same_tensor_of_several_clients_is_written_once(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "fsync")
    made: list[str] = []
    real = store.tempfile.mkstemp
    monkeypatch.setattr(store.tempfile, "mkstemp", lambda **named: made.append("") or real(**named))
    for _ in range(4):
        receive(saver, bytearray(data(8)))
    assert eventually(lambda: saver.unwritten == 0)
    gate.open.set()
    saver.settled(fnv1a64(data(8)), SIZE)
    receive(saver, bytearray(data(8)))
    saver.settled(fnv1a64(data(8)), SIZE)
    assert len(made) == 1


def test_closing_finishes_what_was_received(cache: TensorCache, no_leaks: LeakCheck) -> None:
    workers = Workers()
    saver = Saver(cache, workers)
    for seed in range(4):
        receive(saver, bytearray(data(seed)))
    unfinished = saver.begin(memoryview(bytearray(SIZE)))
    assert unfinished is not None
    unfinished.landed(1 << 20)
    saver.close(20)
    workers.close()
    assert sorted(os.listdir(cache.directory)) == sorted(f"{fnv1a64(data(seed)):016x}" for seed in range(4))
    assert saver.begin(memoryview(bytearray(1))) is None


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_closing_does_not_wait_for_ever_and_leaves_no_file(
    cache: TensorCache,
    no_leaks: LeakCheck,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    workers = Workers()
    saver = Saver(cache, workers)
    gate = Gate(monkeypatch, call)
    for seed in range(3):
        receive(saver, bytearray(data(seed)))
    assert gate.reached.wait(20)
    saver.close(0.1)
    assert os.listdir(cache.directory) == []
    assert "could not be stored in time" in caplog.text
    gate.open.set()
    workers.close()
    assert eventually(lambda: not any(thread.is_alive() for thread in saver._threads))
    assert os.listdir(cache.directory) == []


def test_a_full_disk_loses_the_entry_and_nothing_else(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, content: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "write", full)
        receive(saver, bytearray(data(9)))
        saver.settled(fnv1a64(data(9)), SIZE)
    assert "No space left" in caplog.text
    assert os.listdir(cache.directory) == []
    receive(saver, bytearray(data(9)))
    saver.settled(fnv1a64(data(9)), SIZE)
    assert cache.holds(fnv1a64(data(9)), data(9))


def test_memory_is_given_back_when_it_is_written(saver: Saver) -> None:
    import weakref

    class Memory(bytearray):
        pass

    memory = Memory(data(10))
    alive = weakref.ref(memory)
    save = receive(saver, memory)
    del memory
    save.settle()
    del save
    assert eventually(lambda: alive() is None)
