"""HELLO from the client's side: find out what the server speaks. Source: docs/protocol.md, section 6.

Servers of protocol 4 and newer take a HELLO of 24 bytes and close on an empty one; older ones do the reverse. So the
24-byte form goes first, and a connection that closes without an answer is made again with the empty form. A refusal of
either form comes at once; a server that holds the connection first is full, or busy with somebody else.

The 24 bytes offer RDMA where this machine can. If both ends have agreed on it, nobody confirms that it works
(section 8): a first small request finds out, within a few seconds, and otherwise the connection is made again on TCP.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from weightwire.config import checked_seconds
from weightwire.errors import (
    ConfigError,
    PeerClosed,
    ProtocolError,
    RdmaUnavailable,
    ServerBusy,
    TransferTimeout,
    TransportError,
    VersionError,
)
from weightwire.transport.base import ByteStream
from weightwire.transport.devices import check_environment
from weightwire.transport.rdma import REQUESTS, RdmaOffer
from weightwire.transport.tcp import TcpStream, connect_tcp
from weightwire.transport.upgrade import (
    ASKED_FOR_TCP,
    WITHOUT,
    Carrier,
    carried_by,
    check_transport,
    offer,
    on_tcp,
    refused,
)
from weightwire.wire.commands import Command
from weightwire.wire.dialect import DIALECTS, OURS, Dialect, described_version, dialect_for
from weightwire.wire.framing import RESPONSE_HEADER_BYTES, parse_u64, request_header
from weightwire.wire.hello import NO_CAPS, Greeting, decode_hello_answer, encode_hello_request

__all__ = ["Asked", "Opened", "check_arguments", "open_connection"]

_log = logging.getLogger(__name__)

_ANSWER_BYTES = {True: 28, False: 3}
"""Payload of the answer by whether HELLO carried capabilities."""

_TRIAL = 5.0
"""Seconds at most for the first request over RDMA."""

_HELD = 1.0
"""Seconds; a server that keeps us waiting for longer than this and then closes did not do so over the form of HELLO."""

_BUSY_HINT = (
    "a stock ggml server serves one client at a time, and one of weightwire's may be full: wait until another client "
    "leaves, or raise timeout; or what listens there is no ggml RPC server"
)


class Opened(NamedTuple):
    """A connection on which HELLO has been exchanged."""

    stream: ByteStream
    greeting: Greeting
    dialect: Dialect
    carrier: Carrier


class Asked(NamedTuple):
    """What the arguments of a connection come to: seconds, the version it is told to speak, whether RDMA must do."""

    timeout: float
    forced: Dialect | None
    required: bool


class _Unusable(Exception):
    """RDMA was agreed on in HELLO and does not work; the argument is why. The connection is closed."""


def check_arguments(timeout: object, protocol: str | None, transport: object) -> Asked:
    """What `open_connection` can say of its arguments before it knows a server: ConfigError for what cannot be used,
    in the variables of RDMA, too, unless ``transport`` is "tcp".
    """
    seconds = checked_seconds("timeout", timeout)
    required = check_transport(transport) == "rdma"
    forced = None if protocol is None else described_version(protocol).dialect
    if required and forced is not None and not forced.rdma:
        raise ConfigError(
            f"transport='rdma', and protocol {forced.text} has no RDMA",
            hint="4.0 and newer have it; leave out the protocol or the transport",
        )
    if transport != "tcp":
        check_environment(os.environ)
    return Asked(seconds, forced, required)


def open_connection(
    endpoint: str,
    timeout: float,
    protocol: str | None = None,
    transport: str = "auto",
    *,
    optimized: bool = True,
    connected: Callable[[ByteStream, float], object] | None = None,
) -> Opened:
    """Connect to ``endpoint`` ("host:port"), exchange HELLO and settle the dialect, within ``timeout`` seconds in all.

    ``protocol`` (such as ``"7.0.0"``) is the caller's word that the server speaks that version, whatever it announces.
    The stream's own ``timeout`` is set to ``timeout``: every later wait without progress ends after so many seconds.
    Unless ``optimized``, one SEND at a time is in flight where RDMA carries them.
    ``transport`` is ``"auto"`` (RDMA where both ends can, TCP otherwise), ``"tcp"`` or ``"rdma"``. Where RDMA was
    agreed on and its first request is not answered within 5 seconds (or ``timeout``), the connection is made once more
    on TCP, with another ``timeout`` seconds for that.
    ``connected`` is called with each TCP connection before anything is sent over it, and the seconds it may take; what
    it raises ends the attempt.

    Raises ConfigError for a bad argument, VersionError for a server that is too old or announces a major nobody
    described (nothing is sent after HELLO), ProtocolError for an answer that is no HELLO answer, ServerBusy when the
    server took the connection and said nothing until the time was over or, after a while, it closed; TransferTimeout,
    PeerClosed and TransportError for the rest; RdmaUnavailable if RDMA was required and cannot be had. In every case
    the socket is closed again.
    """
    timeout, forced, required = check_arguments(timeout, protocol, transport)
    barred = on_tcp(ASKED_FOR_TCP) if transport == "tcp" else None
    try:
        opened = _open(endpoint, timeout, forced, barred, required, optimized, connected)
    except _Unusable as failure:
        error = failure.args[0]
        reason = f"RDMA was agreed on and does not work: {error.detail}"
        if required:
            raise RdmaUnavailable(
                f"{endpoint}: {reason}", reason=reason, endpoint=endpoint, hint=error.hint or WITHOUT
            ) from error
        _log.warning("%s: %s; connecting again on TCP", endpoint, reason)
        try:
            barred = replace(refused(error), reason=reason, serious=False)
            opened = _open(endpoint, timeout, forced, barred, required, optimized, connected)
        except ServerBusy as busy:
            busy.hint = f"{reason}; the server may still wait there, and with transport='tcp' is not asked to"
            raise
        return opened
    opened.carrier.log(opened.stream.endpoint)
    return opened


def _open(
    endpoint: str,
    timeout: float,
    forced: Dialect | None,
    barred: Carrier | None,
    required: bool,
    optimized: bool,
    connected: Callable[[ByteStream, float], object] | None,
) -> Opened:
    """One attempt: on TCP if ``barred`` says why."""
    deadline = time.monotonic() + timeout
    held = 0.0
    missing = barred.reason if barred is not None else ""
    for caps_form in (True, False):
        try:
            stream = connect_tcp(endpoint, _left(endpoint, deadline, timeout, "connect"))
        except TransferTimeout as error:
            if held > _HELD:
                raise _busy(endpoint, timeout) from error
            raise
        with ExitStack() as undo:
            undo.callback(stream.close)
            if connected is not None:
                connected(stream, _left(endpoint, deadline, timeout, "connect") / 2)
            wanted = caps_form and barred is None and (forced is None or forced.rdma)
            offered = offer(stream, optimized=optimized) if wanted else None
            if isinstance(offered, RdmaOffer):
                undo.callback(offered.close)
            elif offered is not None and required:
                raise offered
            elif caps_form and not missing:
                missing = _why_none(offered, forced)
            asked = time.monotonic()
            caps = offered.caps if isinstance(offered, RdmaOffer) else NO_CAPS
            answer = _hello(stream, caps if caps_form else None, deadline, timeout)
            if answer is None:
                held = max(held, time.monotonic() - asked)
                _log.debug("%s closed on the %s form of HELLO", endpoint, "24-byte" if caps_form else "empty")
                continue
            greeting = decode_hello_answer(answer)
            dialect = forced or _dialect(stream.endpoint, greeting)
            if forced is not None and greeting.major != forced.version[0]:
                _log.warning(
                    "%s announces protocol %s; speaking %s to it, as asked", stream.endpoint, greeting.text, forced.text
                )
            stream.timeout = timeout
            settled, carrier = _settle(stream, greeting, dialect, offered, barred)
            if settled is not stream:
                undo.callback(settled.close)
                _try_out(settled, dialect, min(timeout, _TRIAL))
            elif required:
                raise RdmaUnavailable(
                    f"{stream.endpoint}: {carrier.reason}",
                    reason=carrier.reason,
                    endpoint=stream.endpoint,
                    hint=WITHOUT,
                )
            elif isinstance(offered, RdmaOffer):
                offered.close()
            undo.pop_all()
            return Opened(settled, greeting, dialect, carrier)
    if held > _HELD:
        raise ServerBusy(
            f"{endpoint} took the connection, did not answer HELLO for {held:.1f} s, and closed",
            phase="hello",
            elapsed=held,
            hint=f"{_BUSY_HINT}; or it requires RDMA, which was not offered: {missing}" if missing else _BUSY_HINT,
        )
    needs = f"it requires RDMA, which was not offered ({missing}); or " if missing else ""
    raise VersionError(
        f"{endpoint} closed the connection on both forms of HELLO: {needs}"
        "its protocol is older than 1.0, or it refuses this client",
        ours=OURS,
        theirs="older than 1.0",
        hint="check that a ggml RPC server of April 2025 or newer listens there, and read its log",
    )


def _why_none(offered: RdmaOffer | RdmaUnavailable | None, forced: Dialect | None) -> str:
    """Why HELLO offers no RDMA; empty text if it does."""
    if isinstance(offered, RdmaUnavailable):
        return offered.reason
    return f"protocol {forced.text} has no RDMA" if forced is not None and offered is None else ""


def _settle(
    tcp: TcpStream,
    greeting: Greeting,
    dialect: Dialect,
    offered: RdmaOffer | RdmaUnavailable | None,
    barred: Carrier | None,
) -> tuple[ByteStream, Carrier]:
    """What carries the rest of the connection: the RDMA stream, if the server agreed, or ``tcp``.

    Raises _Unusable if the server agreed and this side cannot: it will listen there only.
    """
    if barred is not None:
        return tcp, barred
    if not dialect.rdma:
        return tcp, on_tcp(f"protocol {dialect.text} has no RDMA")
    if isinstance(offered, RdmaUnavailable):
        return tcp, refused(offered)
    if offered is None or not any(greeting.caps):
        return tcp, on_tcp("the server did not take up the offer of RDMA: it does without, or could not and logs why")
    try:
        stream = offered.activate(tcp, greeting.caps, REQUESTS)
    except (ProtocolError, TransportError) as error:
        raise _Unusable(error) from error
    return stream, carried_by(stream)


def _try_out(stream: ByteStream, dialect: Dialect, seconds: float) -> None:
    """One small request over RDMA, answered within ``seconds``; _Unusable otherwise."""
    deadline = time.monotonic() + seconds
    before, stream.timeout = stream.timeout, seconds
    got = bytearray()
    want = RESPONSE_HEADER_BYTES + (dialect.answer_bytes(Command.DEVICE_COUNT) or 0)
    try:
        stream.send(request_header(Command.DEVICE_COUNT, 0))
        if not _read(stream, got, want, deadline, seconds):
            raise PeerClosed(f"{stream.endpoint} closed the connection", endpoint=stream.endpoint)
    except TransferTimeout as error:
        late = TransferTimeout(
            f"the first request was not answered within {seconds:g} s", phase="rdma", elapsed=seconds
        )
        raise _Unusable(late) from error
    except TransportError as error:
        raise _Unusable(error) from error
    if parse_u64(bytes(got[:RESPONSE_HEADER_BYTES])) != want - RESPONSE_HEADER_BYTES:
        raise ProtocolError(f"{stream.endpoint} answered DEVICE_COUNT over RDMA with something else")
    stream.timeout = before


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


def _hello(stream: ByteStream, caps: bytes | None, deadline: float, timeout: float) -> bytes | None:
    """Send HELLO with ``caps``, or in the empty form, and return the answer's payload; ``None`` if the server closed
    without a byte.
    """
    request = encode_hello_request(caps)
    got = bytearray()
    # Outside: a server that was asked nothing yet is not the one that is late.
    stream.timeout = _left(stream.endpoint, deadline, timeout, "hello")
    try:
        stream.send(request_header(Command.HELLO, len(request)) + request)
        if not _read(stream, got, RESPONSE_HEADER_BYTES, deadline, timeout):
            if got:
                raise _cut_short(stream.endpoint, len(got))
            return None
        size = parse_u64(bytes(got))
        wanted = _ANSWER_BYTES[caps is not None]
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
