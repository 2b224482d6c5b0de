"""What upstream's own GGUF parser finds in a file: stock_gguf.py LIBRARY_FOLDER MODEL.

Prints one JSON object: tensor name -> [ggml type, byte offset in the file, bytes].
"""

import ctypes
import json
import sys
from pathlib import Path

from stock_server import load


class GgufParams(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def main() -> None:
    """Parse and print."""
    base = load(Path(sys.argv[1]), "ggml-base")
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, GgufParams]
    for name, result in (
        ("gguf_get_n_tensors", ctypes.c_int64),
        ("gguf_get_data_offset", ctypes.c_size_t),
        ("gguf_get_tensor_name", ctypes.c_char_p),
        ("gguf_get_tensor_type", ctypes.c_int),
        ("gguf_get_tensor_offset", ctypes.c_size_t),
        ("gguf_get_tensor_size", ctypes.c_size_t),
    ):
        function = getattr(base, name)
        function.restype = result
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64] if "_tensor_" in name else [ctypes.c_void_p]
    model = base.gguf_init_from_file(sys.argv[2].encode(), GgufParams(True, None))
    if not model:
        sys.exit(f"{sys.argv[2]} is no GGUF")
    start = base.gguf_get_data_offset(model)
    found = {}
    for index in range(base.gguf_get_n_tensors(model)):
        name = base.gguf_get_tensor_name(model, index).decode()
        offset = start + base.gguf_get_tensor_offset(model, index)
        found[name] = [base.gguf_get_tensor_type(model, index), offset, base.gguf_get_tensor_size(model, index)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
