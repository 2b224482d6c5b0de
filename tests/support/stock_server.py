"""A stock ggml-rpc server in this process, until it is killed: stock_server.py LIBRARY_FOLDER HOST:PORT [CACHE_FOLDER].

Run as a script, because upstream ends its own process on many a bad input. Any Python can run it: the libraries are
driven by ctypes.
"""

import ctypes
import os
import sys
from pathlib import Path

#: What the server says it has where it cannot ask a device (before protocol 3), in bytes.
CLAIMED_MEMORY = 8 << 30


def load(folder: Path, name: str) -> ctypes.CDLL:
    """Load one library by the file name its siblings ask for, so that it is not loaded a second time."""
    versioned = folder / f"lib{name}.so.0"
    return ctypes.CDLL(str(versioned if versioned.exists() else folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)


def serve(folder: Path, endpoint: str, cache: str | None) -> None:
    """Start the server; returns only when it could not listen."""
    base = load(folder, "ggml-base")
    cpu = load(folder, "ggml-cpu")
    load(folder, "ggml")
    start = load(folder, "ggml-rpc").ggml_backend_rpc_start_server
    directory = os.fsencode(cache) if cache else None
    if one_backend(folder):
        cpu.ggml_backend_cpu_init.restype = ctypes.c_void_p
        start.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
        start(cpu.ggml_backend_cpu_init(), endpoint.encode(), directory, CLAIMED_MEMORY, CLAIMED_MEMORY)
        return
    cpu.ggml_backend_cpu_reg.restype = ctypes.c_void_p
    base.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
    base.ggml_backend_reg_dev_get.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    devices = (ctypes.c_void_p * 1)(base.ggml_backend_reg_dev_get(cpu.ggml_backend_cpu_reg(), 0))
    start.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    start(endpoint.encode(), directory, 2, 1, devices)


def one_backend(folder: Path) -> bool:
    """True for releases whose C function takes one backend and its memory (before protocol 3) rather than a list of
    devices.

    The signature cannot be seen in the library; the function that took its place in the same change can: only the newer
    library exports ggml_backend_rpc_add_server.
    """
    return not hasattr(load(folder, "ggml-rpc"), "ggml_backend_rpc_add_server")


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
    sys.exit("the stock server came back: it could not listen")
