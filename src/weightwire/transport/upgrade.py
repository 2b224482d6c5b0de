"""Whether a connection moves from TCP to RDMA, and why it did or did not. Source: docs/protocol.md, section 8."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from weightwire.config import TRANSPORTS, shown
from weightwire.errors import (
    AllocationError,
    ConfigError,
    ProtocolError,
    RdmaUnavailable,
    RegistrationError,
    VerbsError,
)
from weightwire.transport.devices import asks_for_a_device
from weightwire.transport.rdma import RESPONSES, RdmaOffer, RdmaStream, offer_rdma
from weightwire.transport.registration import SEND_RUNGS
from weightwire.wire.caps import RdmaCaps

if TYPE_CHECKING:
    from weightwire.errors import WeightwireError
    from weightwire.transport.tcp import TcpStream

__all__ = [
    "ASKED_FOR_TCP",
    "WITHOUT",
    "Carrier",
    "accept",
    "carried_by",
    "check_transport",
    "offer",
    "on_tcp",
    "refused",
]

_log = logging.getLogger(__name__)

ASKED_FOR_TCP: Final = "TCP was asked for"
WITHOUT: Final = "transport='auto' (or --transport auto) does without RDMA"


@dataclass(frozen=True, slots=True)
class Carrier:
    """What carries a connection's bytes, and why.

    ``kind`` is ``"tcp"`` or ``"rdma"``, ``reason`` why in words, ``registration`` every rung of the ladder of ring
    sizes that was tried (see `Attempt`; empty if none was). ``device``, ``gid`` and ``send_depth`` (SENDs in flight)
    are None on TCP, ``more`` what else there is to say of an RDMA connection. ``serious``: that it is TCP is no choice
    of anybody's, but a failure.
    """

    kind: str
    reason: str
    device: str | None = None
    gid: str | None = None
    send_depth: int | None = None
    registration: tuple[Mapping[str, object], ...] = ()
    more: Mapping[str, object] | None = None
    serious: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For programs: kind, device, gid, send_depth, reason, registration, and on RDMA port, gid_index, gid_type,
        mtu (bytes), pair (its number) and inline (bytes).
        """
        return {
            "kind": self.kind,
            "device": self.device,
            "gid": self.gid,
            "send_depth": self.send_depth,
            "reason": self.reason,
            "registration": [dict(attempt) for attempt in self.registration],
            **(self.more or {}),
        }

    def log(self, endpoint: str) -> None:
        """One line that says it, for a connection on TCP; a stream on RDMA has said it itself."""
        if self.kind == "tcp":
            _log.log(logging.WARNING if self.serious else logging.INFO, "%s: on TCP: %s", endpoint, self.reason)


def check_transport(value: object) -> str:
    """``value`` if it is one of "auto", "tcp" and "rdma"; ConfigError otherwise."""
    if isinstance(value, str) and value in TRANSPORTS:
        return value
    raise ConfigError(f"transport={shown(value)} is not known", hint=f"one of {', '.join(TRANSPORTS)}")


def offer(tcp: TcpStream, *, optimized: bool = True) -> RdmaOffer | RdmaUnavailable:
    """What can be offered to the peer of ``tcp``, or why nothing can. Unless ``optimized`` one SEND is in flight."""
    try:
        return offer_rdma(tcp, depth=max(SEND_RUNGS) if optimized else 1)
    except RdmaUnavailable as error:
        unavailable = error
    except (VerbsError, AllocationError) as error:
        unavailable = RdmaUnavailable(f"RDMA cannot be used: {error.detail}", reason=error.detail, hint=error.hint)
        unavailable.__cause__ = error
    unavailable.endpoint = tcp.endpoint
    unavailable.hint = unavailable.hint or WITHOUT
    return unavailable


def on_tcp(reason: str) -> Carrier:
    """A connection that stays on TCP for a reason nobody need worry about."""
    return Carrier("tcp", reason)


def refused(error: WeightwireError) -> Carrier:
    """A connection that stays on TCP because of ``error``."""
    reason = error.reason if isinstance(error, RdmaUnavailable) else error.detail
    cause = error.__cause__ if isinstance(error, RdmaUnavailable) else error
    if error.hint and isinstance(cause, RegistrationError):
        reason = f"{reason}; {error.hint}"
    attempts: tuple[Any, ...] = cause.attempts if isinstance(cause, RegistrationError) else ()
    serious = cause is not None or asks_for_a_device(os.environ)
    return Carrier("tcp", reason, registration=tuple(attempt.as_dict() for attempt in attempts), serious=serious)


def carried_by(stream: RdmaStream) -> Carrier:
    """A connection on RDMA."""
    more = dict(stream.details)
    return Carrier(
        "rdma",
        str(more.pop("reason")),
        device=more.pop("device"),
        gid=more.pop("gid"),
        send_depth=more.pop("send_depth"),
        registration=tuple(more.pop("registration")),
        more=more,
    )


def accept(tcp: TcpStream, theirs: bytes, *, optimized: bool = True) -> tuple[RdmaStream, bytes] | Carrier:
    """The server's part, before it answers HELLO: the stream to serve a client over that offers ``theirs``, and our own
    24 bytes for the answer, which still goes over ``tcp``; or why the connection stays there.
    """
    try:
        if RdmaCaps.decode(theirs) is None:
            return on_tcp("the client does not offer RDMA")
        offered = offer(tcp, optimized=optimized)
        if isinstance(offered, RdmaUnavailable):
            return refused(offered)
        return offered.activate(tcp, theirs, RESPONSES), offered.caps
    except (ProtocolError, VerbsError) as error:
        return refused(error)
