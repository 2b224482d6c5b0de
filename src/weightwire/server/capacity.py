"""How much memory a server may give away, and the numbers it gives out in place of addresses."""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_left, insort
from collections import deque
from typing import Final

__all__ = ["BASE_ALIGNMENT", "MAX_BUFFERS", "MAX_PINNED", "PAGE", "AddressSpace", "Capacity", "Tally"]

BASE_ALIGNMENT: Final = 2 << 20
_LOWEST: Final = 1 << 40
_HIGHEST: Final = 1 << 47

PAGE: Final = 4096
"""What a buffer is counted in, bytes: the least that memory comes in."""

MAX_BUFFERS: Final = 16_384
"""Buffers of all clients together: each is a mapping of its own, and Linux gives a process some 65,000
(``vm.max_map_count``), which its threads need too.
"""


MAX_PINNED: Final = 512 << 20
"""Bytes that RDMA connections of all clients together may pin: 64 connections at 8 MiB each. Beside `Capacity`."""


class Tally:
    """``total`` of something shared among all clients. Thread-safe.

    `give_back` only appends to a queue, because it is called from finalizers, which can run in any thread at any
    moment, also inside one that holds the lock.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._used = 0
        self._lock = threading.Lock()
        self._returned: deque[int] = deque()

    def take(self, amount: int) -> bool:
        """Reserve ``amount``; False, and nothing reserved, if less is free."""
        with self._lock:
            self._settle()
            if amount > max(0, self.total - self._used):
                return False
            self._used += self._cost(amount)
            return True

    def give_back(self, amount: int) -> None:
        """Return what `take` reserved."""
        self._returned.append(amount)

    @property
    def free(self) -> int:
        """What is not reserved at this moment."""
        with self._lock:
            self._settle()
            return max(0, self.total - self._used)

    def _settle(self) -> None:
        while True:
            try:
                self._used -= self._cost(self._returned.popleft())
            except IndexError:
                return

    @staticmethod
    def _cost(amount: int) -> int:
        return amount


class Capacity(Tally):
    """``total`` bytes of memory for buffers, each of which costs whole pages, and at most `MAX_BUFFERS` of them.

    The last buffer may use up the last page in part: what is free can always be had in one piece.
    """

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._buffers = Tally(MAX_BUFFERS)

    def take(self, amount: int) -> bool:
        """Reserve the memory of a buffer of ``amount`` bytes (0 too); False if there is not so much, or are too many
        buffers.
        """
        if not self._buffers.take(1):
            return False
        if super().take(amount):
            return True
        self._buffers.give_back(1)
        return False

    def give_back(self, amount: int) -> None:
        """Return the memory of a buffer of ``amount`` bytes."""
        super().give_back(amount)
        self._buffers.give_back(1)

    @property
    def crowded(self) -> bool:
        """Whether there are as many buffers as there may be."""
        return not self._buffers.free

    @staticmethod
    def _cost(amount: int) -> int:
        return -(-amount // PAGE) * PAGE


class AddressSpace:
    """Base addresses for one session's buffers: numbers that mean nothing outside it.

    They start at a random place below 2^47 (where a client may expect user addresses), are aligned to 2 MiB and keep at
    least 2 MiB between buffers, so that an offset gone wrong hits nothing. Not thread-safe.
    """

    def __init__(self) -> None:
        self._next = _LOWEST + secrets.randbelow((_HIGHEST // 2 - _LOWEST) // BASE_ALIGNMENT) * BASE_ALIGNMENT
        self._taken: list[tuple[int, int]] = []

    def place(self, nbytes: int) -> int | None:
        """A base for ``nbytes`` bytes, or None if the space has no gap of that size left."""
        span = -(-nbytes // BASE_ALIGNMENT) * BASE_ALIGNMENT + BASE_ALIGNMENT
        base: int | None = self._next
        if self._next + span > _HIGHEST or self._overlaps(self._next, span):
            # A client that has allocated and freed its way to the end starts again in the first gap.
            base = self._first_gap(span)
        if base is None:
            return None
        self._next = base + span
        insort(self._taken, (base, base + span))
        return base

    def vacate(self, base: int) -> None:
        """Give ``base`` back; an unknown one is ignored."""
        at = bisect_left(self._taken, (base, 0))
        if at < len(self._taken) and self._taken[at][0] == base:
            del self._taken[at]

    def _overlaps(self, base: int, span: int) -> bool:
        at = bisect_left(self._taken, (base, 0))
        if at and self._taken[at - 1][1] > base:
            return True
        return at < len(self._taken) and self._taken[at][0] < base + span

    def _first_gap(self, span: int) -> int | None:
        low = _LOWEST
        for start, end in self._taken:
            if start - low >= span:
                return low
            low = max(low, end)
        return low if _HIGHEST - low >= span else None
