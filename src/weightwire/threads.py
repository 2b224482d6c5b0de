"""Threads whose start and join a signal's handler may interrupt, and what is said where the system gives no more."""

from __future__ import annotations

import _thread
import errno
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final

from weightwire.errors import TransportError

__all__ = ["NO_THREAD", "Latch", "Thread", "start"]

NO_THREAD: Final = "pthread_create"
"""The ``operation`` of such an error."""

_LOOK: Final = 0.05
_LOOK_AGAIN: Final = 1.0
"""Seconds after which who waits for a latch looks for himself, should nobody have got to tell him."""


class Thread(threading.Thread):
    """A thread of which Ctrl-C, whenever it comes, leaves a true picture.

    `threading.Thread` has three gaps: an interrupted start may leave a lock taken that the new thread waits for; and up
    to Python 3.12 an interrupted join takes a thread that is at work for one that has ended, and one by a handler that
    comes within another waits for ever.
    """

    def __init__(
        self,
        target: Callable[..., object],
        *,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        daemon: bool | None = None,
    ) -> None:
        super().__init__(target=target, name=name, args=args, daemon=daemon)
        self._begun = False
        self._over = False
        self._within = False
        self._running = threading.Lock()
        self._running.acquire()
        self._go: threading.Lock | None = None
        self._process = 0

    def start(self) -> None:
        """Begin. RuntimeError where the system gives no thread, pthread_create(3). What a signal's handler raises may
        come before it has begun, and it never does any work then, or right after: `join` and `ended` know.
        """
        self._process = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            self._begun = True
            try:
                super().start()  # handlers run on the main thread alone
            except BaseException:
                self._begun = False
                raise
            return
        # Blocking signals here would not do: any other thread may take one for the process, and its handler runs here.
        self._go = threading.Lock()
        self._go.acquire()
        there = threading.Lock()
        there.acquire()
        trouble: list[BaseException] = []
        try:
            _thread.start_new_thread(self._start_elsewhere, (there, trouble))
            there.acquire()
            if trouble:
                raise trouble.pop()  # kept by nobody: it holds on to this frame
            self._begun = True
        finally:
            self._go.release()

    def _start_elsewhere(self, there: threading.Lock, trouble: list[BaseException]) -> None:
        """On a thread for this alone, where no handler runs, and which needs no more than a function call to start."""
        try:
            super().start()
        except BaseException as error:
            trouble.append(error)
        finally:
            there.release()

    def run(self) -> None:
        """Do the work."""
        try:
            if self._go is not None:
                self._go.acquire()
                if not self._begun:  # whoever started it was interrupted, and knows nothing of it
                    return
            super().run()
        finally:
            self._over = True
            self._running.release()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most ``timeout`` seconds. Returns at once if it never began, and in a fork of the
        process, where there is no such thread.
        """
        if not self._begun or os.getpid() != self._process:
            return
        if threading.current_thread() is self:
            raise RuntimeError("cannot join current thread")
        until = None if timeout is None else time.monotonic() + timeout
        while not self._over:
            left = _LOOK if until is None else min(_LOOK, until - time.monotonic())
            if left <= 0:
                return
            # Who is interrupted right after this leaves it locked, so it only shortens the wait.
            if self._running.acquire(timeout=left):
                self._running.release()
        if threading.current_thread() is not threading.main_thread():
            self._join_over(until)
        elif not self._within:  # else a handler's that came in there: what it would wait for, the main thread holds
            self._within = True
            try:
                self._join_over(until)
            finally:
                self._within = False

    def _join_over(self, until: float | None) -> None:
        super().join(None if until is None else max(0.0, until - time.monotonic()))

    def ended(self) -> bool:
        """Whether it does no work any more, or never did."""
        return self._over or not self._begun or os.getpid() != self._process


class Latch:
    """A `threading.Event` that stays set, and that no interrupt of whoever sets it or waits for it leaves locked."""

    def __init__(self) -> None:
        self._set = False
        self._told: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Let everybody go on who waits, now or later."""
        self._set = True
        self._told.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds. Whether it is."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._set:
            left = _LOOK_AGAIN if until is None else min(_LOOK_AGAIN, until - time.monotonic())
            if left <= 0:
                break
            try:
                self._told.get(timeout=left)
            except Empty:
                pass
            finally:
                # For the next one, even if what was taken is lost to an interrupt.
                if self._set:
                    self._told.put(None)
        return self._set


def start(thread: Thread, endpoint: str = "") -> None:
    """Start ``thread``. TransportError (EAGAIN; ``endpoint`` is what the thread is for) where the system has none to
    give, pthread_create(3); the thread never did any work then.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise TransportError(
            f"no thread can be started ({error})",
            endpoint=endpoint,
            operation=NO_THREAD,
            errno=errno.EAGAIN,
            hint="this user has as many processes and threads as allowed (see ulimit -u, or pids.max of its cgroup), "
            "or there is no memory for one more (see ulimit -v, or memory.max)",
        ) from error
