"""Models that lie in memory: a mapping from names to anything with the buffer protocol, such as numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from weightwire.errors import ModelError
from weightwire.model.base import Model, ModelTensor, usable_name
from weightwire.model.mapped import MappedFiles
from weightwire.ranges import FileRange
from weightwire.wire.types import TYPES

if TYPE_CHECKING:
    import numpy as np

__all__ = ["open_arrays"]

_CODES: Final = {entry.numpy: entry.code for entry in TYPES.values() if entry.numpy is not None}
_BF16: Final = 30


def open_arrays(arrays: Mapping[str, object]) -> Model:
    """A Model of ``arrays``, in the mapping's order. Contiguous little-endian arrays are referred to, not copied.

    Others (transposed, strided, big-endian) are copied once, so that their bytes are those of a contiguous one. dtypes
    ggml has (f64, f32, f16, i64 … i8, and bfloat16 of ml_dtypes) become its types; others travel as bytes, with
    ``type_code`` None. What lies in a mapped file (numpy.memmap, mmap) is read by position, not through the mapping,
    so that a file which is cut short is an error; the model keeps such files open until it is closed. ModelError for
    object arrays, for values without a buffer and for mapped files that are too short already.
    """
    found = {name: _checked(name, value) for name, value in arrays.items()}
    mapped = MappedFiles()  # after every conversion, which may have mapped something
    try:
        tensors = {name: _tensor(name, array, mapped) for name, array in found.items()}
        return Model(tensors, format="arrays", files=mapped.files)
    except BaseException:
        mapped.close()
        raise


def _checked(name: object, value: object) -> np.ndarray[Any, Any]:
    if not isinstance(name, str) or not usable_name(name):
        raise ModelError(f"{name!r} cannot be a tensor's name", hint="names are text without NUL")
    array = _as_array(name, value)
    if array.dtype.hasobject:
        raise ModelError(
            f"tensor {name!r} holds Python objects (dtype {array.dtype}), which are addresses rather than numbers",
            hint="convert it first: array.astype(numpy.float32)",
        )
    return array


def _tensor(name: str, array: np.ndarray[Any, Any], mapped: MappedFiles) -> ModelTensor:
    import numpy as np

    low, high = _bounds(array)
    where = mapped.find(low, high - low) if array.nbytes else None
    if where is not None and not (array.flags.c_contiguous and not array.dtype.str.startswith(">")):
        # The copies below would touch the mapping.
        data = where.file.read_at(where.offset, high - low)
        first = array.__array_interface__["data"][0] - low
        array = np.ndarray(array.shape, array.dtype, data, first, array.strides)
        where = None
    if array.dtype.str.startswith(">"):
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.nbytes:
        # Plain bytes first: numpy exports no buffer for bfloat16 and its like.
        memory = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data.toreadonly()
    else:
        memory = memoryview(b"")
    payload: FileRange | memoryview = memory
    if where is not None:
        payload = where.file.range(where.offset, memory.nbytes)
    code = _BF16 if array.dtype.name == "bfloat16" else _CODES.get(array.dtype.str)
    return ModelTensor(
        name=name,
        type_code=code,
        type_name=array.dtype.name if code is None else TYPES[code].name,
        ne=tuple(reversed(array.shape)) or (1,),
        nbytes=memory.nbytes,
        payload=payload,
        dtype=array.dtype.str if code is None and np.dtype(array.dtype.str) == array.dtype else None,
        _memory=memory,
    )


def _bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The addresses of the array's first byte and of the one after its last."""
    low = high = int(array.__array_interface__["data"][0])
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
    return low, high + array.itemsize


def _as_array(name: str, value: object) -> np.ndarray[Any, Any]:
    """``value`` as a numpy array over the same memory; not a sequence, whose bytes would be numpy's choice."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return np.asarray(value)
    try:
        if hasattr(value, "__array__"):
            return np.asarray(value)
        return np.asarray(memoryview(value))  # type: ignore[arg-type]
    except TypeError as error:
        raise ModelError(
            f"tensor {name!r} is a {type(value).__name__}, which has no buffer: {error}",
            hint="pass numpy arrays, or anything with the buffer protocol",
        ) from error
    except Exception as error:  # whatever a foreign __array__ raises
        raise ModelError(f"tensor {name!r}: no array can be made of its {type(value).__name__}: {error}") from error
