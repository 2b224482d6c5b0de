"""A few threads that read entries and hash what arrives, shared by all clients of a server."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from weightwire.threads import Thread

__all__ = ["MAX_WORKERS", "Workers"]

logger = logging.getLogger(__name__)

MAX_WORKERS: Final = 4
"""More threads copying out of the page cache than this wait for the same memory."""


class Workers:
    """Runs tasks, first come first served, on up to ``count`` threads (by default the processors this process may use,
    from 2 to `MAX_WORKERS`), each started when a task finds the others busy. Thread-safe.

    A task is short (milliseconds), never waits for another one, and deals with its own failures.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count if count is not None else max(2, min(MAX_WORKERS, len(os.sched_getaffinity(0))))
        self._condition = threading.Condition()
        self._tasks: deque[Callable[[], object]] = deque()
        self._threads: list[Thread] = []
        self._idle = 0
        self._closing = False

    def submit(self, task: Callable[[], object]) -> bool:
        """Have ``task`` run soon. False, and it will not be run, if there is no thread to be had, or after `close`."""
        with self._condition:
            if self._closing:
                return False
            if self._idle <= len(self._tasks) and len(self._threads) < self.count:
                self._grow()
            if not self._threads:
                return False
            self._tasks.append(task)
            self._condition.notify()
        return True

    def _grow(self) -> None:
        name = f"weightwire-cache-{len(self._threads)}"
        thread = Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.debug("no further thread for the cache: %s", error)
        else:
            self._threads.append(thread)

    def close(self, timeout: float = 5.0) -> None:
        """Drop what has not begun and end the threads, waiting at most ``timeout`` seconds for each. Idempotent."""
        with self._condition:
            self._closing = True
            self._tasks.clear()
            self._condition.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._condition:
                self._idle += 1
                while not self._tasks and not self._closing:
                    self._condition.wait()
                self._idle -= 1
                if self._closing:
                    return
                task = self._tasks.popleft()
            try:
                task()
            except Exception:
                logger.exception("a task of the cache failed")
            # Nothing may keep the last task's memory alive while this thread waits.
            del task
