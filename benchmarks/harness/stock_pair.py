"""The stock ggml RPC client and server, each in a process of its own, driven through their C interface.

Run as a script this file is the client::

    stock_pair.py LIBDIR ENDPOINT FILE WEIGHTS   < JSON list of [offset, nbytes]

It prints a JSON list: the seconds from allocating the tensors to the answer that proves the last byte arrived, and the
client's processor seconds meanwhile. The server is the one that the tests use.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.network import Network

GGML_TYPE_I8 = 24
BUFFER_USAGE_WEIGHTS = 1


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def _load(folder: str) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    # by the names that the libraries ask each other for: any other name would load a second copy with its own state
    base, _, _, rpc = (
        ctypes.CDLL(os.path.join(folder, f"lib{name}.so.0"), mode=ctypes.RTLD_GLOBAL)
        for name in ("ggml-base", "ggml-cpu", "ggml", "ggml-rpc")
    )
    return base, rpc


def push(folder: str, endpoint: str, path: str, weights: bool) -> None:
    """Set one I8 tensor per range of the file, in order, and print the seconds and the processor seconds it took."""
    ranges = json.load(sys.stdin)
    base, rpc = _load(folder)
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    base.ggml_init.restype, base.ggml_init.argtypes = pointer, [_InitParams]
    base.ggml_new_tensor_2d.restype = pointer
    base.ggml_new_tensor_2d.argtypes = [pointer, ctypes.c_int, integer, integer]
    base.ggml_backend_alloc_ctx_tensors.restype = pointer
    base.ggml_backend_alloc_ctx_tensors.argtypes = [pointer, pointer]
    base.ggml_backend_buffer_set_usage.argtypes = [pointer, ctypes.c_int]
    base.ggml_backend_tensor_set.argtypes = base.ggml_backend_tensor_get.argtypes = [pointer, pointer, size, size]
    base.ggml_tensor_overhead.restype = size
    rpc.ggml_backend_rpc_init.restype, rpc.ggml_backend_rpc_init.argtypes = pointer, [ctypes.c_char_p, ctypes.c_uint32]
    context = base.ggml_init(_InitParams(base.ggml_tensor_overhead() * (len(ranges) + 2), None, True))
    backend = rpc.ggml_backend_rpc_init(endpoint.encode(), 0)
    tensors = [base.ggml_new_tensor_2d(context, GGML_TYPE_I8, nbytes, 1) for _, nbytes in ranges]
    with open(path, "rb") as file:
        # private and writable only because ctypes asks for a writable buffer to take its address
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    last = ctypes.create_string_buffer(1)
    started, busy = time.perf_counter(), time.process_time()
    buffer = base.ggml_backend_alloc_ctx_tensors(context, backend)
    if weights:
        base.ggml_backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
    for tensor, (offset, nbytes) in zip(tensors, ranges, strict=True):
        base.ggml_backend_tensor_set(tensor, address + offset, 0, nbytes)
    base.ggml_backend_tensor_get(tensors[-1], last, ranges[-1][1] - 1, 1)
    print(json.dumps([time.perf_counter() - started, time.process_time() - busy]), flush=True)
    os._exit(0)  # upstream's destructors are not ours to time


class StockPeer:
    """A stock server that stays, and a stock client started anew for every round."""

    def __init__(
        self,
        folder: Path,
        path: Path,
        ranges: list[tuple[int, int]],
        *,
        cache: Path | None = None,
        host: str = "127.0.0.1",
        network: Network | None = None,
    ) -> None:
        from support.stock import StockServer

        self.name = "stock pair, cache" if cache else "stock pair"
        at_server: tuple[str, ...] = ()
        self._at_client: tuple[str, ...] = ()
        if network is not None:
            host, at_server, self._at_client = network.host, network.at_server, network.at_client
        self._folder, self._path, self._ranges = folder, path, ranges
        self._weights = cache is not None
        self.nbytes = sum(nbytes for _, nbytes in ranges)
        self._log = tempfile.TemporaryDirectory()
        #: Processor seconds of client and server in each round.
        self.processor: list[float] = []
        self._server = StockServer(folder, "7.0.0", Path(self._log.name) / "server.log", cache, host, at_server)

    def server_output(self) -> str:
        """What the server printed so far."""
        return self._server.output()

    def round(self) -> float:
        from harness.children import processor_seconds

        before = processor_seconds(self._server.process.pid)
        arguments = [str(self._folder), self._server.endpoint, str(self._path), str(int(self._weights))]
        done = subprocess.run(
            [*self._at_client, sys.executable, __file__, *arguments],
            input=json.dumps(self._ranges),
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise RuntimeError(f"the stock client failed: {done.stderr[-500:]}")
        took, busy = json.loads(done.stdout.strip().splitlines()[-1])
        self.processor.append(busy + processor_seconds(self._server.process.pid) - before)
        return float(took)

    def close(self) -> None:
        self._server.stop()
        self._log.cleanup()


if __name__ == "__main__":
    push(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "1")
