"""RDMA: a queue pair offered to the peer in HELLO, and the stream over it once both ends have agreed.

Source: docs/protocol.md, section 8.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from weightwire._native import _link, _verbs
from weightwire.errors import RdmaUnavailable, RegistrationError, TransportError, VerbsError
from weightwire.transport.devices import Choice, check_environment, choose, device_addresses, mtu_bytes
from weightwire.transport.memory import HostRegion
from weightwire.transport.registration import CHUNK, RECEIVE_SLOTS, SEND_RUNGS, Rings, register_rings
from weightwire.wire.caps import RdmaCaps

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from weightwire.transport.tcp import TcpStream

__all__ = ["REQUESTS", "RESPONSES", "RING_BYTES", "RdmaOffer", "RdmaStream", "offer_rdma", "usable_address"]

_log = logging.getLogger(__name__)

REQUESTS: Final = "requests"
"""Framing of what a client sends: command, size and payload are separate reads of a ggml server."""
RESPONSES: Final = "responses"
"""Framing of what a server sends: size and payload are separate reads of a ggml client."""

RING_BYTES: Final = (max(SEND_RUNGS) + RECEIVE_SLOTS) * CHUNK
"""Most memory that one connection pins for its rings; the driver adds some for its queues."""

_SPARE_RECEIVES: Final = 4
_INLINE: Final = 256


class RdmaStream(_link.Link):
    """A ``ByteStream`` over an RC queue pair; made by ``RdmaOffer.activate``.

    ``send`` comes back when the memory given to it may be used again; at the end of a message, when the peer has all of
    it. What lies in memory given to ``register`` is sent without a copy. Raises what every stream raises, and
    ``CompletionError`` where the queue pair breaks.
    """

    kind: Final = "rdma"

    details: Mapping[str, Any]
    """device, port, gid, gid_index, gid_type, mtu (bytes), pair (its number), send_depth, inline (bytes), registration
    (every rung), reason (why this device and GID)."""

    domain: _verbs.ProtectionDomain

    ring_bytes: int
    """What is pinned for both rings, while the stream is open."""

    def register(self, buffer: Buffer, *, writable: bool = False) -> _verbs.MemoryRegion:
        """Pins a caller's memory, so that what is sent out of it is not copied; ``close`` the result to let go of it.

        Raises ``VerbsError`` where it cannot be pinned (``.errno`` ENOMEM: the limit of locked memory): it is then sent
        through the ring, as all else is.
        """
        region = _verbs.MemoryRegion(self.domain, buffer, writable=writable)
        try:
            self.add_region(region)
        except BaseException:
            region.close()
            raise
        return region

    def __enter__(self) -> RdmaStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class RdmaOffer:
    """A queue pair in INIT with its receives posted, to be activated or closed; ``caps`` are its 24 bytes for HELLO."""

    def __init__(
        self, stream: RdmaStream, pair: _verbs.QueuePair, choice: Choice, rings: Rings[_verbs.MemoryRegion]
    ) -> None:
        self.choice = choice
        self.attempts = rings.attempts
        self.caps = RdmaCaps(pair.number, choice.gid.raw).encode()
        self._pair = pair
        self._stream = stream

    def activate(self, tcp: TcpStream, peer: bytes, framing: str) -> RdmaStream:
        """Connects with the queue pair in the peer's 24 bytes of capabilities; ``tcp``, which the stream takes over,
        then carries no more bytes. ``framing`` is ``REQUESTS`` at the client's end, ``RESPONSES`` at the server's.

        Raises ``RdmaUnavailable`` where the peer offers nothing, ``ProtocolError`` for capabilities of another layout,
        ``VerbsError`` where the device refuses; the offer is closed then and ``tcp`` is as it was.
        """
        try:
            caps = RdmaCaps.decode(peer)
            if caps is None:
                raise RdmaUnavailable("the peer does not offer RDMA", reason="the peer does not offer RDMA")
            choice = self.choice
            self._pair.to_receive(
                port=choice.port,
                gid_index=choice.gid.index,
                mtu=choice.mtu,
                number=caps.number,
                psn=caps.psn,
                gid=caps.gid,
            )
            self._pair.to_send(RdmaCaps(self._pair.number, choice.gid.raw).psn)
            self._stream.timeout = tcp.timeout
            self._stream.attach(tcp, framing)
        except BaseException:
            self.close()
            raise
        details = self._stream.details
        _log.info(
            "%s: RDMA on %s, GID %s (%s), mtu %d, %d SENDs in flight: %s",
            tcp.endpoint, details["device"], details["gid"], details["gid_type"], details["mtu"], details["send_depth"],
            details["reason"],
        )  # fmt: skip
        return self._stream

    def close(self) -> None:
        """Gives everything back. Fine twice; not after ``activate``, whose stream has taken over."""
        self._stream.close()


def offer_rdma(tcp: TcpStream, environ: Mapping[str, str] | None = None, depth: int = max(SEND_RUNGS)) -> RdmaOffer:
    """A queue pair on the device that leads to the peer of ``tcp``, ready to be offered in HELLO.

    At most ``depth`` SENDs will be in flight.

    Raises ``RdmaUnavailable`` with the reason why there is none (its cause is the ``RegistrationError`` or
    ``VerbsError`` behind it, if any); nothing stays open then.
    """
    return _make(tcp.endpoint, choose(_local_address(tcp), os.environ if environ is None else environ), depth)


def usable_address(addresses: Iterable[str], environ: Mapping[str, str] | None = None) -> str:
    """The first of this machine's ``addresses`` at which an RDMA connection can begin: everything for one is made
    there, pinned memory too, and given back. ``0.0.0.0`` and ``::`` stand for every address that a device leads to.

    Raises ``RdmaUnavailable`` with the reason for each, ``ConfigError`` for a variable that cannot be used.
    """
    environ = os.environ if environ is None else environ
    check_environment(environ)
    refusals: dict[str, RdmaUnavailable] = {}
    for address in _spelt_out(addresses, environ):
        try:
            _make(address, choose(address, environ)).close()
        except RdmaUnavailable as error:
            refusals.setdefault(error.reason, error)
        else:
            return address
    first = next(iter(refusals.values()))
    reason = "; ".join(refusals)
    raise RdmaUnavailable(
        f"RDMA cannot be used: {reason}", reason=reason, operation=first.operation, errno=first.errno, hint=first.hint
    ) from first.__cause__


def _spelt_out(addresses: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    for address in addresses:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if parsed.is_unspecified:
            # "::" takes IPv4 as well.
            led = [each for each in device_addresses(environ) if parsed.version == 6 or ":" not in each]
            found += led or [address]
        else:
            found.append(address)
    return found


def _make(endpoint: str, choice: Choice, depth: int = max(SEND_RUNGS)) -> RdmaOffer:
    made: list[Any] = []
    try:
        return _build(endpoint, choice, made, depth)
    except BaseException as error:
        for handle in reversed(made):
            handle.close()
        if isinstance(error, RegistrationError):
            raise RdmaUnavailable(
                f"RDMA cannot be used: {error.detail}", reason=error.detail, errno=error.errno, hint=error.hint
            ) from error
        if isinstance(error, VerbsError):
            reason = f"{choice.device}: {error.detail}"
            raise RdmaUnavailable(
                f"RDMA cannot be used: {reason}", reason=reason, operation=error.operation, errno=error.errno
            ) from error
        raise


def _build(endpoint: str, choice: Choice, made: list[Any], depth: int) -> RdmaOffer:
    devices = {device.name: device for device in _verbs.devices()}
    if choice.device not in devices:
        raise RdmaUnavailable(f"the RDMA device {choice.device} has gone", reason=f"{choice.device} has gone")
    context = _verbs.Context(devices[choice.device])
    made.append(context)
    domain = _verbs.ProtectionDomain(context)
    made.append(domain)
    # One queue for each direction, so that a thread which sends and one which receives never wait for each other.
    sends = _verbs.CompletionQueue(context, max(SEND_RUNGS) + 1)
    made.append(sends)
    receives = _verbs.CompletionQueue(context, RECEIVE_SLOTS + _SPARE_RECEIVES)
    made.append(receives)
    # The queues before the rings: the driver pins memory for them too, and cannot do with less.
    pair = _verbs.QueuePair(
        domain, sends, receives, sends=max(SEND_RUNGS), receives=RECEIVE_SLOTS + _SPARE_RECEIVES, inline=_INLINE
    )
    made.append(pair)
    rings = register_rings(lambda nbytes: _verbs.MemoryRegion(domain, HostRegion(nbytes)), depth=depth)
    made += [rings.receive, rings.send]
    pair.to_init(choice.port)
    # The peer's last SEND may land until the queue pair is gone: so that one goes first.
    owned = (pair, rings.send, rings.receive, sends, receives, domain, context)
    stream = RdmaStream(pair, rings.send, rings.receive, endpoint, owned)
    made.append(stream)
    stream.domain = domain
    stream.ring_bytes = rings.receive.nbytes + rings.send.nbytes
    stream.details = {
        "device": choice.device,
        "port": choice.port,
        "gid": choice.gid.text,
        "gid_index": choice.gid.index,
        "gid_type": choice.gid.type,
        "mtu": mtu_bytes(choice.mtu),
        "pair": pair.number,
        "send_depth": rings.send_slots,
        "inline": pair.inline,
        "registration": [attempt.as_dict() for attempt in rings.attempts],
        "reason": choice.why,
    }
    if rings.degraded:
        _log.warning(
            "%s: fewer SENDs in flight than could be, for want of locked memory: %s",
            endpoint, "; ".join(map(str, rings.attempts)),
        )  # fmt: skip
    return RdmaOffer(stream, pair, choice, rings)


def _local_address(tcp: TcpStream) -> str:
    try:
        with socket.socket(fileno=os.dup(tcp.fileno())) as sock:
            name = sock.getsockname()
    except OSError as error:
        raise TransportError(
            f"the connection with {tcp.endpoint} has no local address: {error.strerror}",
            endpoint=tcp.endpoint, operation="getsockname", errno=error.errno,
        ) from error  # fmt: skip
    if not isinstance(name, tuple):
        raise RdmaUnavailable("RDMA cannot be used: the connection is no IP connection", reason="no IP connection")
    return str(name[0])
