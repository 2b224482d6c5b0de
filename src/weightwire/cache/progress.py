"""Waiting for a disk for as long as it gets on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["LONGEST", "PATIENCE", "Progress"]

PATIENCE: Final = 10.0
"""Seconds without any progress after which a disk is not waited for any longer."""

LONGEST: Final = 20.0
"""Seconds that a client is kept waiting in one go. Less than the 30 s for which one waits for a server that takes no
bytes.
"""


class Progress:
    """``condition`` guards what several threads work on; who gets on with it says so. Thread-safe.

    A thread on which handlers of signals run takes ``lock``, which is the condition's: an interrupt within the latter's
    own code would leave it taken.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.hurried = False
        """Whether nobody waits any more."""
        self._count = 0
        self._disk = 0
        self._stuck = -1

    def moved(self, *, disk: bool = False) -> None:
        """Something has got on: the ``disk``, or only what is done for it. The lock is held."""
        self._count += 1
        self._disk += disk
        self.condition.notify_all()

    def hurry(self) -> None:
        """Whoever waits, now or later, comes back at once."""
        with self.condition:
            self.hurried = True
            self.condition.notify_all()

    def wait(self, condition: Callable[[], bool], longest: float | None = None, *, anyhow: bool = False) -> bool:
        """Wait until ``condition``, asked with the lock held, is true; not if there is no progress for `PATIENCE`
        seconds, and at most ``longest`` (`LONGEST`) seconds. Whether it was; it is not asked again after that.

        A disk that somebody has waited for in vain, and that has not moved since, is not waited for a second time;
        ``anyhow`` is for what does not depend on it.
        """
        began = time.monotonic()
        deadline = began + (LONGEST if longest is None else longest)
        met = False
        seen = -1

        def over() -> bool:
            nonlocal met
            met = met or condition()
            return met or self.hurried

        def changed() -> bool:
            return over() or self._count != seen

        with self.condition:
            disk = self._disk
            while not over():
                seen = self._count
                left = deadline - time.monotonic()
                if not anyhow and self._stuck == self._disk:
                    break
                if left <= 0:
                    # What others hashed meanwhile is no progress of the disk's.
                    if disk == self._disk and deadline - began >= PATIENCE:
                        self._stuck = self._disk
                    break
                if not self.condition.wait_for(changed, min(left, PATIENCE)) and left >= PATIENCE:
                    self._stuck = self._disk
                    break
        return met
