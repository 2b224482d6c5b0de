"""How much memory a server may give away, and the numbers it gives out in place of addresses."""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_left, insort
from collections import deque
from typing import Final

__all__ = ["BASE_ALIGNMENT", "AddressSpace", "Capacity"]

BASE_ALIGNMENT: Final = 2 << 20
_LOWEST: Final = 1 << 40
_HIGHEST: Final = 1 << 47


class Capacity:
    """``total`` bytes shared among all clients. Thread-safe.

    `give_back` only appends to a queue, because it is called from finalizers, which can run in any thread at any
    moment, also inside one that holds the lock.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._used = 0
        self._lock = threading.Lock()
        self._returned: deque[int] = deque()

    def take(self, nbytes: int) -> bool:
        """Reserve ``nbytes`` bytes; False, and nothing reserved, if fewer are free."""
        with self._lock:
            self._settle()
            if nbytes > self.total - self._used:
                return False
            self._used += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Return what `take` reserved."""
        self._returned.append(nbytes)

    @property
    def free(self) -> int:
        """Bytes not reserved at this moment."""
        with self._lock:
            self._settle()
            return self.total - self._used

    def _settle(self) -> None:
        while True:
            try:
                self._used -= self._returned.popleft()
            except IndexError:
                return


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
