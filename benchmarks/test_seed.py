"""Seeding a cache directory beside ``cp`` of the same bytes: what naming and checking them costs.

In memory (/dev/shm): on a disk both wait for the same writes, and the ratio would say what the disk did meanwhile.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness.rounds import Rounds, record
from pytest_benchmark.fixture import BenchmarkFixture
from safetensors.numpy import save_file

from weightwire.cache import seed
from weightwire.index import HashIndex

TENSORS = 8
NBYTES = 16 << 20
ROUNDS = 5
MEMORY = Path("/dev/shm")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder on a file system in memory, with room for the model and two copies."""
    needed = 4 * TENSORS * NBYTES
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < needed:
        pytest.skip(f"{MEMORY} has no room for {needed} bytes")
    folder = Path(tempfile.mkdtemp(prefix="weightwire-seed-", dir=MEMORY))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_seeding(benchmark: BenchmarkFixture, in_memory: Path) -> None:
    """128 MiB in 8 tensors."""
    tmp_path = in_memory
    generator = np.random.default_rng(1)
    model = tmp_path / "model.safetensors"
    save_file({f"t{at}": generator.integers(0, 256, NBYTES, dtype=np.uint8) for at in range(TENSORS)}, model)
    rounds = Rounds(TENSORS * NBYTES)
    directory = tmp_path / "entries"

    def copied() -> float:
        target = tmp_path / "copy"
        started = time.perf_counter()
        subprocess.run(["cp", model, target], check=True)
        took = time.perf_counter() - started
        target.unlink()
        return took

    def seeded(index: HashIndex | bool, threads: int | None) -> float:
        started = time.perf_counter()
        result = seed(model, directory, index=index, threads=threads)
        took = time.perf_counter() - started
        assert result.written == TENSORS
        shutil.rmtree(directory)
        return took

    def again() -> float:
        seed(model, directory, index=index)
        started = time.perf_counter()
        assert seed(model, directory, index=index).unread == TENSORS
        took = time.perf_counter() - started
        shutil.rmtree(directory)
        return took

    with HashIndex(tmp_path / "index.sqlite3") as index:

        def one_round() -> None:
            rounds.add("cp", copied())
            rounds.add("seed, one thread", seeded(False, 1))
            rounds.add("seed", seeded(False, None))
            rounds.add("seed with the index", seeded(HashIndex(tmp_path / "new.sqlite3"), None))
            (tmp_path / "new.sqlite3").unlink(missing_ok=True)
            rounds.add("again, with the index", again())

        one_round()
        rounds.seconds.clear()  # warm-up
        benchmark.pedantic(one_round, rounds=ROUNDS)
    record(benchmark, rounds, "seed with the index")
