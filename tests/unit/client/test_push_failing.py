"""What hashes ahead fails while a large tensor is on its way over a slow link."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.leaks import LeakCheck

import weightwire
from weightwire.client import hashpool

MIB = 1 << 20
LARGE = 160 * MIB
FEW = 32 * MIB
"""What may be taken in by the server before it ends: far less than the tensor, far more than sockets hold."""


class Slow(weightwire.Destination):
    """Takes 16 MiB a second until it is let go, and remembers how far it got."""

    def __init__(self, nbytes: int, begun: threading.Event, go: threading.Event) -> None:
        super().__init__(nbytes)
        self.begun, self.go, self.taken = begun, go, 0

    def write(self, offset: int, view: memoryview) -> None:
        self.begun.set()
        self.go.wait(view.nbytes / (16 * MIB))
        self.taken += view.nbytes

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = bytes(view.nbytes)


def test_a_push_ends_inside_the_tensor_that_is_being_sent(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    begun, go = threading.Event(), threading.Event()
    made: list[Slow] = []
    right = hashpool.hash_payloads

    def failing(payloads: Sequence[memoryview], *, check: Callable[[], object]) -> list[int]:
        if payloads[0].nbytes != LARGE:
            assert begun.wait(60)
            raise RuntimeError("broke")
        return right(payloads, check=check)

    def destination(nbytes: int, device: int) -> Slow:
        made.append(Slow(nbytes, begun, go))
        return made[-1]

    monkeypatch.setattr(hashpool, "hash_payloads", failing)
    model = {"a": np.ones(LARGE, np.uint8), "b": np.ones(11 * MIB, np.uint8)}
    with weightwire.Server(port=0, destination=destination) as server:
        with weightwire.connect(server.endpoints[0], timeout=60) as connection:
            with pytest.raises(RuntimeError, match="broke"):
                connection.push(model, cache="always", probe=False, threads=2, index=False, in_flight=512 * MIB)
            taken = sum(each.taken for each in made)
            assert connection.closed, "its last message was cut"
        go.set()
    assert taken < FEW
