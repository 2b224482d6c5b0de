"""The bare socket pair: the same bytes, from the same mapping, into memory allocated the same way, and nothing else.

``socket_pair.py NBYTES POPULATE`` is the receiving half: it prints its port, and for every connection allocates a fresh
region of huge pages, receives NBYTES into it and answers one byte. With POPULATE=1 a second thread touches the region
ahead of the data, as weightwire's server does.
"""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

SLICE = 1 << 30  # no single system call above 1 GiB


def _populate(region: object, nbytes: int) -> None:
    step = 32 << 20
    for offset in range(0, nbytes, step):
        region.populate(offset, min(step, nbytes - offset))  # type: ignore[attr-defined]


def receive_forever(nbytes: int, populate: bool) -> None:
    """Serve rounds until told to quit."""
    from weightwire.transport.memory import HostRegion

    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        peer, _ = listener.accept()
        with peer:
            if peer.recv(1) == b"q":
                return
            region = HostRegion(nbytes)
            helper = None
            if populate:
                helper = threading.Thread(target=_populate, args=(region, nbytes))
                helper.start()
            view = memoryview(region).cast("B")
            done = 0
            while done < nbytes:
                got = peer.recv_into(view[done : done + SLICE], 0, socket.MSG_WAITALL)
                if not got:
                    raise SystemExit("socket pair: the sender left early")
                done += got
            peer.sendall(b"!")
            if helper is not None:
                helper.join()
            view.release()
            del region


class SocketPairPeer:
    """Sends a file's mapping over loopback TCP to a receiver in a process of its own."""

    def __init__(self, path: Path, *, populate: bool) -> None:
        self.name = "socket pair, populated ahead" if populate else "socket pair"
        self._file = path.open("rb")
        self._map = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)
        self.nbytes = len(self._view)
        self._child = subprocess.Popen(
            [sys.executable, __file__, str(self.nbytes), str(int(populate))], stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        self._port = int(self._child.stdout.readline())

    def round(self) -> float:
        started = time.perf_counter()
        with socket.create_connection(("127.0.0.1", self._port), timeout=60) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(None)
            peer.sendall(b"g")
            done = 0
            while done < self.nbytes:
                done += peer.send(self._view[done : done + SLICE])
            if peer.recv(1) != b"!":
                raise RuntimeError("socket pair: the receiver failed")
            return time.perf_counter() - started

    def close(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=10) as peer:
            peer.sendall(b"q")
        self._child.wait(10)
        self._view.release()
        self._map.close()
        self._file.close()


if __name__ == "__main__":
    receive_forever(int(sys.argv[1]), sys.argv[2] == "1")
