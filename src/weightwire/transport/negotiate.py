"""HELLO from the client's side: find out what the server speaks. Source: docs/protocol.md, section 6.

Servers of protocol 4 and newer take a HELLO of 24 bytes and close on an empty one; older ones do the reverse. So the
24-byte form goes first, and a connection that closes without an answer is made again with the empty form. A refusal of
either form comes at once; a server that holds the connection first is full, or busy with somebody else.
"""

from __future__ import annotations

import logging
import time

from weightwire.config import checked_seconds
from weightwire.errors import (
    PeerClosed,
    ProtocolError,
    ServerBusy,
    TransferTimeout,
    VersionError,
)
from weightwire.transport.base import ByteStream
from weightwire.transport.tcp import connect_tcp
from weightwire.wire.commands import Command
from weightwire.wire.dialect import DIALECTS, OURS, Dialect, described_version, dialect_for
from weightwire.wire.framing import RESPONSE_HEADER_BYTES, parse_u64, request_header
from weightwire.wire.hello import NO_CAPS, Greeting, decode_hello_answer, encode_hello_request

__all__ = ["open_connection"]

_log = logging.getLogger(__name__)

_ANSWER_BYTES = {True: 28, False: 3}
"""Payload of the answer by whether HELLO carried capabilities."""


_HELD = 1.0
"""Seconds; a server that keeps us waiting for longer than this and then closes did not do so over the form of HELLO."""

_BUSY_HINT = (
    "a stock ggml server serves one client at a time, and one of weightwire's may be full: wait until another client "
    "leaves, or raise timeout; or what listens there is no ggml RPC server"
)


def open_connection(endpoint: str, timeout: float, protocol: str | None = None) -> tuple[ByteStream, Greeting, Dialect]:
    """Connect to ``endpoint`` ("host:port"), exchange HELLO and settle the dialect, within ``timeout`` seconds in all.

    ``protocol`` (such as ``"7.0.0"``) is the caller's word that the server speaks that version, whatever it announces.
    The stream's own ``timeout`` is set to ``timeout``: every later wait without progress ends after so many seconds.

    Raises ConfigError for a bad argument, VersionError for a server that is too old or announces a major nobody
    described (nothing is sent after HELLO), ProtocolError for an answer that is no HELLO answer, ServerBusy when the
    server took the connection and said nothing until the time was over or, after a while, it closed; TransferTimeout,
    PeerClosed and TransportError for the rest. In every case the socket is closed again.
    """
    timeout = checked_seconds("timeout", timeout)
    forced = None if protocol is None else described_version(protocol).dialect
    deadline = time.monotonic() + timeout
    held = 0.0
    for caps_form in (True, False):
        try:
            stream = connect_tcp(endpoint, _left(endpoint, deadline, timeout, "connect"))
        except TransferTimeout as error:
            if held > _HELD:
                raise _busy(endpoint, timeout) from error
            raise
        try:
            asked = time.monotonic()
            answer = _hello(stream, caps_form, deadline, timeout)
            if answer is None:
                held = max(held, time.monotonic() - asked)
                _log.debug("%s closed on the %s form of HELLO", endpoint, "24-byte" if caps_form else "empty")
                stream.close()
                continue
            greeting = decode_hello_answer(answer)
            dialect = forced or _dialect(stream.endpoint, greeting)
            if forced is not None and greeting.major != forced.version[0]:
                _log.warning(
                    "%s announces protocol %s; speaking %s to it, as asked", stream.endpoint, greeting.text, forced.text
                )
            stream.timeout = timeout
            return stream, greeting, dialect
        except BaseException:
            stream.close()
            raise
    if held > _HELD:
        raise ServerBusy(
            f"{endpoint} took the connection, did not answer HELLO for {held:.1f} s, and closed",
            phase="hello",
            elapsed=held,
            hint=_BUSY_HINT,
        )
    raise VersionError(
        f"{endpoint} closed the connection on both forms of HELLO: "
        "its protocol is older than 1.0, or it refuses this client",
        ours=OURS,
        theirs="older than 1.0",
        hint="check that a ggml RPC server of April 2025 or newer listens there, and read its log",
    )


