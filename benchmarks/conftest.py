"""What the benchmarks move: a synthetic model of about 1 GiB, in the page cache before anything is timed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "tests")]

from harness.machine import describe  # noqa: E402  (found through the path set above)
from harness.models import whole_blocks, write_random  # noqa: E402
from harness.network import CannotShape, Network, shaped_network, shaped_networks  # noqa: E402
from prepare import peers  # noqa: E402

from weightwire.model.synthetic import write_synthetic_gguf  # noqa: E402

NBYTES = 1 << 30

# Off, there would be no splits; on, every connection would print its own.
os.environ.pop("GGML_RPC_LOADPROF", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What makes the longer benchmarks shorter or longer."""
    group = parser.getgroup("weightwire")
    group.addoption("--rounds", type=int, default=5, help="rounds that count, where a load is measured (default: 5)")
    group.addoption("--matrix-mib", type=int, default=1024, help="test_matrix.py: MiB of the model (default: 1024)")
    group.addoption("--every-shape", action="store_true", help="test_cache.py: all shapes on the shaped network too")


@pytest.hookimpl
def pytest_benchmark_update_machine_info(machine_info: dict[str, object]) -> None:
    """Say what the numbers depend on, and not whose machine it is."""
    machine_info.clear()
    machine_info.update(describe())


@pytest.hookimpl
def pytest_benchmark_update_json(output_json: dict[str, object]) -> None:
    """Keep of the commit what names the code, and no path."""
    commit = output_json.pop("commit_info", None)
    if isinstance(commit, dict):
        output_json["commit_info"] = {name: commit.get(name) for name in ("id", "dirty")}


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """How many rounds count."""
    count: int = request.config.getoption("--rounds")
    return max(count, 1)


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
    write_random(path, _equal(request.param))
    yield path
    path.unlink()


def _equal(count: int) -> dict[str, int]:
    return {f"layer.{index}": NBYTES // count for index in range(count)}


@pytest.fixture(scope="session", params=["blocks", "mix", 16, 1], ids=["blocks", "mix", "16 x 64 MiB", "1 x 1 GiB"])
def cache_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """At least 1 GiB in four shapes: whole blocks of a 27B model, all of one in small, large layers, and one tensor."""
    if request.param == "mix":
        yield request.getfixturevalue("synthetic_model")
        return
    path = tmp_path_factory.mktemp("cached") / f"{request.param}.safetensors"
    write_random(path, dict(whole_blocks(NBYTES)) if request.param == "blocks" else _equal(request.param))
    yield path
    path.unlink()


@pytest.fixture(scope="session")
def shaped() -> Iterator[Network]:
    """Two network namespaces joined at 2.5 Gbit/s."""
    with ExitStack() as stack:
        try:
            network = stack.enter_context(shaped_network())
        except CannotShape as why:
            pytest.skip(f"no shaped network here: {why}")
        yield network


@pytest.fixture(scope="session")
def shaped_to_two() -> Iterator[tuple[Network, ...]]:
    """A network namespace for a client and one for each of two servers, each joined to it at 2.5 Gbit/s."""
    with ExitStack() as stack:
        try:
            networks = stack.enter_context(shaped_networks(2))
        except CannotShape as why:
            pytest.skip(f"no shaped network here: {why}")
        yield networks
