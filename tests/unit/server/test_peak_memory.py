"""What a server needs beyond the tensors themselves does not grow with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.raw_client import RawClient

from weightwire.hashing import fnv1a64
from weightwire.wire import Command

MIB = 1 << 20
NBYTES = 192 * MIB
BEYOND = 64 * MIB

CHILD = """
import sys
from weightwire.server import Destination, Server

class Elsewhere(Destination):
    def write(self, offset, view): pass
    def read(self, offset, view): view[:] = bytes(len(view))
    def fill(self, offset, nbytes, value): pass

kind, cache, protocol = sys.argv[1:]
server = Server(port=0, cache=cache or None, protocol=protocol, destination=None if kind == "host" else
                lambda nbytes, device: Elsewhere(nbytes))
with server:
    print(server.port, flush=True)
    sys.stdin.readline()
    status = open("/proc/self/status").read()
    print(int(status.split("VmHWM:")[1].split()[0]) * 1024, flush=True)
"""


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", ["host", "hook"])
def test_one_large_tensor_in_and_out(kind: str, cached: bool, tmp_path: Path) -> None:
    directory = str(tmp_path) if cached else ""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, kind, directory, "8.0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        payload = memoryview(bytes(range(256)) * (MIB // 256))
        with RawClient(int(child.stdout.readline()), "8.0") as client:
            tensor = client.place("large", NBYTES, client.allocate(NBYTES))
            head = client.dialect.encode_set_tensor(tensor, 0, 1)
            client.send(Command.SET_TENSOR, head, size=len(head) + NBYTES)
            for _ in range(NBYTES // MIB):
                client.socket.sendall(payload)
            if cached:
                digest = fnv1a64(b"")
                for _ in range(NBYTES // MIB):
                    digest = fnv1a64(payload, digest)
                assert client.set_from_cache(tensor, digest)
            rows = client.dialect.encode_get_tensor_2d(tensor, 0, 1000, NBYTES // 1001, 1001)
            for cmd, payload_of_request in (
                (Command.GET_TENSOR, client.dialect.encode_get_tensor(tensor, 0, NBYTES)),
                (Command.GET_TENSOR_2D, rows),
            ):
                client.send(cmd, payload_of_request)
                left = int.from_bytes(client.receive(8), "little")
                while left:
                    left -= len(client.receive(min(left, MIB)))
        peak, _ = child.communicate("\n", timeout=60)
        stored = NBYTES if kind == "host" else 0
        assert int(peak) - stored < BEYOND
    finally:
        child.kill()
        child.wait()
