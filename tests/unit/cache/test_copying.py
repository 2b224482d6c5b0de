"""Bytes of one file into another, in whichever way the file systems can."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cachedir import contents, write_model
from support.leaks import LeakCheck

from weightwire.cache import copying, pool, seed
from weightwire.cache.copying import CopyingWriter, StrictCache, copy_range
from weightwire.errors import ModelError
from weightwire.ranges import FileRange

BLOCK = 4096
DATA = os.urandom(5 * BLOCK + 100)


def nothing(*_: object) -> None:
    pass


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A file with DATA, and an empty one."""
    (tmp_path / "source").write_bytes(DATA)
    source = os.open(tmp_path / "source", os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield source, target
    os.close(source)
    os.close(target)


class Cloning:
    """Stands in for a file system that can share blocks: takes what ioctl_ficlonerange(2) allows, and copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int]] = []
        monkeypatch.setattr(fcntl, "ioctl", self)

    def __call__(self, target: int, request: int, argument: bytes) -> int:
        assert request == 0x4020940D
        source, offset, nbytes, into = struct.unpack("=qQQQ", argument)
        self.asked.append((offset, nbytes))
        assert into == 0
        if offset % BLOCK or (nbytes % BLOCK and offset + nbytes != os.fstat(source).st_size):
            raise OSError(errno.EINVAL, "Invalid argument")
        os.pwrite(target, os.pread(source, nbytes, offset), 0)
        return 0


@pytest.mark.parametrize(
    ("offset", "nbytes", "cloned"),
    [
        (0, len(DATA), 5 * BLOCK),
        (BLOCK, 2 * BLOCK, 2 * BLOCK),
        (BLOCK, 2 * BLOCK + 7, 2 * BLOCK),
        (32, 3 * BLOCK, 0),
        (BLOCK, BLOCK - 1, 0),
    ],
)
def test_whole_blocks_are_shared_and_the_rest_copied(
    offset: int, nbytes: int, cloned: int, files: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = files
    cloning = Cloning(monkeypatch)
    told: list[int] = []
    assert copy_range(FileRange(source, offset, nbytes), target, nothing, told.append) == cloned
    assert os.pread(target, nbytes + 1, 0) == DATA[offset : offset + nbytes]
    assert sum(told) == nbytes
    assert cloning.asked == ([(offset, cloned)] if cloned else [])


def test_the_kernel_copies(files: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By copy_file_range(2), all of it: not a byte passes through this process."""
    copied = []

    def copy_file_range(*arguments: Any) -> int:
        copied.append(right(*arguments))
        return copied[-1]

    def read(*_: object) -> int:
        raise AssertionError("read")

    right = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    monkeypatch.setattr(os, "preadv", read)
    source, target = files
    assert copy_range(FileRange(source, 10, len(DATA) - 20), target, nothing, nothing) == 0
    assert sum(copied) == len(DATA) - 20
    assert os.pread(target, len(DATA), 0) == DATA[10:-10]


def test_no_room_for_shared_blocks_is_an_error(files: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fcntl, "ioctl", full)
    with pytest.raises(OSError, match="No space left"):
        copy_range(FileRange(files[0], 0, len(DATA)), files[1], nothing, nothing)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_source_that_is_too_short(by_kernel: bool, files: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_kernel:
        monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    with pytest.raises(ModelError, match="shorter") as caught:
        copy_range(FileRange(files[0], 10, len(DATA), "the model"), files[1], nothing, nothing)
    assert (caught.value.path, caught.value.offset) == ("the model", len(DATA))


def test_a_source_that_cannot_be_read(files: tuple[int, int], tmp_path: Path) -> None:
    source = os.open(tmp_path / "source", os.O_WRONLY)
    try:
        with pytest.raises(ModelError, match="cannot read"):
            copy_range(FileRange(source, 0, 10), files[1], nothing, nothing)
    finally:
        os.close(source)


def test_a_target_that_cannot_be_written(files: tuple[int, int], tmp_path: Path) -> None:
    target = os.open(tmp_path / "target", os.O_RDONLY)
    try:
        with pytest.raises(OSError) as caught:
            copy_range(FileRange(files[0], 0, 10), target, nothing, nothing)
    finally:
        os.close(target)
    assert not isinstance(caught.value, ModelError)


def test_a_strict_writer_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = StrictCache(tmp_path / "cache")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(OSError, match="No space left"), CopyingWriter(cache) as writer:
                writer.fill(memoryview(DATA), nothing, nothing)
                writer.commit(5)
        assert os.listdir(cache.directory) == []
    cache.directory.rmdir()
    with pytest.raises(FileNotFoundError):
        CopyingWriter(cache)


@pytest.mark.parametrize("threads", [0, 2])
def test_an_interrupt_of_a_seeding_does_not_wait_for_the_disk(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    """Where it comes while an entry is brought there: the step that has begun is finished, and no other begins."""
    nbytes, steps = 11 << 20, 0
    model = write_model(tmp_path / "model.safetensors", contents(nbytes))
    begun, stopped = threading.Event(), threading.Event()

    def slow(fd: int, offset: int, nbytes: int, *, wait: bool) -> None:
        nonlocal steps
        steps += 1
        begun.set()
        assert not threads or stopped.wait(60)

    class Pool(pool._Pool):
        def close(self) -> None:
            self._stopped = True
            stopped.set()
            super().close()

    def interrupt(name: str, done: int, total: int) -> None:
        if begun.is_set():
            raise KeyboardInterrupt

    def no_wait(fd: int) -> None:
        raise AssertionError("the disk is waited for to have all of the entry")

    monkeypatch.setattr(copying, "_SYNC_STEP", 1 << 20)
    monkeypatch.setattr(copying, "write_back", slow)
    monkeypatch.setattr(pool, "_Pool", Pool)
    monkeypatch.setattr(os, "fsync", no_wait)
    with pytest.raises(KeyboardInterrupt):
        seed(model, tmp_path / "cache", threads=threads, index=False, progress=interrupt)
    assert steps == 1
    assert os.listdir(tmp_path / "cache") == []
