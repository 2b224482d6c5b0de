"""Opening a GGUF with a vocabulary of 150,000 tokens and as many merges: our header walk beside the gguf package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from weightwire.model import open_model

TOKENS = 150_000
TENSORS = 300


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
@pytest.mark.benchmark(group="gguf-walk")
def test_weightwire(benchmark: BenchmarkFixture, vocabulary: Path) -> None:
    def walk() -> int:
        with open_model(vocabulary) as model:
            return len(model.tensors)

    assert benchmark.pedantic(walk, rounds=20, warmup_rounds=1) == TENSORS


@pytest.mark.bench
@pytest.mark.benchmark(group="gguf-walk")
def test_gguf_package(benchmark: BenchmarkFixture, vocabulary: Path) -> None:
    assert len(benchmark.pedantic(lambda: gguf.GGUFReader(vocabulary), rounds=1).tensors) == TENSORS
