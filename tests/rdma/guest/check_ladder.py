"""Connecting under a real limit of locked memory, as a user whom it binds. Run by pytest inside the guest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import IO, Any

from support.guest import ADDRESS, DEPTHS, ServeProcess, confined

import weightwire

#: KiB that are too few for the smallest rings, down to what some distributions allow.
TOO_LITTLE = (6396, 6144, 4096, 2048, 1024, 256, 64)


def connect_to(endpoint: str) -> str:
    """How a client is connected, after a push that was verified."""
    with weightwire.connect(endpoint) as connection:
        pushed = connection.push({"w": memoryview(b"weights" * 300_000)}, verify=True)
        return json.dumps({**connection.transport, "verified": pushed.summary.verified}, default=str)


def connect_in(kib: int, endpoint: str) -> dict[str, Any]:
    """The same with so little locked memory."""
    with confined(kib, lambda out: out.write(connect_to(endpoint))) as answer:
        text = answer.read()
    assert text.startswith("{"), f"{kib} KiB: {text}"
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_depth_reached_by_a_client(serve: Callable[..., ServeProcess]) -> None:
    endpoint = serve().endpoint
    # Once without a limit first: what Python loads only when it is wanted nobody could perhaps not read.
    connect_to(endpoint)
    found = {kib: connect_in(kib, endpoint) for kib in (*DEPTHS, *TOO_LITTLE)}
    for kib, transport in found.items():
        print(f"{kib:6} KiB: {transport['kind']}, depth {transport['send_depth']}: {transport['reason']}")
    assert all(transport["verified"] for transport in found.values())
    depths = {kib: transport["send_depth"] for kib, transport in found.items() if transport["kind"] == "rdma"}
    assert depths == DEPTHS
    for kib in TOO_LITTLE:
        assert f"within {kib} KiB of locked memory" in found[kib]["reason"]
        assert "ulimit -l" in found[kib]["reason"]


def test_a_server_without_locked_memory_stays_on_tcp() -> None:
    def work(out: IO[str]) -> None:
        with weightwire.Server(ADDRESS, 0) as server:
            out.write(f"{server.endpoints[0]}\n")
            time.sleep(60)

    with confined(64, work) as answer:
        endpoint = answer.readline().strip()
        assert endpoint.startswith(ADDRESS), endpoint
        with weightwire.connect(endpoint) as connection:
            assert connection.transport["kind"] == "tcp"
            assert connection.push({"w": memoryview(b"weights")}, verify=True).summary.verified
