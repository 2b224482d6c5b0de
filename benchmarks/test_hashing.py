"""FNV-1a 64 beside the plain loop, with every variant that this CPU offers."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from harness.rounds import Rounds, record
from pytest_benchmark.fixture import BenchmarkFixture

from weightwire import cpu_features, fnv1a64, fnv1a64_many
from weightwire._native import _fnv1a
from weightwire.client.hashpool import HashPool
from weightwire.hashing import FNV_OFFSET, hash_payload, hash_payloads
from weightwire.index import hash_with_digest
from weightwire.ranges import FileRange

ROUNDS = 9
MIB = 1 << 20
COUNT = 64
"""Tensors that are hashed by several threads."""
VARIANTS = cpu_features().offered


@pytest.fixture(autouse=True)
def the_best_afterwards() -> Iterator[None]:
    best = _fnv1a.chosen()
    yield
    _fnv1a.choose(best)


def noise(nbytes: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)


def timed(variant: str, work: Callable[[], object]) -> float:
    """CPU seconds of this thread, so that whoever else uses the machine is not counted."""
    _fnv1a.choose(variant)
    started = time.thread_time()
    work()
    return time.thread_time() - started


def compare(
    benchmark: BenchmarkFixture,
    nbytes: int,
    ways: Sequence[tuple[str, str, Callable[[], object]]],
    against: str,
    subject: str | None = None,
) -> None:
    """Run each way, (name, variant, work), in turn; keep how many times as fast as ``against`` each is."""
    rounds = Rounds(nbytes)

    def turn() -> None:
        for name, variant, work in ways:
            rounds.add(name, timed(variant, work))

    benchmark.pedantic(turn, rounds=ROUNDS, warmup_rounds=1)
    rounds.seconds = {name: seconds[1:] for name, seconds in rounds.seconds.items()}
    # The fastest is the one that is compared with the others.
    record(benchmark, rounds, subject or min(rounds.seconds, key=rounds.median))
    print()
    for name in rounds.seconds:
        print(f"  {name:24} {rounds.ratio(name, against):6.2f} times {against}")


@pytest.mark.bench
@pytest.mark.parametrize(
    ("nbytes", "times"),
    [(64 * MIB, 1), (MIB, 16), (4096, 2000), (1000, 5000)],
    ids=["64 MiB", "1 MiB", "4 KiB", "1000 bytes"],
)
def test_one_buffer(benchmark: BenchmarkFixture, nbytes: int, times: int) -> None:
    data = noise(nbytes)

    def hash_it() -> None:
        for _ in range(times):
            fnv1a64(data)

    compare(benchmark, nbytes * times, [(name, name, hash_it) for name in VARIANTS], "plain")


@pytest.mark.bench
@pytest.mark.parametrize("nbytes", [8 * MIB, MIB, 1000], ids=["8 MiB", "1 MiB", "1000 bytes"])
def test_many_buffers(benchmark: BenchmarkFixture, nbytes: int) -> None:
    """Eight in one call, against the plain loop on one after the other; "plain" in one call is four interleaved."""
    whole = noise(8 * nbytes)
    buffers = [whole[i * nbytes : (i + 1) * nbytes] for i in range(8)]
    times = max(1, 16 * MIB // (8 * nbytes))

    def in_turn() -> None:
        for _ in range(times):
            for buffer in buffers:
                fnv1a64(buffer)

    def in_one_call() -> None:
        for _ in range(times):
            fnv1a64_many(buffers)

    ways = [("plain, in turn", "plain", in_turn)]
    for name in VARIANTS:
        ways.append((f"{name}, in one call", name, in_one_call))
    compare(benchmark, 8 * nbytes * times, ways, "plain, in turn")


@pytest.mark.bench
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "plain"])
def test_ten_buffers_against_one(benchmark: BenchmarkFixture, name: str) -> None:
    """The same bytes as ten buffers and as one: 1 is as fast."""
    whole = noise(60 * MIB)
    buffers = [whole[i * 6 * MIB : (i + 1) * 6 * MIB] for i in range(10)]
    ways = [("one", name, lambda: fnv1a64(whole)), ("ten", name, lambda: fnv1a64_many(buffers))]
    compare(benchmark, whole.nbytes, ways, "one", "ten")


@pytest.mark.bench
@pytest.mark.parametrize("count", [1, 4])
def test_file_ranges(benchmark: BenchmarkFixture, tmp_path: Path, count: int) -> None:
    """Ranges of a file in the page cache, beside the same bytes in memory, and beside reading them alone."""
    data = noise(64 * MIB)
    path = tmp_path / "blob"
    data.tofile(path)
    size = data.nbytes // count
    window = bytearray(128 << 10)
    with path.open("rb") as file:
        fd = file.fileno()
        ranges = [FileRange(fd, i * size, size, str(path)) for i in range(count)]

        def read() -> None:
            for at in range(0, data.nbytes, len(window)):
                os.preadv(fd, [window], at)

        ways: list[tuple[str, str, Callable[[], object]]] = [
            ("plain, memory", "plain", lambda: hash_payload(data)),
            ("reading alone", "plain", read),
        ]
        for name in VARIANTS:
            if name != "plain":
                ways.append((f"{name}, memory", name, lambda: hash_payload(data)))
            ways.append((f"{name}, file", name, lambda: hash_payloads(ranges)))
        compare(benchmark, data.nbytes, ways, "plain, memory")


@pytest.mark.bench
def test_both_hashes(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """A file in the page cache, hashed for the index: FNV-1a with BLAKE3, beside FNV-1a alone and with SHA-256."""
    data = noise(64 * MIB)
    path = tmp_path / "blob"
    data.tofile(path)
    with path.open("rb") as file:
        whole = FileRange(file.fileno(), 0, data.nbytes, str(path))
        window = memoryview(bytearray(512 << 10))

        def with_sha256() -> bytes:
            value, strong = FNV_OFFSET, hashlib.sha256()
            for at in range(0, data.nbytes, window.nbytes):
                os.preadv(file.fileno(), [window], at)
                value = fnv1a64(window, value)
                strong.update(window)
            return strong.digest()

        best = cpu_features().single
        ways: list[tuple[str, str, Callable[[], object]]] = [
            ("with BLAKE3", best, lambda: hash_with_digest(whole)),
            ("alone", best, lambda: hash_payloads([whole])),
            ("with SHA-256", best, with_sha256),
        ]
        compare(benchmark, data.nbytes, ways, "alone", "with BLAKE3")


@pytest.mark.bench
def test_two_threads(benchmark: BenchmarkFixture) -> None:
    """Many tensors in memory, hashed by the client's pool of one thread and of two: elapsed time, so only of use on two
    free cores. `test_cache.py` does the same with a model's file.
    """
    data = noise(COUNT * 16 * MIB)
    payloads = [memoryview(data[at : at + 16 * MIB]) for at in range(0, data.nbytes, 16 * MIB)]
    hashed: dict[str, list[int]] = {}
    rounds = Rounds(data.nbytes)

    def run(name: str, threads: int) -> None:
        started = time.perf_counter()
        pool = HashPool(payloads, threads=threads)
        feed = pool.feed(range(COUNT), data.nbytes)
        try:
            pool.start()
            hashed[name] = [feed.get(number, lambda: None) for number in range(COUNT)]
        finally:
            pool.close()
        rounds.add(name, time.perf_counter() - started)

    def turn() -> None:
        run("one thread", 1)
        run("two threads", 2)

    benchmark.pedantic(turn, rounds=ROUNDS, warmup_rounds=1)
    rounds.seconds = {name: seconds[1:] for name, seconds in rounds.seconds.items()}
    assert hashed["one thread"] == hashed["two threads"] == fnv1a64_many(payloads)
    record(benchmark, rounds, "two threads")
