"""`RemoteTensor.numpy`: what was pushed comes back as what it was, also where ggml has no type for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weightwire import Server, connect
from weightwire.errors import ConfigError


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.uint8).reshape(3, 4),
        np.array([True, False, True]),
        np.array([1, 65535], np.uint16),
        np.array([1, 2**64 - 1], np.uint64),
        np.array([1 + 2j, -3j], np.complex64),
        np.array(["2026-01-02", "1999-12-31"], "datetime64[D]"),
        np.array(["weights", "wire"]),
        np.array([b"ab", b"c"]),
        np.arange(4, dtype=">u2"),
    ],
    ids=lambda array: array.dtype.str,
)
def test_what_ggml_has_no_type_for_comes_back_as_what_it_was(array: np.ndarray) -> None:
    with Server(port=0) as server, connect(server.endpoints[0]) as connection:
        tensor = connection.push({"t": array})["t"]
        assert tensor.type_code is None
        back = tensor.numpy()
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype.newbyteorder("<")
    assert back.shape == array.shape


def test_a_dtype_of_structs_comes_back_as_bytes() -> None:
    array = np.zeros(3, [("a", "u1"), ("b", "<f4")])
    with Server(port=0) as server, connect(server.endpoints[0]) as connection:
        tensor = connection.push({"t": array})["t"]
        with pytest.raises(ConfigError, match="no type that ggml has") as caught:
            tensor.numpy()
        assert "read()" in caught.value.hint
        assert tensor.read().nbytes == 15


def test_types_of_safetensors_that_ggml_has_not(tmp_path: Path) -> None:
    arrays = {
        "u8": np.arange(6, dtype=np.uint8),
        "bool": np.array([True, False]),
        "u16": np.arange(4, dtype=np.uint16),
        "u32": np.arange(4, dtype=np.uint32),
        "u64": np.arange(4, dtype=np.uint64),
    }
    save_file(arrays, tmp_path / "m.safetensors")
    with Server(port=0) as server, connect(server.endpoints[0]) as connection:
        pushed = connection.push(tmp_path / "m.safetensors")
        for name, array in arrays.items():
            back = pushed[name].numpy()
            np.testing.assert_array_equal(back, array)
            assert back.dtype == array.dtype
