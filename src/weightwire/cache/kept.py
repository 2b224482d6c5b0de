"""One tensor that is kept while it is received: what has landed of it, and what that hashes to so far."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from weightwire.hashing import FNV_OFFSET, fnv1a64

if TYPE_CHECKING:
    from weightwire.cache.saving import Saver
    from weightwire.cache.writing import CacheWriter

__all__ = ["Save"]

logger = logging.getLogger(__name__)

_STEP: Final = 4 << 20
_SMALL: Final = 128 << 10
"""A tensor up to this size is hashed by the thread that received it: handing it over would take longer."""


class Save:
    """One tensor being kept; made by `Saver.begin`. `landed`, `complete` and `abandon` are for who receives it."""

    def __init__(self, saver: Saver, nbytes: int, window: memoryview | None) -> None:
        self.nbytes = nbytes
        self.content_hash: int | None = None
        self.received = False
        self.cancelled = False
        self.writer: CacheWriter | None = None
        self.written = 0
        self.lost = False
        """Whether it comes to no entry because something was in its way."""
        self.stored = False
        self._saver = saver
        self._window = window
        self._landed = 0
        self._hashed = 0
        self._digest = FNV_OFFSET
        self._hashing = False

    @property
    def window(self) -> memoryview | None:
        """The tensor's memory; None from when it is not needed any more."""
        return self._window

    def landed(self, end: int) -> None:
        """The first ``end`` bytes are in place."""
        with self._saver.condition:
            self._landed = end
            if self._hashing or end == self._hashed:
                return
            self._hashing = True
        if self.nbytes <= _SMALL or not self._saver.workers.submit(self._turn):
            while self._step():
                pass

    def complete(self) -> None:
        """All of it is in place, and counts as sent: whoever asks for this entry from now on waits for it."""
        with self._saver.condition:
            self.received = True
            if not self._hashing:
                self._saver.hashed(self)

    def abandon(self) -> None:
        """It did not arrive, or is about to change: no entry comes of it, unless it has been written already."""
        with self._saver.condition:
            if self._window is not None:
                self.cancelled = True
                if not self._hashing:
                    self._saver.hashed(self)

    def settle(self, end: int | None = None, longest: float | None = None) -> None:
        """Return when the first ``end`` bytes (None: all) of the memory may be changed: after some waiting, of at most
        ``longest`` seconds, and at the price of the entry if the disk does not get on.
        """
        upto = self.nbytes if end is None else min(end, self.nbytes)
        if not self._saver.reach(self, lambda: self._window is None or self.written >= upto, longest):
            self._saver.give_up([self])

    def release(self) -> None:
        """The memory is not needed any more. The saver's lock is held."""
        if self._window is not None:
            self._window = None
            self._saver.progress.moved()

    # On a worker.

    def _turn(self) -> None:
        while self._step():
            # To the end of the queue, behind the other clients' work.
            if self._saver.workers.submit(self._turn):
                return

    def _step(self) -> bool:
        """Hash what has landed, up to a few MiB. Whether there may be more."""
        with self._saver.condition:
            window = self._window
            end = min(self._landed, self._hashed + _STEP)
            if window is None or self.cancelled or end == self._hashed:
                self._hashing = False
                if self.received or self.cancelled:
                    self._saver.hashed(self)
                return False
        try:
            self._digest = fnv1a64(window[self._hashed : end], self._digest)
        except Exception:
            logger.exception("hashing a tensor for the cache failed")
            self.cancelled = self.lost = True
        self._hashed = end
        with self._saver.condition:
            self._saver.progress.moved()
        return True

    @property
    def digest(self) -> int:
        """The FNV-1a 64 of what has been hashed so far: of all of it, once it has been received."""
        return self._digest
