"""Models that lie in memory: a mapping from names to anything with the buffer protocol, such as numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from weightwire.errors import ModelError
from weightwire.model.base import Model, ModelTensor, usable_name
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
    ``type_code`` None. ModelError for object arrays and for values without a buffer.
    """
    return Model({name: _tensor(name, value) for name, value in arrays.items()}, format="arrays")


def _tensor(name: object, value: object) -> ModelTensor:
    import numpy as np

    if not isinstance(name, str) or not usable_name(name):
        raise ModelError(f"{name!r} cannot be a tensor's name", hint="names are text without NUL")
    array = _as_array(name, value)
    if array.dtype.hasobject:
        raise ModelError(
            f"tensor {name!r} holds Python objects (dtype {array.dtype}), which are addresses rather than numbers",
            hint="convert it first: array.astype(numpy.float32)",
        )
    if array.dtype.str.startswith(">"):
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.nbytes:
        # Plain bytes first: numpy exports no buffer for bfloat16 and its like.
        payload = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data.toreadonly()
    else:
        payload = memoryview(b"")
    code = _BF16 if array.dtype.name == "bfloat16" else _CODES.get(array.dtype.str)
    return ModelTensor(
        name=name,
        type_code=code,
        type_name=array.dtype.name if code is None else TYPES[code].name,
        ne=tuple(reversed(array.shape)) or (1,),
        nbytes=payload.nbytes,
        payload=payload,
    )


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
