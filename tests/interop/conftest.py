"""What the interop tests push, a small model of the shapes that go wrong, and what the benchmarks' tests run on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.awkward import MIB, awkward_tensors
from support.require import do_without

import weightwire

_BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
if _BENCHMARKS not in sys.path:
    sys.path.insert(0, _BENCHMARKS)

from harness.network import CannotShape, Network, shaped_networks  # noqa: E402  (found through the path above)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is entered ends with the test, if not before."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def shape(stack: ExitStack) -> Callable[[int], tuple[Network, ...]]:
    """Makes shaped networks to so many servers, which go with ``stack``."""

    def make(count: int) -> tuple[Network, ...]:
        try:
            return stack.enter_context(shaped_networks(count))
        except CannotShape as why:
            do_without("a shaped network", str(why))

    return make


@pytest.fixture(scope="session")
def awkward_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF of about 65 MiB, by upstream's own writer, with a tensor for each size and type that may go wrong."""
    path = tmp_path_factory.mktemp("models") / "awkward.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for tensor in awkward_tensors():
        writer.add_tensor(tensor.name, tensor.stored(), raw_dtype=gguf.GGMLQuantizationType(tensor.type_code))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with weightwire.open_model(path) as model:
        # The tests below are worth nothing if the file does not hold what they think it holds.
        sizes = {name: tensor.nbytes for name, tensor in model.tensors.items()}
        assert sizes == {tensor.name: len(tensor.data) for tensor in awkward_tensors()}
        assert sum(size > 10 * MIB for size in sizes.values()) == 4
        assert np.frombuffer(model.tensors["zero_first"].view(), np.uint8)[0] == 0
    return path
