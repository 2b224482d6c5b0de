"""A model of 20,000 tensors of 4 KiB: what a tensor costs beyond its bytes, client and server together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness.weightwire_pair import WeightwirePeer
from pytest_benchmark.fixture import BenchmarkFixture
from safetensors.numpy import save_file

TENSORS = 20_000


@pytest.fixture(scope="module")
def many_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.safetensors"
    block = np.arange(1024, dtype=np.float32)
    save_file({f"layers.{index}.weight": block + index for index in range(TENSORS)}, path)
    return path


@pytest.fixture
def pair(many_small: Path) -> Iterator[WeightwirePeer]:
    peer = WeightwirePeer(many_small)
    yield peer
    peer.close()


@pytest.mark.bench
def test_push_small_tensors(benchmark: BenchmarkFixture, pair: WeightwirePeer) -> None:
    benchmark.pedantic(pair.round, rounds=9, warmup_rounds=1)
    per_tensor = sorted(profile.span_ns for profile in pair.profiles[1:])[4] / TENSORS / 1000
    benchmark.extra_info.update(tensors=TENSORS, microseconds_per_tensor=per_tensor)
    print(f"{per_tensor:.1f} microseconds per tensor")
    assert len(pair.profiles) == 10
