"""The bare socket pair: the same bytes, from the same mapping, into memory allocated the same way, and nothing else.

``-m harness.socket_pair receive HOST NBYTES POPULATE`` is the receiving half: it prints its port, and for every
connection allocates a fresh region of huge pages, receives NBYTES into it and answers one byte; it ends with its input.
With POPULATE=1 a second thread touches the region ahead of the data, as weightwire's server does. ``send HOST PORT
FILE`` is the sending half: for every line of its input it sends FILE's mapping and prints the seconds that took.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from harness.children import Worker
from harness.network import LOOPBACK, Network

SLICE = 1 << 30  # no single system call above 1 GiB


def _populate(region: object, nbytes: int) -> None:
    step = 32 << 20
    for offset in range(0, nbytes, step):
        region.populate(offset, min(step, nbytes - offset))  # type: ignore[attr-defined]


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def receive_forever(host: str, nbytes: int, populate: bool) -> None:
    """Serve rounds until the input ends."""
    from weightwire.transport.memory import HostRegion

    threading.Thread(target=_end_with_input, daemon=True).start()
    listener = socket.create_server((host, 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        peer, _ = listener.accept()
        with peer:
            peer.recv(1)
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


def send(host: str, port: int, view: memoryview) -> float:
    """Send it all on a new connection; the seconds until the receiver has it."""
    started = time.perf_counter()
    with socket.create_connection((host, port), timeout=60) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(None)
        peer.sendall(b"g")
        done = 0
        while done < view.nbytes:
            done += peer.send(view[done : done + SLICE])
        if peer.recv(1) != b"!":
            raise SystemExit("socket pair: the receiver failed")
        return time.perf_counter() - started


def send_when_told(host: str, port: int, path: str) -> None:
    """A round for every line of the input."""
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        mapping = stack.enter_context(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        view = stack.enter_context(memoryview(mapping))
        for _ in sys.stdin:
            print(json.dumps(send(host, port, view)), flush=True)


class SocketPairPeer:
    """Sends a file's mapping over TCP, each half in a process of its own."""

    def __init__(self, path: Path, *, populate: bool, network: Network = LOOPBACK) -> None:
        self.name = "socket pair, populated ahead" if populate else "socket pair"
        self.nbytes = path.stat().st_size
        self._receiver = Worker(network.at_server, "socket_pair", "receive", network.host, self.nbytes, int(populate))
        port = self._receiver.read()
        self._sender = Worker(network.at_client, "socket_pair", "send", network.host, port, path)

    def round(self) -> float:
        took: float = self._sender.ask("go")
        return took

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive_forever(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
    else:
        send_when_told(sys.argv[2], int(sys.argv[3]), sys.argv[4])
