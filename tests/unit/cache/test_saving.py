"""Tensors kept while the next ones are received."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.leaks import LeakCheck, eventually

from weightwire.cache import progress, saving, store, writing
from weightwire.cache.kept import Save
from weightwire.cache.saving import Saver
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
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    gate = Gate(monkeypatch, "write")
    memory = bytearray(data(4))
    save = receive(saver, memory)
    assert gate.reached.wait(20)
    save.settle()
    memory[:] = bytes(SIZE)
    gate.open.set()
    assert eventually(lambda: os.listdir(cache.directory) == [])
    assert eventually(lambda: not saver._pending)


def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every write of an entry's bytes takes that long."""
    real = os.write

    def slowly(fd: int, content: memoryview) -> int:
        time.sleep(seconds)
        return real(fd, content)

    monkeypatch.setattr(store.os, "write", slowly)


def test_a_backlog_loses_nothing_and_holds_nobody_up(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "SOON", SIZE)
    gate = Gate(monkeypatch, "write")
    for seed in range(20):
        receive(saver, bytearray(data(seed)))
    assert gate.reached.wait(20)
    # Far from being written, so that to wait for it would take long.
    saver.settled(fnv1a64(data(19)), SIZE)
    assert not os.path.exists(cache.path_for(fnv1a64(data(19))))
    gate.open.set()
    assert eventually(lambda: not saver._pending)
    assert sorted(os.listdir(cache.directory)) == sorted(f"{fnv1a64(data(seed)):016x}" for seed in range(20))


