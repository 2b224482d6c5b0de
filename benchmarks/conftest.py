"""What the benchmarks move: a synthetic model of about 1 GiB, in the page cache before anything is timed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "tests")]

from prepare import peers  # noqa: E402  (found through the path set above)

from weightwire.model.synthetic import write_synthetic_gguf  # noqa: E402

NBYTES = 1 << 30


@pytest.fixture(scope="session")
def synthetic_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A GGUF of 1 GiB: 876 tensors in the proportions of a 27B model."""
    path = tmp_path_factory.mktemp("model") / "synthetic.gguf"
    write_synthetic_gguf(path, NBYTES)
    yield path
    path.unlink()


@pytest.fixture(scope="session")
def stock_library() -> Path:
    """The folder with libggml-rpc.so of the stock peer that ./test prepares (protocol 7.0.0)."""
    found = peers.peer_library(peers.FULL_PROTOCOL)
    if found is None:
        pytest.skip(f"no stock peer here ({peers.why_missing(peers.FULL_PROTOCOL)}); ./test --prepare-only builds it")
    return found


@pytest.fixture(scope="session", params=["mix", 16, 1], ids=["mix", "16 x 64 MiB", "1 x 1 GiB"])
def model_of_1gib(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """1 GiB in three shapes: a 27B model's proportions, large layers, and one tensor.

    A server that buffers every message whole is hit by large tensors most.
    """
    if request.param == "mix":
        yield request.getfixturevalue("synthetic_model")
        return
    path = tmp_path_factory.mktemp("equal") / "equal.safetensors"
    generator = np.random.default_rng(1)
    size = NBYTES // request.param
    save_file(
        {f"layer.{index}": generator.integers(0, 256, size, dtype=np.uint8) for index in range(request.param)}, path
    )
    yield path
    path.unlink()
