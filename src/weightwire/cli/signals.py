"""Signals that raise, at the right moments only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Terminated", "deferred_signals", "raising_on_sigterm"]


class Terminated(BaseException):
    """SIGTERM arrived in a verb that has something to clean up; not an Exception, so that nothing swallows it."""


@contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated, so that what was begun is cleaned up as after Ctrl-C."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM wait: they take effect on leaving.

    For what must not be left half done, such as starting a process and remembering it, or cleaning up. Does nothing on
    another thread than the main one, which no signal handler interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    before = {
        number: handler for number in (signal.SIGINT, signal.SIGTERM) if callable(handler := signal.getsignal(number))
    }
    for number in before:
        signal.signal(number, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            before[signal.Signals(waiting[0])](waiting[0], None)
