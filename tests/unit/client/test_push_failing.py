"""What hashes ahead fails while a large tensor is on its way over a slow link, or an answer is waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.leaks import LeakCheck
from support.scripted import Message, ScriptedServer, StandIn

import weightwire
from weightwire.client import hashpool
from weightwire.wire.commands import Command

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


class Silent(StandIn):
    """Answers no question about its cache before the test lets it."""

    def __init__(self, asked: threading.Event, go: threading.Event) -> None:
        super().__init__(flags=1)
        self.asked, self.go = asked, go

    def serve(self, message: Message) -> bytes | None:
        if message.command == Command.SET_TENSOR_HASH:
            self.asked.set()
            self.go.wait(60)
        return super().serve(message)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_push_ends_while_the_server_is_waited_for(
    servers: int, monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    """On the caller's thread, and on the threads of a push to several."""
    asked, go = threading.Event(), threading.Event()
    right = hashpool.hash_payloads

    def failing(payloads: Sequence[memoryview], *, check: Callable[[], object]) -> list[int]:
        if payloads[0].nbytes != 12 * MIB:
            assert asked.wait(60)
            raise RuntimeError("broke")
        return right(payloads, check=check)

    monkeypatch.setattr(hashpool, "hash_payloads", failing)
    model = {"a": np.ones(12 * MIB, np.uint8), "b": np.ones(11 * MIB, np.uint8)}
    options: dict[str, Any] = {"cache": "always", "probe": False, "threads": 1, "index": False}
    with contextlib.ExitStack() as stack:
        endpoints = [stack.enter_context(ScriptedServer(Silent(asked, go))).endpoint for _ in range(servers)]
        if servers == 1:
            with weightwire.connect(endpoints[0], timeout=100) as connection:
                with pytest.raises(RuntimeError, match="broke"):
                    connection.push(model, **options)
                assert connection.closed, "an answer was still to come"
        else:
            with weightwire.push_all(model, endpoints, timeout=100, **options) as pushed:
                assert [str(each.error) for each in pushed] == ["broke"] * servers
        assert not go.is_set()
        go.set()
