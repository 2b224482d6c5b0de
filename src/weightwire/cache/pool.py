"""A bounded pool of threads for work on many files, which ends promptly whatever happens."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

from weightwire.config import LoadConfig

__all__ = ["run_each", "worker_count"]

_log = logging.getLogger(__name__)

_LOOK: Final = 0.1
"""Seconds between two looks around."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def worker_count(threads: int | None) -> int:
    """How many threads to work with: ``threads``, else GGML_RPC_LOAD_THREADS, else by the CPUs this process may use. 0
    is none: work in line.

    ConfigError unless it is a whole number from 0 to 64.
    """
    named = {name: value for name, value in os.environ.items() if name == "GGML_RPC_LOAD_THREADS"}
    return LoadConfig.resolve(threads=threads, environ=named).threads


def run_each(
    items: Iterable[_T],
    work: Callable[[_T, Callable[[], None]], _R],
    threads: int,
    watch: Callable[[], object] = lambda: None,
) -> Generator[_R, None, None]:
    """What ``work(item, check)`` gives for every item, in the order in which they are done.

    ``work`` calls ``check`` ten times a second or so. ``watch`` is called as often on the caller's thread. What either
    raises, and Ctrl-C, ends all work and is passed on, when no thread is at work any more. Where the system gives fewer
    threads than ``threads``, those do it all; where it gives none, the caller's does. Whoever may be interrupted
    between two results closes the generator: its threads live as long as it does.
    """
    left = iter(items)
    pool = _Pool(work, threads)
    try:
        if not pool.grow():

            def look() -> None:
                watch()

            for item in left:
                yield work(item, look)
                watch()
            return
        running: set[Future[_R]] = set()
        while True:
            while len(running) < 2 * threads:
                try:
                    item = next(left)
                except StopIteration:
                    break
                running.add(pool.submit(item))
                if len(running) > pool.count:
                    pool.grow()
            if not running:
                return
            done, running = wait(running, _LOOK, FIRST_COMPLETED)
            watch()
            for each in done:
                yield each.result()
    finally:
        pool.close()


class _Pool(Generic[_T, _R]):
    """Up to ``most`` threads that do ``work``."""

    def __init__(self, work: Callable[[_T, Callable[[], None]], _R], most: int) -> None:
        self._work = work
        self._most = most
        self._tasks: SimpleQueue[tuple[Future[_R], _T] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    @property
    def count(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    def grow(self) -> bool:
        """Have one thread more, if there is one to be had. Whether there are any."""
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._serve, name=f"weightwire-cache_{len(self._threads)}")
            # Before it is started: an interrupt may come while it starts.
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as error:
                self._threads.remove(thread)
                self._most = len(self._threads)
                _log.warning("only %d of the threads that work on a cache could be started: %s", self._most, error)
        return bool(self._threads)

    def submit(self, item: _T) -> Future[_R]:
        """Have ``item`` worked on."""
        future: Future[_R] = Future()
        self._tasks.put((future, item))
        return future

    def close(self) -> None:
        """Stop, and return when nobody works any more."""
        self._stopped.set()
        self._tasks.put(None)
        for thread in self._threads:
            # One whose start was interrupted may not live, or not yet: it finds its end by itself.
            if thread.is_alive():
                thread.join()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise CancelledError

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, item = task
            try:
                self._check()
                future.set_result(self._work(item, self._check))
            except BaseException as error:
                future.set_exception(error)
            # Nothing is kept alive while this thread waits.
            del task, future, item
        self._tasks.put(None)  # for the next one
