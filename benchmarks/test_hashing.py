"""FNV-1a 64 beside the plain loop: one buffer at a time against four interleaved."""

from __future__ import annotations

import time

import numpy as np
import pytest
from harness.rounds import Rounds
from pytest_benchmark.fixture import BenchmarkFixture

from weightwire import fnv1a64, fnv1a64_many

BUFFERS = 8
ROUNDS = 9


@pytest.mark.bench
@pytest.mark.parametrize("nbytes", [1 << 20, 16 << 20], ids=["1 MiB", "16 MiB"])
def test_many_buffers(benchmark: BenchmarkFixture, nbytes: int) -> None:
    generator = np.random.default_rng(1)
    buffers = [generator.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(BUFFERS)]
    rounds = Rounds(nbytes * BUFFERS)

    def one_at_a_time() -> None:
        started = time.perf_counter()
        for buffer in buffers:
            fnv1a64(buffer)
        rounds.add("one at a time", time.perf_counter() - started)

    def interleaved() -> None:
        started = time.perf_counter()
        fnv1a64_many(buffers)
        rounds.add("interleaved", time.perf_counter() - started)

    benchmark.pedantic(interleaved, setup=one_at_a_time, rounds=ROUNDS)
    benchmark.extra_info.update(rounds.summary("interleaved"))
    print(rounds.summary("interleaved"))
    assert fnv1a64_many(buffers) == [fnv1a64(buffer) for buffer in buffers]
