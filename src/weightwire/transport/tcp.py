"""TCP: connecting, listening, and the stream itself."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from typing import Final

from weightwire._native import _stream
from weightwire.config import parse_host
from weightwire.errors import ConfigError, TransferTimeout, TransportError
from weightwire.threads import Thread, start
from weightwire.transport.address import format_endpoint, format_sockaddr, parse_endpoint

__all__ = ["Address", "TcpStream", "connect_tcp", "listen_tcp", "look_up"]

BACKLOG: Final = 128
PORT_ATTEMPTS: Final = 16
# A peer that has vanished without a word (power, cable) is noticed after about 60 + 4 * 15 seconds of silence.
KEEPALIVE_IDLE: Final = 60
KEEPALIVE_INTERVAL: Final = 15
KEEPALIVE_PROBES: Final = 4
# Longest wait between two looks at pending signals, in seconds.
SLICE: Final = 0.2
# How long the name of a host to listen on may take, in seconds: as long as a client waits unless told otherwise.
LOOKUP_TIMEOUT: Final = 30.0

_NO_ANSWER: Final = "is the name server reachable? an address needs none"

Address = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]


class TcpStream(_stream.Stream):
    """A ``ByteStream`` over a connected TCP (or any other stream) socket, which it takes over.

    Sets TCP_NODELAY and keepalive. ``timeout`` is the longest time without progress in seconds, ``None`` for ever.
    Raises ``TransportError`` for a socket that is not connected; the socket is then still the caller's.
    """

    kind: Final = "tcp"

    def __init__(self, sock: socket.socket, timeout: float | None = None, endpoint: str | None = None) -> None:
        try:
            peer = sock.getpeername()
            _configure(sock)
        except OSError as error:
            raise TransportError(
                f"the socket is not connected: {error.strerror}", operation="getpeername", errno=error.errno
            ) from error
        if endpoint is None:
            endpoint = format_sockaddr(peer) or "local socket"
        super().__init__(sock.fileno(), endpoint, timeout)
        sock.detach()

    def __enter__(self) -> TcpStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def connect_tcp(endpoint: str, timeout: float | None) -> TcpStream:
    """A stream to ``endpoint`` (text as ``parse_endpoint`` takes it); its ``timeout`` is the one given here.

    Every address the name has is tried, one after the other, each with an equal share of the time left, all within
    ``timeout`` seconds. Raises ``ConfigError`` for an endpoint that cannot be read, ``TransferTimeout`` (phase
    "connect") where the time ran out, ``TransportError`` otherwise, naming each address and why it failed.
    """
    host, port = parse_endpoint(endpoint)
    name = format_endpoint(host, port)
    started = time.monotonic()
    deadline = None if timeout is None else started + timeout
    failures: list[tuple[str, OSError]] = []
    try:
        addresses = _resolve(host, port, name, deadline)
    except _TooLong as error:
        elapsed = time.monotonic() - started
        raise TransferTimeout(
            f"looking up {host} took longer than {elapsed:.1f} s", phase="connect", elapsed=elapsed, hint=_NO_ANSWER
        ) from error
    for index, address in enumerate(addresses):
        share = deadline
        if deadline is not None:
            now = time.monotonic()
            share = now + max(0.0, deadline - now) / (len(addresses) - index)
        try:
            return TcpStream(_connect_one(address, share), timeout, name)
        except OSError as error:
            failures.append((format_sockaddr(address[4]), error))
    # An address that is given as one is named already.
    tried = "; ".join(
        (f"{shown}: " if shown != name else "") + (error.strerror or str(error)) for shown, error in failures
    )
    elapsed = time.monotonic() - started
    errors = [error.errno for _, error in failures]
    if all(code == errno.ETIMEDOUT for code in errors):
        raise TransferTimeout(
            f"could not connect to {name} within {elapsed:.1f} s: {tried}",
            phase="connect", elapsed=elapsed, hint="is the host up, and does a firewall drop the port?",
        )  # fmt: skip
    hint = "is the server running, and listening on this address?" if errno.ECONNREFUSED in errors else ""
    raise TransportError(
        f"could not connect to {name}: {tried}", endpoint=name, operation="connect", errno=errors[-1], hint=hint
    )


def look_up(host: str, port: int) -> list[Address]:
    """The addresses for `listen_tcp`, of a host as it takes one.

    Raises as that does: ``ConfigError`` for a port out of range or a host that is none (an empty one too),
    ``TransportError`` for a name that nobody knows, or that is not looked up within `LOOKUP_TIMEOUT` seconds. What a
    signal handler raises meanwhile is passed on.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} is not 0 to 65535")
    try:
        host = parse_host(host)
    except ValueError as error:
        raise ConfigError(f"host to listen on: {error}") from None
    name = format_endpoint(host, port)
    try:
        return _resolve(host, port, name, time.monotonic() + LOOKUP_TIMEOUT)
    except _TooLong as error:
        raise TransportError(
            f"cannot listen on {name}: looking it up took longer than {LOOKUP_TIMEOUT:.1f} s",
            endpoint=name, operation="getaddrinfo", errno=errno.ETIMEDOUT, hint=_NO_ANSWER,
        ) from error  # fmt: skip


