"""Something done slowly, a step at a time, by whoever another waits for with a timeout.

A busy machine makes a pause longer than was asked for, and one that exceeds the timeout is a stall in fact: the pauses
are measured, and where one came near the timeout the whole is done again with a longer one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from weightwire.errors import TransferTimeout

__all__ = ["Pace", "slow_and_not_stalled"]

_MOST = 30.0


class Pace:
    """Pauses ``seconds`` before each step, and knows the longest time from the end of one step to that of the next."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.longest = 0.0
        self._started = self._last = time.monotonic()

    def step(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What ``call`` returns, after a pause."""
        time.sleep(self.seconds)
        result = call(*arguments)
        now = time.monotonic()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        return result

    @property
    def total(self) -> float:
        """Seconds that all steps so far have taken."""
        return self._last - self._started


def slow_and_not_stalled(timeout: float, steps: int, attempt: Callable[[float, Pace], object]) -> None:
    """``attempt(timeout, pace)`` takes ``steps`` steps, twice the timeout all together and each a small part of it, and
    runs into no TransferTimeout.
    """
    while True:
        pace = Pace(2 * timeout / steps)
        try:
            attempt(timeout, pace)
        except TransferTimeout:
            if pace.longest < timeout / 2 or timeout > _MOST:
                raise
            timeout *= 2
            continue
        assert pace.total > timeout
        return
