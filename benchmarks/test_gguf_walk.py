"""Opening a GGUF with a vocabulary of 150,000 tokens and as many merges: our header walk beside the gguf package."""

from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from harness.rounds import Rounds, record
from pytest_benchmark.fixture import BenchmarkFixture

from weightwire.model import open_model

TOKENS = 150_000
TENSORS = 300
MOST_ROUNDS = 3  # the other takes long


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 300 small tensors under a large vocabulary."""
    path = tmp_path_factory.mktemp("walk") / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{index}" for index in range(TOKENS)])
    writer.add_token_merges([f"to {index}" for index in range(TOKENS)])
    writer.add_token_scores([0.0] * TOKENS)
    for index in range(TENSORS):
        writer.add_tensor(f"blk.{index}.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.bench
@pytest.mark.timeout(300)
def test_gguf_open(benchmark: BenchmarkFixture, vocabulary: Path, rounds: int) -> None:
    taken = Rounds(0)
    found: set[int] = set()

    def package() -> None:
        started = time.perf_counter()
        reader = gguf.GGUFReader(vocabulary)
        taken.add("gguf package", time.perf_counter() - started)
        found.add(len(reader.tensors))

    def walk() -> None:
        started = time.perf_counter()
        with open_model(vocabulary) as model:
            taken.add("weightwire", time.perf_counter() - started)
            found.add(len(model.tensors))

    walk()  # the page cache
    taken.seconds.clear()
    benchmark.pedantic(walk, setup=package, rounds=min(rounds, MOST_ROUNDS))
    record(benchmark, taken, "weightwire", tokens=TOKENS, tensors=TENSORS)
    assert found == {TENSORS}
