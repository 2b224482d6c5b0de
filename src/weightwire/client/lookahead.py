"""Hash tensors ahead of the thread that sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from weightwire.hashing import hash_payloads
from weightwire.ranges import FileRange

__all__ = ["GROUP", "HashAhead"]

GROUP: Final = 4
"""Tensors hashed together: four independent ones hide each other's multiplies."""

_AHEAD: Final = 2


class HashAhead:
    """FNV-1a 64 of ``payloads``, in order, `GROUP` at a time, on a thread of its own that is at most two groups
    ahead.
    """

    def __init__(self, payloads: Sequence[FileRange | memoryview]) -> None:
        self._groups = deque(payloads[start : start + GROUP] for start in range(0, len(payloads), GROUP))
        self._running: deque[Future[list[int]]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="weightwire-hash")
        self._fill()

    def _fill(self) -> None:
        while self._groups and len(self._running) < _AHEAD:
            self._running.append(self._executor.submit(hash_payloads, self._groups.popleft()))

    def ready(self) -> bool:
        """Whether `next` would return at once."""
        return bool(self._running) and self._running[0].done()

    def next(self) -> list[int]:
        """The next group's hashes, waited for if need be. Raises ModelError where a file cannot be read."""
        hashes = self._running[0].result()
        self._running.popleft()
        self._fill()
        return hashes

    def close(self) -> None:
        """Stop; waits for the group being hashed, whose files the caller may close afterwards."""
        self._executor.shutdown(wait=True, cancel_futures=True)
