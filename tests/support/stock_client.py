"""The stock ggml RPC client, driven line by line: stock_client.py LIBRARY_FOLDER HOST:PORT.

Run as a script, because upstream ends its own process on errors. Reads one JSON list per line, [operation, arguments
…], and answers each with one JSON value per line. Bytes travel through files, whose paths are the arguments. Any
Python can run it.
"""

import ctypes
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

from stock_server import load, one_backend

SIZE, POINTER = ctypes.c_size_t, ctypes.c_void_p
USAGE_WEIGHTS = 1


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", SIZE), ("mem_buffer", POINTER), ("no_alloc", ctypes.c_bool))


class Client:
    """One connection of the stock client, its tensors and their buffer."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.base = load(folder, "ggml-base")
        load(folder, "ggml-cpu")
        load(folder, "ggml")
        rpc = load(folder, "ggml-rpc")
        self.declare()
        rpc.ggml_backend_rpc_init.restype = POINTER
        if one_backend(folder):
            rpc.ggml_backend_rpc_init.argtypes = [ctypes.c_char_p]
            self.backend = rpc.ggml_backend_rpc_init(endpoint.encode())
        else:
            rpc.ggml_backend_rpc_init.argtypes = [ctypes.c_char_p, ctypes.c_uint32]
            self.backend = rpc.ggml_backend_rpc_init(endpoint.encode(), 0)
        if not self.backend:
            sys.exit("the stock client could not connect")
        self.tensors: list[int] = []
        self.buffer = None

    def declare(self) -> None:
        """Argument and result types of what is called."""
        functions: dict[str, tuple[Any, list[Any]]] = {
            "ggml_init": (POINTER, [InitParams]),
            "ggml_tensor_overhead": (SIZE, []),
            "ggml_new_tensor": (POINTER, [POINTER, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64)]),
            "ggml_set_name": (POINTER, [POINTER, ctypes.c_char_p]),
            "ggml_nbytes": (SIZE, [POINTER]),
            "ggml_backend_alloc_ctx_tensors": (POINTER, [POINTER, POINTER]),
            "ggml_backend_buffer_set_usage": (None, [POINTER, ctypes.c_int]),
            "ggml_backend_buffer_clear": (None, [POINTER, ctypes.c_uint8]),
            "ggml_backend_buffer_free": (None, [POINTER]),
            "ggml_backend_tensor_set": (None, [POINTER, POINTER, SIZE, SIZE]),
            "ggml_backend_tensor_get": (None, [POINTER, POINTER, SIZE, SIZE]),
            "ggml_backend_tensor_memset": (None, [POINTER, ctypes.c_uint8, SIZE, SIZE]),
            "ggml_backend_tensor_copy": (None, [POINTER, POINTER]),
        }
        for name, (result, arguments) in functions.items():
            function = getattr(self.base, name)
            function.restype, function.argtypes = result, arguments

    def create(self, tensors: list[tuple[str, int, list[int]]], weights: bool) -> list[int]:
        """Make the tensors (name, type, ne) in one new buffer; returns the bytes of each."""
        context = self.base.ggml_init(InitParams(self.base.ggml_tensor_overhead() * (len(tensors) + 1), None, True))
        for name, kind, ne in tensors:
            shape = (ctypes.c_int64 * len(ne))(*ne)
            tensor = self.base.ggml_new_tensor(context, kind, len(ne), shape)
            self.base.ggml_set_name(tensor, name.encode())
            self.tensors.append(tensor)
        self.buffer = self.base.ggml_backend_alloc_ctx_tensors(context, self.backend)
        if not self.buffer:
            sys.exit("the stock client could not allocate")
        if weights:
            self.base.ggml_backend_buffer_set_usage(self.buffer, USAGE_WEIGHTS)
        return [self.base.ggml_nbytes(tensor) for tensor in self.tensors]

    def set(self, index: int, path: str, start: int, offset: int, size: int) -> None:
        """Write `size` bytes from byte `start` of the file at `path` to byte `offset` of a tensor."""
        if not size:
            return
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            whole = (ctypes.c_char * len(mapped)).from_buffer(mapped)
            source = ctypes.addressof(whole) + start
            self.base.ggml_backend_tensor_set(self.tensors[index], source, offset, size)
            del whole

    def get(self, index: int, path: str, offset: int, size: int) -> None:
        """Read bytes of a tensor into a new file."""
        block = ctypes.create_string_buffer(max(size, 1))
        self.base.ggml_backend_tensor_get(self.tensors[index], block, offset, size)
        with open(path, "wb") as file:
            file.write(memoryview(block)[:size])

    def memset(self, index: int, value: int, offset: int, size: int) -> None:
        """Fill bytes of a tensor."""
        self.base.ggml_backend_tensor_memset(self.tensors[index], value, offset, size)

    def copy(self, source: int, destination: int) -> None:
        """Copy one tensor over another, on the server."""
        self.base.ggml_backend_tensor_copy(self.tensors[source], self.tensors[destination])

    def clear(self, value: int) -> None:
        """Fill the whole buffer."""
        self.base.ggml_backend_buffer_clear(self.buffer, value)

    def free(self) -> None:
        """Free the buffer; the connection stays."""
        self.base.ggml_backend_buffer_free(self.buffer)


def main() -> None:
    """Do what each line says until the input ends."""
    client = Client(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        print(json.dumps(getattr(client, operation)(*arguments)), flush=True)
    # Upstream's own clean-up at exit is not what is tested here.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
