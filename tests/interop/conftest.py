"""What the interop tests push: a small model of the shapes that go wrong, and helpers to look at a cache folder."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from support.awkward import MIB, awkward_tensors

import weightwire


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