def listen_tcp(host: str, port: int, addresses: list[Address] | None = None) -> list[socket.socket]:
    """Listening sockets on every address ``host`` has: a name, or an address, with or without brackets.

    ``port`` 0 takes a free one, the same for all of them. ``addresses`` are those of a `look_up` before. Raises
    ``ConfigError`` for a port out of range or a host that is none, ``TransportError`` where an address cannot be had;
    nothing stays open then.
    """
    if addresses is None:
        addresses = look_up(host, port)
    attempts = 1 if port else PORT_ATTEMPTS
    while True:
        attempts -= 1
        try:
            return _listen_all(addresses, port)
        except TransportError as error:
            # A port that was free on the first address need not be so on the next.
            if attempts == 0 or error.errno != errno.EADDRINUSE:
                raise


def _configure(sock: socket.socket) -> None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def _addresses(host: str, port: int, flags: int = 0) -> list[Address]:
    # Given as bytes, a name needs no codec, whose tables are not there to be loaded where memory is short.
    asked: str | bytes = host.encode("ascii") if host.isascii() else host
    found: list[Address] = list(socket.getaddrinfo(asked, port, type=socket.SOCK_STREAM, flags=flags))
    return list(dict.fromkeys(found))


class _TooLong(Exception):
    """A name was not looked up in time."""


def _resolve(host: str, port: int, name: str, deadline: float | None) -> list[Address]:
    """The addresses of a host: ``getaddrinfo`` knows no deadline, so names are looked up on a thread one can leave.

    Raises _TooLong at the ``deadline``, TransportError for a name that nobody knows.
    """
    try:
        return _addresses(host, port, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        pass  # a name, then
    answer: list[list[Address] | Exception] = []

    def look_up() -> None:
        try:
            answer.append(_addresses(host, port))
        except Exception as error:
            answer.append(error)

    thread = Thread(target=look_up, name=f"weightwire-resolve-{host}", daemon=True)
    start(thread, name)
    while not thread.ended():
        left = SLICE if deadline is None else min(SLICE, deadline - time.monotonic())
        if left <= 0:
            raise _TooLong
        thread.join(left)
    found = answer.pop()  # an error is kept by nobody: it holds on to these frames
    if isinstance(found, list):
        return found
    if isinstance(found, (OSError, UnicodeError)):
        raise _no_address(name, found) from found
    raise found  # for want of memory, say


def _no_address(name: str, error: OSError | UnicodeError) -> TransportError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return TransportError(
        f"no address for {name}: {reason}",
        endpoint=name,
        operation="getaddrinfo",
        errno=error.errno if isinstance(error, OSError) else None,
        hint="is the host name spelt right, and known to this machine?",
    )


def _connect_one(address: Address, deadline: float | None) -> socket.socket:
    family, kind, protocol, _, where = address
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        code = sock.connect_ex(where)
        if code == errno.EINPROGRESS:
            watch = select.poll()
            watch.register(sock, select.POLLOUT)
            while True:
                left = SLICE if deadline is None else min(SLICE, deadline - time.monotonic())
                if left <= 0:
                    raise OSError(errno.ETIMEDOUT, "no answer in time")
                if watch.poll(left * 1000):
                    break
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


def _listen_all(addresses: list[Address], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    absent: list[tuple[str, OSError]] = []
    try:
        for family, kind, protocol, _, address in addresses:
            where = (address[0], port or (listeners[0].getsockname()[1] if listeners else 0), *address[2:])
            shown = format_sockaddr(where)
            try:
                # "::" alone takes IPv4 too; beside an IPv4 socket it would be in its way.
                listeners.append(_listen_one(family, kind, protocol, where, v6only=len(addresses) > 1))
            except OSError as error:
                # "All addresses" on a machine without IPv6 is still all of them.
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise _cannot_listen(shown, error) from error
                absent.append((shown, error))
        if not listeners:
            raise _cannot_listen(*absent[-1])
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listen_one(
    family: int, kind: int, protocol: int, where: tuple[str | int | bytes, ...], *, v6only: bool
) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(v6only))
        sock.bind(where)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _cannot_listen(endpoint: str, error: OSError) -> TransportError:
    hints = {
        errno.EADDRINUSE: "another program listens there; choose another port, or 0 for a free one",
        errno.EACCES: "ports below 1024 need a privilege",
        errno.EADDRNOTAVAIL: "this machine has no such address",
    }
    return TransportError(
        f"cannot listen on {endpoint}: {error.strerror}",
        endpoint=endpoint, operation="bind", errno=error.errno, hint=hints.get(error.errno or 0, ""),
    )  # fmt: skip
