"""Waiting, by a thread that no signal is for: it sleeps until something happens, and is woken by whatever does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.ends import tcp_ends
from support.fakeverbs import DEVICE_FATAL, FakeVerbs
from support.idle import sleeps_on
from support.pace import Pace, slow_and_not_stalled
from support.rdma import connect_rdma, request

from weightwire.errors import PeerClosed, TransferTimeout, VerbsError
from weightwire.transport.base import ByteStream
from weightwire.transport.rdma import RdmaStream
from weightwire.transport.registration import CHUNK
from weightwire.transport.tcp import TcpStream


@pytest.fixture(params=["tcp", "rdma"])
def ends(
    request: pytest.FixtureRequest, fake: FakeVerbs, tcp_pair: tuple[TcpStream, TcpStream]
) -> Iterator[tuple[ByteStream, ByteStream]]:
    pair: tuple[ByteStream, ByteStream] = tcp_pair if request.param == "tcp" else connect_rdma(*tcp_pair)
    for end in pair:
        end.timeout = None
    yield pair
    for end in pair:
        end.close()


def test_a_reader_sleeps_until_bytes_come(ends: tuple[ByteStream, ByteStream], background: Any) -> None:
    client, server = ends
    waiting = background(server.recv, 9)
    sleeps_on(waiting.native_id)
    client.send(request(1, b""))
    assert waiting.result() == request(1, b"")


def test_a_session_sleeps_until_the_peer_leaves(ends: tuple[ByteStream, ByteStream], background: Any) -> None:
    client, server = ends
    waiting = background(server.recv_or_eof, 1)
    sleeps_on(waiting.native_id)
    client.close()
    assert waiting.result() is None


@pytest.mark.parametrize("end", ["shutdown", "close"])
def test_a_reader_that_sleeps_is_woken(ends: tuple[ByteStream, ByteStream], background: Any, end: str) -> None:
    _, server = ends
    waiting = background(server.recv, 9)
    sleeps_on(waiting.native_id)
    getattr(server, end)()
    with pytest.raises(PeerClosed):
        waiting.result()


def test_a_reader_that_sleeps_has_its_deadline(ends: tuple[ByteStream, ByteStream], background: Any) -> None:
    _, server = ends
    waiting = background(lambda: server.recv(9, timeout=0.7))
    with pytest.raises(TransferTimeout) as caught:
        waiting.result()
    assert caught.value.elapsed >= 0.7


@pytest.mark.parametrize("kind", ["tcp", "rdma"])
def test_less_than_the_low_water_mark_is_progress(fake: FakeVerbs, background: Any, kind: str) -> None:
    """A large payload that trickles: every piece puts the deadline off, though none of them would wake the reader."""
    head, body = request(6, bytes(CHUNK + 5))[:9], bytes(CHUNK + 5)
    starts = range(0, len(body), 1 << 15)

    def attempt(timeout: float, pace: Pace) -> None:
        client, server = tcp_ends() if kind == "tcp" else connect_rdma(*tcp_ends())
        server.timeout = timeout
        waiting = background(server.recv, 9 + CHUNK + 5)
        try:
            client.send(head)
            for start in starts:
                pace.step(client.send, body[start : start + (1 << 15)])
            assert waiting.result() == head + body
        finally:
            server.close()
            client.close()

    slow_and_not_stalled(3.0, len(starts), attempt)


def test_both_directions_hear_of_a_device_that_goes(
    fake: FakeVerbs, rdma_pair: tuple[RdmaStream, RdmaStream], background: Any
) -> None:
    """Its event is told once, to one of the two threads that wait."""
    client, _ = rdma_pair
    client.timeout = None
    fake.set("stall", 1)
    waiting = [background(client.recv, 1), background(client.send, request(6, bytes(20 * CHUNK)))]
    sleeps_on(waiting[0].native_id)
    fake.event(DEVICE_FATAL)
    for each in waiting:
        with pytest.raises(VerbsError, match="device was removed"):
            each.result()
    fake.set("stall", 0)


def test_the_main_thread_looks_around(ends: tuple[ByteStream, ByteStream], alarm: Callable[..., Any]) -> None:
    """A signal may come between the look for one and the wait; Ctrl-C must not be lost to that."""
    assert threading.current_thread() is threading.main_thread()

    class Stop(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stop

    with pytest.raises(Stop), alarm(stop, 0.5):
        ends[1].recv(1)


def test_a_sender_takes_over_from_a_receiver_that_leaves(
    rdma_pair: tuple[RdmaStream, RdmaStream], background: Any
) -> None:
    """The peer answers before it reads on, and nobody else is left to make room for its answers."""
    client, server = rdma_pair
    for end in rdma_pair:
        end.timeout = 60.0
    receiving = background(client.recv, 8)
    sending = background(client.send, request(6, bytes(60 * CHUNK)))
    server.send(bytes(8))
    assert receiving.result() == bytes(8)
    time.sleep(0.5)
    answers = 60
    for _ in range(answers):
        server.send(bytes(8))
    assert server.recv(9 + 60 * CHUNK)[:1] == b"\x06"
    sending.result()
    assert client.recv(8 * answers) == bytes(8 * answers)
