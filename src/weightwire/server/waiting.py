"""Connections a full server has taken and not answered yet.

A client that is kept waiting for its HELLO answer knows that the server is busy, as with a stock server; one whose
connection is closed would have to take this for a server of another version.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from weightwire.transport.tcp import TcpStream

__all__ = ["MAX_WAITING", "WaitingRoom"]

MAX_WAITING: Final = 64
"""Connections that wait at the same time; each costs a descriptor and nothing else."""


class WaitingRoom:
    """First come, first served; nobody waits longer than ``seconds``. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._streams: deque[tuple[float, TcpStream]] = deque()

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: TcpStream) -> bool:
        """Let ``stream`` wait; False if there is no room."""
        if len(self._streams) >= MAX_WAITING:
            return False
        self._streams.append((time.monotonic() + self.seconds, stream))
        return True

    def next(self) -> TcpStream | None:
        """Whose turn it is; None if nobody waits."""
        return self._streams.popleft()[1] if self._streams else None

    def patience(self) -> float | None:
        """Seconds until somebody has waited too long; None if nobody waits."""
        return max(0.0, self._streams[0][0] - time.monotonic()) if self._streams else None

    def expired(self) -> list[TcpStream]:
        """Take out whoever has waited too long."""
        now = time.monotonic()
        gone = []
        while self._streams and self._streams[0][0] <= now:
            gone.append(self._streams.popleft()[1])
        return gone

    def everybody(self) -> list[TcpStream]:
        """Take all of them out."""
        gone = []
        while (stream := self.next()) is not None:
            gone.append(stream)
        return gone
