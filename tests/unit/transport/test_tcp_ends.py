"""How a stream ends: closed by another thread, shut down, dropped, or by the peer while nobody looks."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading

import pytest
from support.ends import underway, unread
from support.leaks import eventually

from weightwire.errors import PeerClosed, TransportError
from weightwire.transport.tcp import TcpStream

MiB = 1 << 20
DATA = bytes(range(256)) * (12 * 1024)


def has_taken_a_byte(sender: TcpStream, reader: TcpStream) -> None:
    """Wait until somebody is inside a call that reads more than a byte: one that begins later finds a closed stream."""
    sender.send(b"1")
    assert eventually(lambda: underway(sender) == 0 and unread(reader) == 0)


@pytest.mark.parametrize("end", ["shutdown", "close"])
@pytest.mark.parametrize("size", [10, MiB])
def test_a_blocked_reader_is_woken(tcp_pair, background, no_fd_leak, end: str, size: int) -> None:
    a, b = tcp_pair
    reader = background(lambda: b.recv(size, timeout=None))
    has_taken_a_byte(a, b)
    getattr(b, end)()
    with pytest.raises(PeerClosed, match="on this side"):
        reader.result()


def test_an_idle_session_ends_quietly(tcp_pair, background) -> None:
    _, b = tcp_pair
    reader = background(lambda: b.recv_or_eof(9, timeout=None))
    threading.Event().wait(0.05)
    b.shutdown()
    assert reader.result() is None


@pytest.mark.parametrize("end", ["shutdown", "close"])
def test_a_blocked_writer_is_woken(narrow, background, end: str) -> None:
    a, b = narrow
    a.timeout = None
    sender = background(a.send, DATA)
    assert eventually(lambda: unread(b) > 0)
    getattr(a, end)()
    with pytest.raises(PeerClosed, match="on this side"):
        sender.result()


def test_the_descriptor_outlives_a_call_in_flight(tcp_pair, background) -> None:
    a, b = tcp_pair
    number = b.fileno()
    reader = background(lambda: b.recv(MiB, timeout=None))
    has_taken_a_byte(a, b)
    b.close()
    assert b.fileno() == -1
    with pytest.raises(PeerClosed):
        reader.result()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert a.recv_or_eof(1) is None


@pytest.mark.parametrize("first", ["peek", "recv_or_eof", "send"])
def test_a_reset_is_told_whoever_finds_it_first(tcp_pair, first: str) -> None:
    a, b = tcp_pair
    with socket.socket(fileno=os.dup(a.fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    a.close()
    assert eventually(b.peer_gone)
    if first == "peek":
        assert b.peek(1) == b""
    elif first == "send":
        with pytest.raises(PeerClosed, match="the peer reset"):
            b.send(b"x")
    for _ in range(2):
        with pytest.raises(PeerClosed, match="the peer reset") as caught:
            b.recv_or_eof(1)
        assert caught.value.errno == errno.ECONNRESET


def test_closing_twice_and_using_a_closed_stream(tcp_pair) -> None:
    a, _ = tcp_pair
    a.close()
    a.close()
    a.shutdown()
    assert a.closed
    for call in (lambda: a.send(b"x"), lambda: a.recv(1), lambda: a.recv_into(bytearray(1))):
        with pytest.raises(TransportError, match="closed"):
            call()


def test_a_dropped_stream_gives_its_descriptor_back(no_fd_leak) -> None:
    for _ in range(20):
        one, other = socket.socketpair()
        TcpStream(one)
        with TcpStream(other):
            pass


# Looking after the peer


@pytest.mark.parametrize("unread", [b"", b"an answer"])
def test_a_peer_that_closes_is_gone_though_its_bytes_are_still_there(tcp_pair, unread: bytes) -> None:
    a, b = tcp_pair
    assert not a.peer_gone()
    if unread:
        b.send(unread)
        assert not a.peer_gone()
    b.close()
    assert eventually(a.peer_gone)
    assert a.recv(len(unread)) == unread
    assert a.recv_or_eof(1) is None


def test_a_peer_that_resets_is_gone(tcp_pair) -> None:
    a, b = tcp_pair
    with socket.socket(fileno=os.dup(b.fileno())) as twin:
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    b.close()
    assert eventually(a.peer_gone)
    with pytest.raises(PeerClosed, match="reset"):
        a.recv(1)


@pytest.mark.parametrize("end", ["shutdown", "close"])
def test_a_stream_ended_on_this_side_has_no_peer(tcp_pair, end: str) -> None:
    a, _ = tcp_pair
    getattr(a, end)()
    assert a.peer_gone()


def test_looking_takes_nothing_and_does_not_wait(tcp_pair, background) -> None:
    a, b = tcp_pair
    reader = background(lambda: a.recv(3, timeout=None))
    for _ in range(100):
        assert not a.peer_gone()
    b.send(b"abc")
    assert reader.result() == b"abc"


def test_peek_shows_what_has_come_and_takes_nothing(tcp_pair: tuple[TcpStream, TcpStream]) -> None:
    client, server = tcp_pair
    assert server.peek(10) == b""
    client.send(b"abcdef")
    assert eventually(lambda: server.peek(100) == b"abcdef")
    assert server.peek(3) == b"abc"
    assert server.peek(0) == b""
    assert server.bytes_received == 0
    assert server.recv(6) == b"abcdef"
    assert server.peek(10) == b""
    with pytest.raises(ValueError, match="-1"):
        server.peek(-1)
    client.close()
    assert eventually(server.peer_gone)
    assert server.peek(10) == b""
    server.close()
    assert server.peek(10) == b""
