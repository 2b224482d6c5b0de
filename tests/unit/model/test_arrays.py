"""Mappings of arrays: their bytes as a contiguous little-endian array would have them, without needless copies."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from weightwire.errors import ModelError
from weightwire.model import ModelTensor, open_model


def one(value: object) -> ModelTensor:
    with open_model({"t": value}) as model:
        assert model.format == "arrays"
        assert model.path is None
        assert model.files == ()
        model.check_unchanged()
        assert model.nbytes == model.tensors["t"].nbytes
        return model.tensors["t"]


@pytest.mark.parametrize(
    ("dtype", "code", "name"),
    [
        ("f8", 28, "f64"),
        ("f4", 0, "f32"),
        ("f2", 1, "f16"),
        ("i8", 27, "i64"),
        ("i4", 26, "i32"),
        ("i2", 25, "i16"),
        ("i1", 24, "i8"),
        ("u1", None, "uint8"),
        ("u8", None, "uint64"),
        ("?", None, "bool"),
        ("c8", None, "complex64"),
        ("M8[s]", None, "datetime64[s]"),
    ],
)
def test_dtypes(dtype: str, code: int | None, name: str) -> None:
    values = np.arange(6).astype(dtype).reshape(2, 3)
    tensor = one(values)
    assert (tensor.type_code, tensor.type_name, tensor.ne, tensor.nbytes) == (code, name, (3, 2), values.nbytes)
    view = tensor.view()
    assert bytes(view) == values.tobytes()
    assert view.readonly
    assert (view.format, view.ndim, view.itemsize) == ("B", 1, 1)


def test_a_contiguous_array_is_not_copied_and_stays_writable() -> None:
    values = np.zeros(8, dtype=np.float32)
    view = one(values).view()
    values[3] = 1.0
    assert bytes(view) == values.tobytes()


@pytest.mark.parametrize(
    "values",
    [
        np.arange(12, dtype="f4").reshape(3, 4).T,
        np.arange(12, dtype="f4")[::2],
        np.arange(12, dtype="f4")[::-1],
        np.asfortranarray(np.arange(12, dtype="f4").reshape(3, 4)),
        np.broadcast_to(np.float32(3), (3, 4)),
        np.arange(12, dtype="f4").reshape(3, 4)[:, 1:3],
    ],
)
def test_what_is_not_contiguous_is_made_so(values: np.ndarray[Any, Any]) -> None:
    tensor = one(values)
    assert bytes(tensor.view()) == values.tobytes("C")
    assert tensor.ne == tuple(reversed(values.shape))


def test_big_endian_numbers_become_little_endian() -> None:
    tensor = one(np.arange(4, dtype=">f4"))
    assert tensor.type_code == 0
    assert bytes(tensor.view()) == np.arange(4, dtype="<f4").tobytes()


def test_scalars_empty_arrays_and_many_dimensions() -> None:
    assert one(np.array(2, dtype=np.float32)).ne == (1,)
    empty = one(np.zeros((3, 0, 2), dtype="f2"))
    assert (empty.ne, empty.nbytes, empty.type_code, bytes(empty.view())) == ((2, 0, 3), 0, 1, b"")
    assert one(np.zeros((2, 1, 3, 1, 2), dtype="i1")).ne == (2, 1, 3, 1, 2)


@pytest.mark.parametrize(
    ("value", "code", "ne"),
    [
        (b"abcd", None, (4,)),
        (bytearray(b"abcd"), None, (4,)),
        (array.array("d", [1.0, 2.0]), 28, (2,)),
        (memoryview(array.array("f", [1.0, 2.0])), 0, (2,)),
        (memoryview(b"abcdef").cast("B", (2, 3)), None, (3, 2)),
        (memoryview(b"abcdef")[::2], None, (3,)),
        (b"", None, (0,)),
    ],
)
def test_anything_with_a_buffer(value: Any, code: int | None, ne: tuple[int, ...]) -> None:
    tensor = one(value)
    assert (tensor.type_code, tensor.ne) == (code, ne)
    assert bytes(tensor.view()) == memoryview(value).tobytes()


class NoBuffer:
    """An array in all but memory layout, as other libraries' tensors are."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray[Any, Any]:
        if isinstance(self.result, Exception):
            raise self.result
        return np.asarray(self.result)


def test_what_only_converts_to_an_array() -> None:
    assert bytes(one(NoBuffer(np.arange(3, dtype="i2"))).view()) == np.arange(3, dtype="i2").tobytes()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([object()]), "Python objects"),
        (np.array([(1, None)], dtype=[("a", "i4"), ("b", "O")]), "Python objects"),
        ([1.0, 2.0], "list, which has no buffer"),
        ("text", "str, which has no buffer"),
        (None, "NoneType"),
        (1.5, "float"),
        (NoBuffer(TypeError("cannot convert")), "cannot convert"),
        (NoBuffer(RuntimeError("on another device")), "on another device"),
    ],
)
def test_what_has_no_bytes_is_refused(value: object, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        open_model({"fine": np.zeros(1), "bad": value})
    assert "'bad'" in caught.value.detail


@pytest.mark.parametrize("name", [1, None, b"bytes", "a\0b", "\ud800"])
def test_names_that_cannot_be_sent(name: object) -> None:
    with pytest.raises(ModelError, match="cannot be a tensor's name"):
        open_model({name: np.zeros(1)})  # type: ignore[dict-item]


def test_order_and_lifetime() -> None:
    source = {"b": np.arange(3), "a": np.arange(2)}
    model = open_model(source)
    source.clear()
    model.close()
    model.close()
    assert list(model.tensors) == ["b", "a"]
    assert bytes(model.tensors["b"].view()) == np.arange(3).tobytes()
    with pytest.raises(TypeError):
        model.tensors["c"] = model.tensors["b"]  # type: ignore[index]
