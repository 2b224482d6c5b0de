"""Both ends of a TCP connection, in this process."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios

from weightwire.transport.tcp import TcpStream


def sockets(address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """The connecting socket, and the one that was accepted."""
    with socket.create_server((address, 0)) as listener:
        connected = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    return connected, accepted


def tcp_ends(address: str = "127.0.0.1", timeout: float = 30.0) -> tuple[TcpStream, TcpStream]:
    """The client's end and the server's."""
    connected, accepted = sockets(address)
    return TcpStream(connected, timeout), TcpStream(accepted, timeout)


def unread(stream: TcpStream) -> int:
    """How many bytes have come and have not been received."""
    return _queued(stream, termios.FIONREAD)


def underway(stream: TcpStream) -> int:
    """How many bytes have been sent and have not come."""
    return _queued(stream, termios.TIOCOUTQ)


def _queued(stream: TcpStream, question: int) -> int:
    return int.from_bytes(fcntl.ioctl(stream.fileno(), question, bytes(4)), sys.byteorder)
