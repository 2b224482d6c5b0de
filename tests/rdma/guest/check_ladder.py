"""Connecting under a real limit of locked memory, as a user whom it binds. Run by pytest inside the guest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import IO, Any

from support.guest import ADDRESS, ServeProcess, confined

import weightwire

#: KiB, from the usual limit down to what some distributions allow.
LIMITS = (16384, 8192, 7680, 7168, 6912, 6656, 6400, 6144, 4096, 2048, 1024, 256, 64)


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
    found = {kib: connect_in(kib, endpoint) for kib in LIMITS}
    for kib, transport in found.items():
        print(f"{kib:6} KiB: {transport['kind']}, depth {transport['send_depth']}: {transport['reason']}")
    assert all(transport["verified"] for transport in found.values())
    depths = [transport["send_depth"] for transport in found.values() if transport["kind"] == "rdma"]
    assert depths == sorted(depths, reverse=True)
    assert found[16384]["send_depth"] == 8
    assert set(depths) >= {8, 4, 2}
    on_tcp = [kib for kib in LIMITS if found[kib]["kind"] == "tcp"]
    # Once there is too little for the smallest rings, nothing smaller is enough either.
    assert on_tcp == list(LIMITS[-len(on_tcp) :])
    assert 4096 in on_tcp
    for kib in on_tcp:
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
