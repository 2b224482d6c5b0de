"""Two ends of an RDMA connection without HELLO, and a client that has said it."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from weightwire import Server
from weightwire.transport.rdma import REQUESTS, RESPONSES, RdmaOffer, RdmaStream, offer_rdma
from weightwire.transport.tcp import TcpStream, connect_tcp
from weightwire.wire import Command


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


class Offering:
    """A client past HELLO, with a queue pair that has been offered; ``theirs`` is what the server answered."""

    def __init__(self, server: Server, caps: bytes | None = None) -> None:
        self.tcp: TcpStream = connect_tcp(server.endpoints[0], 20.0)
        self.offer: RdmaOffer = offer_rdma(self.tcp, {})
        self.tcp.send(request(Command.HELLO, self.offer.caps if caps is None else caps))
        answer = self.tcp.recv(36)
        assert answer[:12] == struct.pack("<QBBBB", 28, 7, 0, 0, 0)
        self.theirs = answer[12:]

    def rise(self) -> RdmaStream:
        return self.offer.activate(self.tcp, self.theirs, REQUESTS)

    def close(self) -> None:
        self.offer.close()
        self.tcp.close()
