"""Signals that raise, at the right moments only."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Terminated", "deferred_signals", "raising_on_signals"]

# Sent by others, caught by nobody, they would end the process on the spot.
_ENDING = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
# Signals come in swarms: a terminal that closes sends SIGHUP, and so does its shell.
SWARM_SECONDS = 2.0


class Terminated(BaseException):
    """Signal ``number`` is to end a verb that has something to clean up; not an Exception, so that nothing swallows
    it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Inside, a signal that would end the process raises Terminated, so that what was begun is cleaned up as after
    Ctrl-C. Those that follow at once, Ctrl-C too, must not interrupt that: they are ignored.

    Signals that are ignored or handled already are left alone. Does nothing on another thread than the main one, which
    no signal handler interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first and now - first < SWARM_SECONDS:
            return
        first = now
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(number)

    ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        ours.append(signal.SIGINT)
    before = {number: signal.signal(number, stop) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Inside, Ctrl-C and the signals that `raising_on_signals` catches wait: they take effect on leaving.

    For what must not be left half done, such as starting a process and remembering it, or cleaning up. Does nothing on
    another thread than the main one, which no signal handler interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    before = {number: handler for number in (signal.SIGINT, *_ENDING) if callable(handler := signal.getsignal(number))}
    for number in before:
        signal.signal(number, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            before[signal.Signals(waiting[0])](waiting[0], None)
