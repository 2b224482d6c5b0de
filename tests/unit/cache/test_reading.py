"""Entries read into memory in parallel pieces, hashed behind the reading."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.leaks import LeakCheck, eventually
from support.reads import before_reads

from weightwire.cache import reading
from weightwire.cache.reading import PIECE, EntryChanged, Reader, ReadingStopped
from weightwire.cache.workers import Workers
from weightwire.hashing import fnv1a64

SIZES = [1, 4096, 300_000, PIECE, 3 * PIECE + 17]


@pytest.fixture
def workers(no_leaks: LeakCheck) -> Iterator[Workers]:
    made = Workers(3)
    yield made
    made.close()


def address(buffer: bytearray | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def start(reader: Reader, path: Path, target: bytearray, *, hashed: bool = True, placed_at: int = 0) -> reading.Fill:
    return reader.start(os.open(path, os.O_RDONLY), memoryview(target), placed_at, hashed=hashed)


@pytest.mark.parametrize("placed_at", [0, 64, PIECE - 1])
@pytest.mark.parametrize("hashed", [True, False])
def test_several_at_once(tmp_path: Path, workers: Workers, placed_at: int, hashed: bool) -> None:
    payloads = [random.Random(size).randbytes(size) for size in SIZES]
    for index, payload in enumerate(payloads):
        (tmp_path / str(index)).write_bytes(payload)
    reader = Reader(workers)
    targets = [bytearray(size) for size in SIZES]
    fills = [
        start(reader, tmp_path / str(index), target, hashed=hashed, placed_at=placed_at)
        for index, target in enumerate(targets)
    ]
    for payload, target, fill in zip(payloads, targets, fills, strict=True):
        assert fill.finish() == (fnv1a64(payload) if hashed else None)
        assert target == payload
        fill.drop()
        fill.drop()
    reader.close()


@pytest.mark.parametrize("hashed", [True, False])
def test_it_is_read_to_where_it_belongs(
    tmp_path: Path, workers: Workers, hashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte is read once, to its place, with no memory in between."""
    size = 3 * PIECE + 17
    payload = random.Random(7).randbytes(size)
    (tmp_path / "entry").write_bytes(payload)
    target = bytearray(size)
    start_of = address(target)
    read: list[tuple[int, int]] = []
    preadv, both = os.preadv, reading.read_fnv1a64

    def noted_preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        got = preadv(fd, buffers, offset, *flags)
        if not flags:
            assert address(buffers[0]) == start_of + offset
            read.append((offset, offset + got))
        return got

    def noted_both(fd: int, piece: memoryview, offset: int, start: int) -> tuple[int, int]:
        assert address(piece) == start_of + offset
        got, value = both(fd, piece, offset, start)
        read.append((offset, offset + got))
        return got, value

    monkeypatch.setattr(os, "preadv", noted_preadv)
    monkeypatch.setattr(reading, "read_fnv1a64", noted_both)
    fill = start(Reader(workers), tmp_path / "entry", target, hashed=hashed)
    fill.finish()
    fill.drop()
    assert target == payload
    assert [begin for begin, _ in sorted(read)] == [0, *(end for _, end in sorted(read))][:-1]
    assert max(end for _, end in read) == size


def test_without_any_thread(tmp_path: Path, no_leaks: LeakCheck) -> None:
    """The one that waits does it all."""
    payload = random.Random(5).randbytes(3 * PIECE)
    (tmp_path / "entry").write_bytes(payload)
    workers = Workers()
    workers.close()
    target = bytearray(len(payload))
    fill = start(Reader(workers), tmp_path / "entry", target)
    assert fill.finish() == fnv1a64(payload)
    assert target == payload
    fill.drop()


@pytest.mark.parametrize("hashed", [True, False])
def test_a_file_that_is_shorter_than_expected(tmp_path: Path, workers: Workers, hashed: bool) -> None:
    (tmp_path / "entry").write_bytes(bytes(2 * PIECE))
    fill = start(Reader(workers), tmp_path / "entry", bytearray(3 * PIECE), hashed=hashed)
    with pytest.raises(EntryChanged, match=f"byte {2 * PIECE}"):
        fill.finish()
    fill.drop()


def test_a_file_that_is_written_to_meanwhile(tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "entry"
    path.write_bytes(bytes(4 * PIECE))
    os.utime(path, ns=(1, 1))
    fill = start(Reader(workers), path, bytearray(4 * PIECE))
    os.utime(path, ns=(2, 2))
    with pytest.raises(EntryChanged, match="written to"):
        fill.finish()
    fill.drop()


@pytest.mark.parametrize("hashed", [True, False])
def test_a_disk_that_cannot_read(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch, hashed: bool
) -> None:
    (tmp_path / "entry").write_bytes(bytes(8 * PIECE))

    def broken(offset: int) -> None:
        if offset == 5 * PIECE:
            raise OSError(errno.EIO, "Input/output error")

    before_reads(monkeypatch, broken)
    fill = start(Reader(workers), tmp_path / "entry", bytearray(8 * PIECE), hashed=hashed)
    with pytest.raises(OSError, match="Input/output"):
        fill.finish()
    fill.drop()


def test_a_worker_that_fails_in_another_way_is_heard(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "entry").write_bytes(bytes(4 * PIECE))

    def broken(offset: int) -> None:
        raise RuntimeError("out of order")

    before_reads(monkeypatch, broken)
    fill = start(Reader(workers), tmp_path / "entry", bytearray(4 * PIECE))
    with pytest.raises(RuntimeError, match="out of order"):
        fill.finish()
    fill.drop()


def test_stop_wakes_who_waits_and_what_is_read_ends_later(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "entry").write_bytes(bytes(2 * PIECE))
    go, inside = threading.Event(), threading.Semaphore(0)

    def slow(offset: int) -> None:
        if threading.current_thread().name.startswith("weightwire-cache"):
            inside.release()
            go.wait(20)

    before_reads(monkeypatch, slow)
    reader = Reader(workers)
    fill = start(reader, tmp_path / "entry", bytearray(2 * PIECE))
    assert inside.acquire(timeout=20)
    assert inside.acquire(timeout=20)
    stopped: list[bool] = []

    def wait() -> None:
        with pytest.raises(ReadingStopped):
            fill.finish()
        stopped.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    reader.stop()
    thread.join(20)
    assert stopped == [True]
    reader.close()
    assert fill.fd >= 0  # still being read from
    go.set()
    assert eventually(lambda: fill.fd < 0)


def test_only_what_is_not_cached_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "entry"
    path.write_bytes(bytes(3 * PIECE))
    advised: list[int] = []
    monkeypatch.setattr(reading, "advise", lambda fd, start, nbytes: advised.append(start))
    monkeypatch.setattr(reading.os, "preadv", lambda fd, buffers, offset, flags: 1)
    workers = Workers()
    workers.close()
    fill = start(Reader(workers), path, bytearray(3 * PIECE))
    assert advised == []
    fill.drop()

    def not_there(fd: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        raise BlockingIOError

    monkeypatch.setattr(reading.os, "preadv", not_there)
    fill = start(Reader(workers), path, bytearray(3 * PIECE))
    assert advised == [0, PIECE, 2 * PIECE]
    fill.drop()
