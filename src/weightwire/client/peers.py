"""Which servers the endpoints of a push lead to: one that is given under two names is found out."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Sequence

from weightwire.client.crew import ONCE
from weightwire.errors import ConfigError
from weightwire.transport.address import format_endpoint, format_sockaddr
from weightwire.transport.base import ByteStream

__all__ = ["Peers"]

_LONGEST = 1.0
"""Seconds that one connection waits for the others to be made: another one to the same server takes no longer than it
did, unless its name was looked up for long. Then it is found out when it is there.
"""


class Peers:
    """The peers of connections to ``endpoints``, compared as soon as they are connected, before anything is sent.

    The address and port that each socket is connected to are compared, so one server at two addresses of its own is not
    found out. Thread-safe.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.error: ConfigError | None = None
        """Set once two of them have turned out to be one server."""
        self._endpoints = endpoints
        self._condition = threading.Condition()
        self._outstanding = set(range(len(endpoints)))
        self._found: dict[str, int] = {}

    def connected(self, number: int, stream: ByteStream, longest: float) -> None:
        """Endpoint ``number`` is connected to: wait for the others, the first time, for at most ``longest`` seconds.
        ConfigError if one of them is the same server.
        """
        peer = _peer(stream)
        with self._condition:
            first = self._found.setdefault(peer, number) if peer else number
            if first != number and self.error is None:
                one, other = (self._endpoints[each] for each in sorted((first, number)))
                self.error = ConfigError(f"targets: {one} and {other} are one server, {peer}", hint=ONCE)
            if self._settle(number):
                self._condition.wait_for(lambda: self.error or not self._outstanding, min(longest, _LONGEST))
            if self.error is not None:
                raise self.error

    def gone(self, number: int) -> None:
        """Nobody need wait for endpoint ``number`` any more."""
        with self._condition:
            self._settle(number)

    def _settle(self, number: int) -> bool:
        new = number in self._outstanding
        self._outstanding.discard(number)
        self._condition.notify_all()
        return new


def _peer(stream: ByteStream) -> str:
    """The address and port that ``stream`` is connected to, in one form for each; empty text where there is none."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(stream.fileno())) as twin:
        name = twin.getpeername()
        if twin.family == socket.AF_INET6:
            mapped = ipaddress.IPv6Address(name[0].partition("%")[0]).ipv4_mapped
            if mapped is not None:
                return format_endpoint(str(mapped), name[1])
        return format_sockaddr(name)
    return ""
