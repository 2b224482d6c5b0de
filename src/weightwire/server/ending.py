"""Work that is done once, to its end, however often whoever asks for it is interrupted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from weightwire.threads import Latch, Thread

__all__ = ["Ending"]

logger = logging.getLogger(__name__)

_NAME: Final = "weightwire-close"


class _Closer(Thread):
    """The thread that does it for the main one; a process that ends waits for it."""


class Ending:
    """Has ``work`` done when it is first asked for; ``over`` is set then.

    What a signal's handler raises comes on the main thread, anywhere, and could leave half of the work done and locks
    taken that others wait for. So that one has it done by a thread of its own and waits in a way that can be
    interrupted and done again, for ``seconds`` at most: a handler that asks for it may have come where the main thread
    itself holds what the work waits for. Any other thread that is first does it itself. Thread-safe.
    """

    def __init__(self, work: Callable[[], object], seconds: float) -> None:
        self.over = Latch()
        self._work = work
        self._seconds = seconds
        self._who: threading.Thread | None = None
        self._deciding = threading.Lock()
        self._alone = threading.Lock()

    def run(self, *, called_back: bool = False) -> None:
        """Do it or have it done, and return when it is, or is ``seconds`` late. One that the work may be waiting for
        (``called_back``) does it or returns at once.
        """
        caller = threading.current_thread()
        if not self.over.wait(0) and self.begin(called_back=called_back):
            return
        who = self._who
        if called_back or who is caller:
            return
        until = time.monotonic() + self._seconds
        self.over.wait(self._seconds)
        if isinstance(who, _Closer):
            who.join(max(0.0, until - time.monotonic()))
            if not who.ended():
                logger.warning("thread %s did not end in time", who.name)

    def begin(self, *, called_back: bool = False) -> bool:
        """Begin, unless somebody has. Whether it was done by the caller, and needs no waiting for."""
        caller = threading.current_thread()
        aside = caller is threading.main_thread()
        before = self._who
        if before is not None and not (isinstance(before, Thread) and before.ended()):
            return False
        mine = _Closer(target=self._do, name=_NAME, daemon=False) if aside else caller
        with self._deciding:  # nothing is called in here, so no handler runs
            first = self._who is before
            if first:
                self._who = mine
        if not first:
            return False
        if isinstance(mine, _Closer):
            try:
                mine.start()
            except RuntimeError as error:
                logger.debug("no thread to close the server: %s", error)
            else:
                return False
            self._who = caller
        if not called_back:
            self._do()
        elif self._alone.acquire(blocking=False):
            try:
                self._once()
            finally:
                self._alone.release()
        return True

    def _do(self) -> None:
        # One whose start was interrupted may have been given up by somebody else, and begin all the same.
        with self._alone:
            self._once()

    def _once(self) -> None:
        if self.over.wait(0):
            return
        try:
            self._work()
        except BaseException:
            if threading.current_thread() is threading.main_thread():
                self._who = None  # interrupted: whoever asks again does it again
            else:
                self.over.set()
            raise
        self.over.set()
