"""FNV-1a of buffers, with whatever variant this CPU takes by itself."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from array import array
from pathlib import Path

import fnvhash
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fnv import slow

from weightwire.hashing import fnv1a64, fnv1a64_many, hash_payload, hash_payloads
from weightwire.ranges import FileRange


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
        deadline = time.monotonic() + 20
        # A hash takes a few milliseconds, in which a busy machine may not get round to the other thread.
        while counted < before + 2 and time.monotonic() < deadline:
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