def test_memory_may_be_overwritten_as_far_as_it_has_been_written(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One buffer for one tensor after the other, in pieces, on a disk slower than they come."""
    monkeypatch.setattr(progress, "PATIENCE", 2.0)
    monkeypatch.setattr(saving, "_STEP", 1 << 20)
    slow_disk(monkeypatch, 0.05)
    memory = bytearray(SIZE)
    last: Save | None = None
    for seed in range(12):
        payload = data(seed)
        save = saver.begin(memoryview(memory))
        assert save is not None
        for start in range(0, SIZE, 1 << 20):
            end = start + (1 << 20)
            if last is not None:
                last.settle(end)
            memory[start:end] = payload[start:end]
            save.landed(end)
        save.complete()
        last = save
    assert eventually(lambda: not saver._pending)
    assert sorted(os.listdir(cache.directory)) == sorted(f"{fnv1a64(data(seed)):016x}" for seed in range(12))
    assert all(cache.holds(fnv1a64(data(seed)), data(seed)) for seed in range(12))


def test_who_overwrites_comes_before_the_others(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "write")
    saves = [receive(saver, bytearray(data(seed))) for seed in range(4)]
    assert gate.reached.wait(20)
    assert eventually(lambda: len(saver._to_write) == 3)
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(saves[3].settle() is None))
    thread.start()
    assert eventually(lambda: saver._to_write[0] is saves[3])
    gate.open.set()
    thread.join(20)
    assert done
    assert eventually(lambda: not saver._pending)
    assert len(os.listdir(cache.directory)) == 4


def test_a_disk_that_gets_on_is_waited_for_and_one_that_hangs_is_not(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.5)
    monkeypatch.setattr(saving, "_STEP", 256 << 10)
    with monkeypatch.context() as patch:
        slow_disk(patch, 0.05)
        receive(saver, bytearray(data(5))).settle()  # takes a second in all
        saver.settled(fnv1a64(data(5)), SIZE)
    assert cache.holds(fnv1a64(data(5)), data(5))
    assert not caplog.records
    gate = Gate(monkeypatch, "write")
    saves = [receive(saver, bytearray(data(seed))) for seed in (6, 7)]
    assert gate.reached.wait(20)
    for save in saves:
        save.settle()
        assert save.window is None
    gate.open.set()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cannot keep up" in caplog.text
    assert eventually(lambda: os.listdir(cache.directory) == [f"{fnv1a64(data(5)):016x}"])


def test_nobody_waits_longer_than_a_client_does(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LONGEST", 0.3)
    monkeypatch.setattr(saving, "_STEP", 256 << 10)
    slow_disk(monkeypatch, 0.1)
    save = receive(saver, bytearray(data(8)))
    save.settle()
    assert save.window is None
    assert eventually(lambda: not saver._pending)
    assert os.listdir(cache.directory) == []


def test_memory_that_was_left_is_written_when_it_is_wanted_or_given_up(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "write")
    saves = [receive(saver, bytearray(data(seed))) for seed in range(3)]
    saver.leave(4 * SIZE, saves)
    assert gate.reached.wait(20)
    assert saver.left == 4 * SIZE
    monkeypatch.setattr(progress, "PATIENCE", 0.1)
    assert saver.clear(lambda: all(save.window is None for save in saves))
    assert saver.left == 0
    gate.open.set()
    assert eventually(lambda: os.listdir(cache.directory) == [])
    saves = [receive(saver, bytearray(data(seed))) for seed in range(3)]
    saver.leave(4 * SIZE, saves)
    monkeypatch.setattr(progress, "PATIENCE", 10.0)
    assert saver.clear(lambda: all(save.window is None for save in saves))
    assert eventually(lambda: not saver._pending)
    assert len(os.listdir(cache.directory)) == 3


def test_the_names_of_new_entries_are_synced_once_for_many(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = TensorCache.sync_names

    def counted(self: TensorCache) -> None:
        real(self)
        synced.append(len(os.listdir(self.directory)))

    monkeypatch.setattr(TensorCache, "sync_names", counted)
    gate = Gate(monkeypatch, "fsync")
    for seed in range(6):
        receive(saver, bytearray(data(seed, 50_000)))
    assert gate.reached.wait(20)
    assert eventually(lambda: len(saver._to_sync) == 5)
    gate.open.set()
    assert eventually(lambda: bool(synced))
    assert synced == [6]


def test_the_name_of_an_entry_is_synced_without_a_thread_too(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[list[str]] = []
    monkeypatch.setattr(TensorCache, "sync_names", lambda self: synced.append(os.listdir(self.directory)))

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    content = data(1)
    writer = cache.writer()
    writer.write(content)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        saver.put(writer, fnv1a64(content), len(content))
    assert saver.counts() == (1, 0, 0)
    assert synced == [[cache.path_for(fnv1a64(content)).name]]


def test_comparing_with_an_entry_that_is_there_can_be_stopped(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = data(1)
    cache.path_for(fnv1a64(content)).write_bytes(content)
    writer = cache.writer()
    writer.write(content)
    read, looks = os.pread, 0

    def stopped_at_once(fd: int, nbytes: int, offset: int) -> bytes:
        nonlocal looks
        looks += 1
        assert saver._syncing is not None
        saver._syncing.cancelled = True
        return read(fd, nbytes, offset)

    def no_wait(fd: int) -> None:
        raise AssertionError("the disk is waited for")

    monkeypatch.setattr(os, "pread", stopped_at_once)
    monkeypatch.setattr(os, "fsync", no_wait)
    saver.put(writer, fnv1a64(content), len(content))
    assert eventually(lambda: not saver._pending)
    assert looks == 2, "one piece of either file"
    assert os.listdir(cache.directory) == [cache.path_for(fnv1a64(content)).name]


def test_what_did_not_arrive_is_not_kept(cache: TensorCache, saver: Saver) -> None:
    save = saver.begin(memoryview(bytearray(SIZE)))
    assert save is not None
    save.landed(SIZE // 2)
    save.abandon()
    assert eventually(lambda: not saver._pending)
    assert os.listdir(cache.directory) == []


def test_the_same_tensor_of_several_clients_is_written_once(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "fsync")
    made: list[str] = []
    real = writing.tempfile.mkstemp
    monkeypatch.setattr(writing.tempfile, "mkstemp", lambda **named: made.append("") or real(**named))
    for _ in range(4):
        receive(saver, bytearray(data(8)))
    assert eventually(lambda: all(save.window is None for save in saver._pending))
    gate.open.set()
    saver.settled(fnv1a64(data(8)), SIZE)
    receive(saver, bytearray(data(8)))
    saver.settled(fnv1a64(data(8)), SIZE)
    assert len(made) == 1


def test_without_a_descriptor_to_compare_with_each_is_stored_all_the_same(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch, "fsync")

    def crowded(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", crowded)
    for _ in range(3):
        receive(saver, bytearray(data(8)))
    assert gate.reached.wait(20)
    assert eventually(lambda: all(save.window is None for save in saver._pending))
    gate.open.set()
    saver.settled(fnv1a64(data(8)), SIZE)
    receive(saver, bytearray(data(9)))
    saver.settled(fnv1a64(data(9)), SIZE)
    assert cache.path_for(fnv1a64(data(8))).read_bytes() == data(8)
    assert cache.path_for(fnv1a64(data(9))).read_bytes() == data(9)
    assert (saver.counts()[1:], caplog.records) == ((0, 0), [])


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


def test_comparing_with_what_is_there_ends_with_the_saver(
    cache: TensorCache, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = bytearray(data(9))
    with cache.writer() as writer:
        writer.write(memory)
        assert writer.commit(fnv1a64(memory))
    monkeypatch.setattr(store, "_PIECE", 1 << 10)  # thousands of them
    right = store.first_difference
    reached, go = threading.Event(), threading.Event()
    compared = 0

    def comparing(one: memoryview, other: memoryview) -> int:
        nonlocal compared
        compared += 1
        reached.set()
        assert go.wait(20)
        return right(one, other)

    monkeypatch.setattr(store, "first_difference", comparing)
    receive(saver, memory)
    assert reached.wait(20)
    saver.close(0.1)
    go.set()
    assert eventually(lambda: not any(thread.is_alive() for thread in saver._threads))
    assert compared == 1
    assert os.listdir(cache.directory) == [cache.path_for(fnv1a64(data(9))).name]
