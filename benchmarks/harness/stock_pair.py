"""The stock ggml RPC client and servers, each in a process of its own, driven through their C interface.

Run as a script this file is the client::

    stock_pair.py LIBDIR FILE WEIGHTS CHECK   < JSON list of [endpoint, list of [offset, nbytes]]

It does what a load of llama.cpp does: allocates a buffer on every server, then sets each tensor of the first, one after
the other, then of the next, all on one thread. It prints a JSON list: the seconds from allocating to the answers that
prove the last byte of each server arrived, and the client's processor seconds meanwhile. With CHECK it reads every
tensor back then, and fails unless it is what the file has. The servers are those that the tests use.
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
from collections.abc import Sequence
from contextlib import ExitStack
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


def push(folder: str, path: str, weights: bool, check: bool) -> None:
    """Set one I8 tensor per range of the file, in order, and print the seconds and the processor seconds it took."""
    servers = json.load(sys.stdin)
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
    backends = []  # a context for each, as llama.cpp has one for each kind of buffer
    tensors = []  # of each server, with the range that it is set from
    for endpoint, ranges in servers:
        context = base.ggml_init(_InitParams(base.ggml_tensor_overhead() * (len(ranges) + 2), None, True))
        backends.append((context, rpc.ggml_backend_rpc_init(endpoint.encode(), 0)))
        tensors.append(
            [(base.ggml_new_tensor_2d(context, GGML_TYPE_I8, nbytes, 1), offset, nbytes) for offset, nbytes in ranges]
        )
    with open(path, "rb") as file:
        # private and writable only because ctypes asks for a writable buffer to take its address
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    last = ctypes.create_string_buffer(1)
    started, busy = time.perf_counter(), time.process_time()
    for context, backend in backends:
        buffer = base.ggml_backend_alloc_ctx_tensors(context, backend)
        if weights:
            base.ggml_backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
    for share in tensors:
        for tensor, offset, nbytes in share:
            base.ggml_backend_tensor_set(tensor, address + offset, 0, nbytes)
    for share in tensors:
        tensor, _, nbytes = share[-1]
        base.ggml_backend_tensor_get(tensor, last, nbytes - 1, 1)
    took, busy = time.perf_counter() - started, time.process_time() - busy
    for tensor, offset, nbytes in [each for share in tensors for each in share] if check else ():
        into = bytearray(nbytes)
        base.ggml_backend_tensor_get(tensor, ctypes.addressof(ctypes.c_char.from_buffer(into)), 0, nbytes)
        if into != memoryview(mapping)[offset : offset + nbytes]:
            sys.stderr.write(f"the tensor of {nbytes} bytes at {offset} of the file is another on the server\n")
            sys.stderr.flush()
            os._exit(1)
    print(json.dumps([took, busy]), flush=True)
    os._exit(0)  # upstream's destructors are not ours to time


class StockPeers:
    """Stock servers that stay, and one stock client, started anew for every round, that sends each its share of a file.

    ``shares`` are the ranges (offset and bytes) of the tensors for each server, ``networks`` where it is, and
    ``caches`` its directory. While ``check`` is set every round compares what the servers have with the file, after its
    time was taken.
    """

    def __init__(
        self,
        folder: Path,
        path: Path,
        shares: Sequence[Sequence[tuple[int, int]]],
        *,
        networks: Sequence[Network],
        caches: Sequence[Path] | None = None,
        name: str = "stock peers",
    ) -> None:
        from support.stock import StockServer

        self.name = f"{name}, cache" if caches else name
        self.check = False
        self.nbytes = sum(nbytes for ranges in shares for _, nbytes in ranges)
        #: Processor seconds of client and servers in each round.
        self.processor: list[float] = []
        self._folder, self._path, self._shares = folder, path, shares
        self._weights = caches is not None
        self._at_client = networks[0].at_client
        self._servers: list[StockServer] = []
        with ExitStack() as stack:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for number, network in enumerate(networks):
                cache = caches[number] if caches else None
                place = network.host, network.at_server
                server = StockServer(folder, "7.0.0", log / f"server-{number}.log", cache, *place)
                stack.callback(server.stop)
                self._servers.append(server)
            self._stack = stack.pop_all()

    def server_output(self) -> str:
        """What the servers printed so far."""
        return "".join(server.output() for server in self._servers)

    def round(self) -> float:
        before = self._busy()
        arguments = [str(self._folder), str(self._path), str(int(self._weights)), str(int(self.check))]
        endpoints = [server.endpoint for server in self._servers]
        done = subprocess.run(
            [*self._at_client, sys.executable, __file__, *arguments],
            input=json.dumps(list(zip(endpoints, self._shares, strict=True))),
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise RuntimeError(f"the stock client failed: {done.stderr[-500:]}")
        took, busy = json.loads(done.stdout.strip().splitlines()[-1])
        self.processor.append(busy + self._busy() - before)
        return float(took)

    def _busy(self) -> float:
        from harness.children import processor_seconds

        return sum(processor_seconds(server.process.pid) for server in self._servers)

    def close(self) -> None:
        self._stack.close()


class StockPeer(StockPeers):
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
        from harness.network import Network

        networks = [network or Network(host=host)]
        caches = None if cache is None else [cache]
        super().__init__(folder, path, [ranges], networks=networks, caches=caches, name="stock pair")


if __name__ == "__main__":
    push(sys.argv[1], sys.argv[2], sys.argv[3] == "1", sys.argv[4] == "1")
