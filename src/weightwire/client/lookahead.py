"""Hash tensors ahead of the thread that sends them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Final

from weightwire.hashing import hash_payloads
from weightwire.ranges import FileRange

__all__ = ["GROUP", "HashAhead"]

GROUP: Final = 4
"""Tensors hashed together: four independent ones hide each other's multiplies."""

_AHEAD: Final = 2

_LOOK: Final = 0.2
"""Seconds between two looks around while hashes are waited for: a tensor can take minutes."""


class HashAhead:
    """FNV-1a 64 of ``payloads``, in order, `GROUP` at a time, on a thread of its own that is at most two groups
    ahead.

    `start` and `close` belong to one ``try`` and its ``finally``: an interrupt may come at any moment.
    """

    def __init__(self, payloads: Sequence[FileRange | memoryview]) -> None:
        self._groups = deque(payloads[start : start + GROUP] for start in range(0, len(payloads), GROUP))
        self._running: list[Future[list[int]]] = []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="weightwire-hash")
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin with the first groups."""
        while self._groups and len(self._running) < _AHEAD:
            self._running.append(self._executor.submit(self._hash, self._groups.popleft()))

    def _hash(self, payloads: Sequence[FileRange | memoryview]) -> list[int]:
        return hash_payloads(payloads, check=self._check)

    def _check(self) -> None:
        if self._stopped.is_set():
            raise CancelledError

    def ready(self) -> bool:
        """Whether `next` would return at once."""
        return bool(self._running) and self._running[0].done()

    def next(self, watch: Callable[[], object]) -> list[int]:
        """The next group's hashes, waited for if need be. Raises ModelError where a file cannot be read.

        ``watch`` is called a few times a second meanwhile; what it raises ends the wait.
        """
        while not wait(self._running[:1], _LOOK).done:
            watch()
        hashes = self._running.pop(0).result()
        self.start()
        return hashes

    def close(self) -> None:
        """Stop, within about a tenth of a second; afterwards nothing reads the payloads, so files may be closed."""
        self._stopped.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
