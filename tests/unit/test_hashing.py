from __future__ import annotations

import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import fnvhash
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import ModelError
from weightwire.hashing import FNV_OFFSET, fnv1a64, fnv1a64_many, hash_payload, hash_payloads
from weightwire.ranges import FileRange

WINDOW = 128 << 10  # what one lane reads of a file at a time


def slow(data: bytes, start: int = FNV_OFFSET) -> int:
    for byte in data:
        start = (start ^ byte) * 0x100000001B3 % 2**64
    return start


# Vectors of the FNV authors' test suite (http://www.isthe.com/chongo/src/fnv/test_fnv.c).
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0xCBF29CE484222325),
        (b"a", 0xAF63DC4C8601EC8C),
        (b"b", 0xAF63DF4C8601F1A5),
        (b"foobar", 0x85944171F73967E8),
        (b"chongo was here!\n", 0x46810940EFF5F915),
    ],
)
def test_known_vectors(data: bytes, expected: int) -> None:
    assert fnv1a64(data) == expected
    assert fnv1a64_many([data]) == [expected]


@given(st.binary(max_size=5000), st.integers(0, 2**64 - 1))
def test_equals_the_plain_loop_from_any_start(data: bytes, start: int) -> None:
    assert fnv1a64(data, start=start) == slow(data, start)


@given(st.binary(max_size=3000))
def test_equals_an_independent_implementation(data: bytes) -> None:
    assert fnv1a64(data) == fnvhash.fnv1a_64(data)


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_chaining(a: bytes, b: bytes) -> None:
    assert fnv1a64(b, fnv1a64(a)) == fnv1a64(a + b)


@given(st.lists(st.binary(max_size=700), max_size=12))
def test_many_unequal_buffers(buffers: list[bytes]) -> None:
    assert fnv1a64_many(buffers) == [slow(b) for b in buffers]


@pytest.mark.parametrize("sizes", [(0,), (1, 0, 0, 0, 2), (100_000, 1, 1, 1), (5, 70_000, 3, 9000, 0, 4096, 1, 50_001)])
def test_many_with_a_long_one_among_short_ones(sizes: tuple[int, ...]) -> None:
    buffers = [os.urandom(n) for n in sizes]
    assert fnv1a64_many(buffers) == [slow(b) for b in buffers]


@pytest.mark.parametrize("offset", range(9))
def test_unaligned_buffers(offset: int) -> None:
    data = os.urandom(4096)
    assert fnv1a64(memoryview(data)[offset:]) == slow(data[offset:])


def test_longer_than_one_step_between_signal_checks() -> None:
    data = np.arange((48 << 20) + 12345, dtype=np.uint8)
    half = data.nbytes // 2
    assert fnv1a64(data) == fnv1a64(data[half:], fnv1a64(data[:half])) == fnv1a64_many([data, b"x"])[0]


def test_any_buffer_is_taken() -> None:
    values = array("d", [1.0, 2.0])
    expected = slow(values.tobytes())
    assert fnv1a64(values) == fnv1a64(np.frombuffer(values)) == fnv1a64(bytearray(values.tobytes())) == expected
    assert fnv1a64(np.frombuffer(values).reshape(2, 1)) == expected


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_check_that_raises_ends_it(tmp_path: Path, lanes: int) -> None:
    """Of a terabyte without data: hashed to its end, it would take far longer than a test may."""
    path = tmp_path / "huge"
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise LookupError

    with path.open("wb") as file:
        file.truncate(1 << 40)
    with path.open("rb") as file, pytest.raises(LookupError):
        hash_payloads([FileRange(file.fileno(), lane, 1 << 39, str(path)) for lane in range(lanes)], check=check)
    assert calls == 3


def test_a_check_that_returns_changes_nothing() -> None:
    data = np.arange((70 << 20) + 7, dtype=np.uint8)
    calls: list[None] = []
    assert hash_payloads([data, b"x"], check=lambda: calls.append(None)) == [fnv1a64(data), fnv1a64(b"x")]
    assert len(calls) >= 2


def test_an_interrupt_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 40)

    def interrupt(number: int, frame: object) -> None:
        raise LookupError

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        with path.open("rb") as file, pytest.raises(LookupError):
            timer.start()
            hash_payload(FileRange(file.fileno(), 0, 1 << 40, str(path)))
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_no_buffers() -> None:
    assert fnv1a64_many([]) == []
    assert fnv1a64_many(iter([b"a"])) == [slow(b"a")]


def test_not_contiguous_is_refused_with_a_hint() -> None:
    for bad in (np.zeros((4, 4))[:, 1], memoryview(bytes(10))[::2], np.zeros((4, 4)).T[:, :2]):
        with pytest.raises(ValueError, match="ascontiguousarray"):
            fnv1a64(bad)
        with pytest.raises(ValueError, match="ascontiguousarray"):
            fnv1a64_many([b"fine", bad])


def test_not_a_buffer_is_refused() -> None:
    with pytest.raises(TypeError):
        fnv1a64("text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        fnv1a64_many([b"fine", 3])  # type: ignore[list-item]
    with pytest.raises(OverflowError):
        fnv1a64(b"", 2**64)


def test_a_refused_call_keeps_no_buffer() -> None:
    data = bytearray(10)
    with pytest.raises(TypeError):
        fnv1a64_many([data, None])  # type: ignore[list-item]
    data.append(1)  # BufferError if an export were left


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


@pytest.mark.parametrize("call", ["one", "many"])
def test_other_threads_run_meanwhile(call: str) -> None:
    # With so long a switch interval a thread gets on only where another gives up the GIL of its own accord.
    data = bytes(64 << 20)
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    try:
        thread.start()
        before = counted
        if call == "one":
            fnv1a64(data)
        else:
            hash_payloads([data, data])
        during = counted - before
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert during >= 2
