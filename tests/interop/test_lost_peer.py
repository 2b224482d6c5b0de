"""A stock server that dies or stalls in the middle, and a client of ours that is told a wrong version."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.awkward import MIB
from support.leaks import LeakCheck
from support.stock import StockServer

import weightwire
from weightwire.errors import IntegrityError, PeerClosed, TransferTimeout, TransportError

pytestmark = [pytest.mark.interop]

#: More than the socket buffers of both sides hold, so that a push cannot be over before the server has read it.
LARGE = {f"part{number}": bytearray(24 * MIB) for number in range(4)}


@contextmanager
def stopped(server: StockServer) -> Iterator[None]:
    """The server's process stands still."""
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def test_it_dies_inside_a_push(stock_protocol, stock_server, no_leaks: LeakCheck):
    server = stock_server(stock_protocol)
    seen: list[str] = []

    def kill(name: str, done: int, total: int) -> None:
        seen.append(name)
        if done:
            server.stop()

    with weightwire.connect(server.endpoint, timeout=20) as connection:
        with pytest.raises(PeerClosed) as caught:
            connection.push(LARGE, progress=kill)
        assert seen
        assert caught.value.tensor in LARGE
        assert 0 <= caught.value.bytes_done <= 24 * MIB
        with pytest.raises(TransportError):
            connection.barrier()


def test_it_stands_still(stock_protocol, stock_server, no_leaks: LeakCheck):
    server = stock_server(stock_protocol)
    with weightwire.connect(server.endpoint, timeout=20) as connection, stopped(server):
        connection._channel._stream.timeout = 1.0
        with pytest.raises(TransferTimeout) as caught:
            connection.push(LARGE)
        assert caught.value.elapsed >= 1


def test_a_stalled_server_is_a_busy_one_to_a_new_client(stock_server, no_leaks: LeakCheck):
    server = stock_server()
    with stopped(server), pytest.raises(TransferTimeout):
        weightwire.connect(server.endpoint, timeout=1)
    with weightwire.connect(server.endpoint, timeout=20) as connection:
        connection.barrier()


def test_nobody_listens(stock_server, no_leaks: LeakCheck):
    server = stock_server()
    server.stop()
    with pytest.raises(TransportError, match=server.endpoint):
        weightwire.connect(server.endpoint, timeout=5)


def test_verify_sees_what_a_wrong_version_does(stock_server):
    """Protocol 7 puts a byte before the offset; spoken to as 6, a server takes the data, one byte late.

    Nothing but reading the bytes back can tell.
    """
    server = stock_server()
    with weightwire.connect(server.endpoint, timeout=20, protocol="6.0") as connection:
        with pytest.raises(IntegrityError) as caught:
            connection.push({"zero_first": b"\0" + bytes(range(1, 256))}, verify=True)
        assert caught.value.name == "zero_first"
    with weightwire.connect(server.endpoint, timeout=20) as connection:
        connection.push({"zero_first": b"\0" + bytes(range(1, 256))}, verify=True)
