"""Two ends of an RDMA connection, without HELLO."""

from __future__ import annotations

from collections.abc import Mapping

from weightwire.transport.rdma import REQUESTS, RESPONSES, RdmaStream, offer_rdma
from weightwire.transport.tcp import TcpStream


def connect_rdma(
    client: TcpStream, server: TcpStream, environ: Mapping[str, str] | None = None
) -> tuple[RdmaStream, RdmaStream]:
    """Lift both ends of a TCP connection to RDMA."""
    offers = [offer_rdma(end, environ or {}) for end in (client, server)]
    return offers[0].activate(client, offers[1].caps, REQUESTS), offers[1].activate(server, offers[0].caps, RESPONSES)


def pair_number(stream: RdmaStream) -> int:
    """The number of a stream's queue pair."""
    number = stream.details["pair"]
    assert isinstance(number, int)
    return number


def request(command: int, payload: bytes) -> bytes:
    """A request as it stands on the wire."""
    return bytes((command,)) + len(payload).to_bytes(8, "little") + payload


def response(payload: bytes) -> bytes:
    """A response as it stands on the wire."""
    return len(payload).to_bytes(8, "little") + payload
