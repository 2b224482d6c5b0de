"""What upstream says of its tensor types and of tensors' sizes: stock_types.py LIBRARY_FOLDER TYPES TENSORS.

TYPES is a JSON list of type numbers, TENSORS one of [type, [four ne], [four nb]]. Prints one JSON object:
{"types": [[name, block elements, block bytes, quantised], ...], "nbytes": [bytes, ...]}.
"""

import ctypes
import json
import sys
from pathlib import Path

from stock_server import load


class TensorHead(ctypes.Structure):
    """The beginning of ggml_tensor, which is all that ggml_nbytes looks at."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("rest", ctypes.c_uint8 * 1024),
    )


def main() -> None:
    """Ask and print."""
    base = load(Path(sys.argv[1]), "ggml-base")
    for name, result in (
        ("ggml_type_name", ctypes.c_char_p),
        ("ggml_blck_size", ctypes.c_int64),
        ("ggml_type_size", ctypes.c_size_t),
        ("ggml_is_quantized", ctypes.c_bool),
    ):
        function = getattr(base, name)
        function.restype = result
        function.argtypes = [ctypes.c_int]
    base.ggml_nbytes.restype = ctypes.c_size_t
    base.ggml_nbytes.argtypes = [ctypes.POINTER(TensorHead)]
    types = [
        [
            base.ggml_type_name(code).decode(),
            base.ggml_blck_size(code),
            base.ggml_type_size(code),
            base.ggml_is_quantized(code),
        ]
        for code in json.loads(sys.argv[2])
    ]
    sizes = []
    for code, ne, nb in json.loads(sys.argv[3]):
        tensor = TensorHead(type=code, ne=(ctypes.c_int64 * 4)(*ne), nb=(ctypes.c_size_t * 4)(*nb))
        sizes.append(base.ggml_nbytes(ctypes.byref(tensor)))
    print(json.dumps({"types": types, "nbytes": sizes}))


if __name__ == "__main__":
    main()
