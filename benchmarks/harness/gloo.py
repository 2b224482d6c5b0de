"""gloo, the transport that torch.distributed uses between CPUs, sending the same bytes; only where torch is installed.

``-m harness.gloo RANK HOST PORT FILE NBYTES`` is one of two processes. Rank 0 sends FILE's mapping for every line
of its input and prints the seconds until rank 1 has answered; rank 1 receives into a fresh tensor each time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from harness.children import Worker
from harness.network import LOOPBACK, Network
from harness.rounds import PeerAbsent

PIECE = 64 << 20
"""Bytes of one send, as of a large tensor."""

_PATIENCE = timedelta(seconds=120)


def take_part(rank: int, host: str, port: int, path: str, nbytes: int) -> None:
    """Be one of the two ends until the sender's input ends."""
    import numpy as np
    import torch
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=2, timeout=_PATIENCE
    )
    word = torch.zeros(1, dtype=torch.uint8)
    print(json.dumps("ready"), flush=True)
    if rank == 0:
        # Copied on write, and never written: torch takes no memory that is read-only.
        data = torch.from_numpy(np.memmap(path, np.uint8, "c"))
        for _ in sys.stdin:
            distributed.send(torch.ones_like(word), 1)
            started = time.perf_counter()
            for at in range(0, nbytes, PIECE):
                distributed.send(data[at : at + PIECE], 1)
            distributed.recv(word, 1)
            print(json.dumps(time.perf_counter() - started), flush=True)
        distributed.send(torch.zeros_like(word), 1)
    else:
        while True:
            distributed.recv(word, 0)
            if not word.item():
                break
            data = torch.empty(nbytes, dtype=torch.uint8)
            for at in range(0, nbytes, PIECE):
                distributed.recv(data[at : at + PIECE], 0)
            distributed.send(word, 0)
            del data
    os._exit(0)  # its own end of a group waits for threads of the other


class GlooPeer:
    """Two processes that send and receive with torch.distributed. Raises PeerAbsent where there is no torch."""

    name = "gloo"

    def __init__(self, path: Path, *, network: Network = LOOPBACK) -> None:
        if importlib.util.find_spec("torch") is None:
            raise PeerAbsent("torch is not installed")
        self.nbytes = path.stat().st_size
        with socket.socket() as probe:  # the port can be named only
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # By default it listens where the host's name leads, which may be nowhere.
        device = {"GLOO_SOCKET_IFNAME": "lo" if network is LOOPBACK else "ww0"}
        ends = ((network.at_server, 1), (network.at_client, 0))
        with contextlib.ExitStack() as stack:
            workers = []
            for place, rank in ends:
                # Rank 0 is where the other looks for it.
                at = network.host if network is LOOPBACK else network.client
                workers.append(Worker(place, "gloo", rank, at, port, path, self.nbytes, environ=device))
                stack.callback(workers[-1].close)
            self._receiver, self._sender = workers
            for worker in reversed(workers):
                try:
                    worker.read()
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    raise PeerAbsent(f"torch.distributed does not work here: {error}") from error
            self._stack = stack.pop_all()

    def round(self) -> float:
        took: float = self._sender.ask("go")
        return took

    def close(self) -> None:
        # The sender first: it tells the receiver.
        self._sender.close()
        self._stack.close()


if __name__ == "__main__":
    take_part(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
