"""FNV-1a of file ranges, by position, with every variant that this CPU offers."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightwire._native import _fnv1a
from weightwire.errors import ModelError
from weightwire.hashing import cpu_features, fnv1a64, hash_payload, hash_payloads, read_fnv1a64
from weightwire.ranges import FileRange

WINDOW = 128 << 10  # what one lane reads of a file at a time


@pytest.fixture(params=cpu_features().offered, autouse=True)
def variant(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _fnv1a.chosen()
    _fnv1a.choose(request.param)
    yield
    _fnv1a.choose(before)


@pytest.fixture
def blob(tmp_path: Path) -> Iterator[tuple[int, bytes, str]]:
    data = os.urandom(5 * WINDOW + 77)
    path = tmp_path / "blob"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    yield fd, data, str(path)
    os.close(fd)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 5])
@pytest.mark.parametrize("offset", [0, 1, 4097])
def test_one_file_range(blob: tuple[int, bytes, str], offset: int, nbytes: int) -> None:
    fd, data, path = blob
    assert hash_payload(FileRange(fd, offset, nbytes, path)) == fnv1a64(data[offset : offset + nbytes])


def test_file_ranges_and_buffers_in_one_queue(blob: tuple[int, bytes, str]) -> None:
    fd, data, path = blob
    spans = [(0, len(data)), (3, 0), (9, 100), (WINDOW, WINDOW), (7, 2 * WINDOW + 3), (len(data), 0), (1, 5), (2, 6)]
    payloads: list[FileRange | bytes] = []
    expected: list[int] = []
    for start, n in spans:
        payloads += [FileRange(fd, start, n, path), data[start : start + n]]
        expected += [fnv1a64(data[start : start + n])] * 2
    assert hash_payloads(payloads) == expected
    assert os.lseek(fd, 0, os.SEEK_CUR) == 0


def test_more_ranges_than_lanes_leave_from_the_middle(blob: tuple[int, bytes, str]) -> None:
    # Lanes close in every order: the windows they read into must never be shared.
    fd, data, path = blob
    for sizes in [(4, 3, 2, 1), (1, 2, 3, 4), (2, 1, 4, 3), (1, 4, 1, 4), (3, 3, 1, 3)]:
        ranges = [FileRange(fd, i * 11, n * WINDOW + i, path) for i, n in enumerate(sizes)]
        assert hash_payloads(ranges) == [fnv1a64(data[r.offset : r.offset + r.nbytes]) for r in ranges]


def test_a_truncated_file_is_a_model_error(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(bytes(1000))
    with path.open("rb") as file:
        with pytest.raises(ModelError, match="shorter than when opened") as caught:
            hash_payloads([b"abc", FileRange(file.fileno(), 500, 600, str(path))])
        assert (caught.value.path, caught.value.offset) == (str(path), 1000)
        with pytest.raises(ModelError, match="shorter"):
            hash_payload(FileRange(file.fileno(), 5000, 1, str(path)))


def test_an_unreadable_file_is_a_model_error(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)  # a directory
    try:
        with pytest.raises(ModelError, match="pread: Is a directory"):
            hash_payload(FileRange(fd, 0, 10, str(tmp_path)))
    finally:
        os.close(fd)


def test_negative_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        hash_payload(FileRange(0, -1, 5))
    with pytest.raises(ValueError, match="negative"):
        hash_payload(FileRange(0, 1, -5))


@pytest.mark.parametrize("nbytes", [0, 1, 255, 300, (256 << 10) - 1, (256 << 10) + 1, 5 * WINDOW])
def test_read_and_hashed_in_one_go(blob: tuple[int, bytes, str], nbytes: int) -> None:
    fd, data, _ = blob
    target = bytearray(nbytes)
    assert read_fnv1a64(fd, target, 7, 99) == (nbytes, fnv1a64(data[7 : 7 + nbytes], 99))
    assert target == data[7 : 7 + nbytes]


def test_reading_ends_where_the_file_does(blob: tuple[int, bytes, str]) -> None:
    fd, data, _ = blob
    target = bytearray(b"x" * 400_000)
    start = len(data) - 300_000
    assert read_fnv1a64(fd, target, start) == (300_000, fnv1a64(data[start:]))
    assert target == data[start:] + b"x" * 100_000
    assert read_fnv1a64(fd, target, len(data) + 1) == (0, fnv1a64(b""))


def test_what_cannot_be_read_into_or_from(blob: tuple[int, bytes, str]) -> None:
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        read_fnv1a64(-1, bytearray(10), 0)
    assert caught.value.errno == errno.EBADF
    with pytest.raises((TypeError, BufferError, ValueError)):
        read_fnv1a64(blob[0], b"read-only", 0)
