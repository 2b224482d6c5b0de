"""The bare socket pair: the same bytes, from the same mapping, into memory allocated the same way, and nothing else.

``-m harness.socket_pair receive HOST NBYTES POPULATE`` is the receiving half: it prints its port, and for every
connection allocates a fresh region of huge pages, receives NBYTES into it and answers one byte; it ends with its input.
With POPULATE=1 a second thread touches the region ahead of the data, as weightwire's server does. ``send FILE`` with
one or more HOST:PORT:OFFSET:NBYTES is the sending half: for every line of its input it sends each of them that part of
FILE's mapping, to all at once, a thread for each, and prints the seconds that took.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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


def send_when_told(path: str, targets: Sequence[str]) -> None:
    """A round for every line of the input."""
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        mapping = stack.enter_context(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        view = stack.enter_context(memoryview(mapping))
        parts = []
        for target in targets:
            host, port, offset, nbytes = target.split(":")
            part = stack.enter_context(view[int(offset) : int(offset) + int(nbytes)])
            parts.append((host, int(port), part))
        pool = stack.enter_context(ThreadPoolExecutor(len(parts)))
        for _ in sys.stdin:
            if len(parts) == 1:
                took = send(*parts[0])
            else:
                started = time.perf_counter()
                list(pool.map(lambda part: send(*part), parts))
                took = time.perf_counter() - started
            print(json.dumps(took), flush=True)


class SocketPairsPeer:
    """Sends parts of a file's mapping over TCP, each to a process of its own, all at once.

    ``parts`` are offset and bytes of what each receiver gets, ``networks`` where it is.
    """

    def __init__(
        self,
        path: Path,
        parts: Sequence[tuple[int, int]],
        *,
        networks: Sequence[Network],
        populate: bool = False,
        name: str = "socket pairs",
    ) -> None:
        self.name = f"{name}, populated ahead" if populate else name
        self.nbytes = sum(nbytes for _, nbytes in parts)
        with ExitStack() as stack:
            targets = []
            for network, (offset, nbytes) in zip(networks, parts, strict=True):
                receiver = Worker(network.at_server, "socket_pair", "receive", network.host, nbytes, int(populate))
                stack.callback(receiver.close)
                targets.append(f"{network.host}:{receiver.read()}:{offset}:{nbytes}")
            self._sender = Worker(networks[0].at_client, "socket_pair", "send", path, *targets)
            stack.callback(self._sender.close)
            self._stack = stack.pop_all()

    def round(self) -> float:
        took: float = self._sender.ask("go")
        return took

    def close(self) -> None:
        self._stack.close()


class SocketPairPeer(SocketPairsPeer):
    """Sends a file's mapping over TCP, each half in a process of its own."""

    def __init__(self, path: Path, *, populate: bool, network: Network = LOOPBACK) -> None:
        part = (0, path.stat().st_size)
        super().__init__(path, [part], networks=[network], populate=populate, name="socket pair")


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive_forever(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
    else:
        send_when_told(sys.argv[2], sys.argv[3:])