def _busy(endpoint: str, timeout: float) -> ServerBusy:
    return ServerBusy(
        f"{endpoint} took the connection and did not answer HELLO within {timeout:g} s",
        phase="hello",
        elapsed=timeout,
        hint=_BUSY_HINT,
    )


def _left(endpoint: str, deadline: float, timeout: float, phase: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TransferTimeout(f"{endpoint}: no connection within {timeout:g} s", phase=phase, elapsed=timeout)
    return left


def _hello(stream: ByteStream, caps_form: bool, deadline: float, timeout: float) -> bytes | None:
    """Send HELLO and return the answer's payload; ``None`` if the server closed without a byte."""
    request = encode_hello_request(NO_CAPS if caps_form else None)
    got = bytearray()
    try:
        stream.timeout = _left(stream.endpoint, deadline, timeout, "hello")
        stream.send(request_header(Command.HELLO, len(request)) + request)
        if not _read(stream, got, RESPONSE_HEADER_BYTES, deadline, timeout):
            if got:
                raise _cut_short(stream.endpoint, len(got))
            return None
        size = parse_u64(bytes(got))
        wanted = _ANSWER_BYTES[caps_form]
        if size != wanted:
            raise ProtocolError(
                f"{stream.endpoint} answered HELLO with {size} bytes where {wanted} were expected",
                hint="what listens there is probably not a ggml RPC server",
            )
        if not _read(stream, got, RESPONSE_HEADER_BYTES + size, deadline, timeout):
            raise _cut_short(stream.endpoint, len(got))
    except PeerClosed as error:
        # A server that closes with part of our HELLO unread resets the connection instead: the same refusal.
        if got:
            raise _cut_short(stream.endpoint, len(got)) from error
        return None
    except TransferTimeout as error:
        if got or error.phase == "send":
            raise TransferTimeout(
                f"{stream.endpoint}: HELLO was not answered whole within {timeout:g} s",
                phase="hello",
                elapsed=timeout,
                bytes_done=len(got),
                hint="the server stalled; what listens there may not be a ggml RPC server",
            ) from error
        raise _busy(stream.endpoint, timeout) from error
    return bytes(got[RESPONSE_HEADER_BYTES:])


def _cut_short(endpoint: str, bytes_done: int) -> PeerClosed:
    return PeerClosed(
        f"{endpoint} closed the connection inside its HELLO answer",
        endpoint=endpoint,
        operation="recv",
        position="inside",
        bytes_done=bytes_done,
    )


def _read(stream: ByteStream, got: bytearray, until: int, deadline: float, timeout: float) -> bool:
    """Fill ``got`` up to ``until`` bytes; ``False`` if the server closed first.

    One byte at a time (36 at most), so that a server which drips them cannot stretch the deadline.
    """
    while len(got) < until:
        byte = stream.recv_or_eof(1, timeout=_left(stream.endpoint, deadline, timeout, "hello"))
        if byte is None:
            return False
        got += byte
    return True


def _dialect(endpoint: str, greeting: Greeting) -> Dialect:
    try:
        dialect = dialect_for(greeting.version)
    except VersionError:
        raise VersionError(
            f"{endpoint} announces protocol {greeting.text}, which nobody described; nothing was sent after HELLO",
            ours=OURS,
            theirs=greeting.text,
            hint="if you know which version it really speaks, name it: protocol='7.0.0' (or --protocol 7.0.0)",
        ) from None
    newest = max(minor for major, minor in DIALECTS if major == greeting.major)
    if greeting.minor > newest:
        _log.warning(
            "%s announces protocol %s, newer than weightwire knows; speaking %s", endpoint, greeting.text, dialect.text
        )
    return dialect
