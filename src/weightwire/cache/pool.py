"""A bounded pool of threads for work on many files, which ends promptly whatever happens."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Final, Generic, NamedTuple, TypeVar

from weightwire.config import LoadConfig
from weightwire.threads import Thread

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
    *,
    took: Callable[[_R], object] = lambda result: None,
    watch: Callable[[], object] = lambda: None,
) -> None:
    """Have ``work(item, check)`` done for every item, and ``took`` called with what each gave, as they are done.

    ``work`` calls ``check`` ten times a second or so. ``watch`` is called as often, on the caller's thread like
    ``took``. What any of them raises, and Ctrl-C, ends all work and is passed on, when no thread is at work any more.
    Where the system gives fewer threads than ``threads``, those do it all; where it gives none, the caller's does.
    """

    def look() -> None:
        watch()

    pool = _Pool(work, threads)
    try:
        try:
            if pool.grow():
                _share_out(items, pool, 2 * threads, took, watch)
            else:
                for item in items:
                    took(work(item, look))
                    watch()
        finally:
            pool.close()
    except BaseException:
        pool.close()  # once more: the interrupt may have come in there
        raise


def _share_out(
    items: Iterable[_T], pool: _Pool[_T, _R], most: int, took: Callable[[_R], object], watch: Callable[[], object]
) -> None:
    """Have the pool do it, with ``most`` items in its hands at a time."""
    left, running, more = iter(items), 0, True
    while True:
        while more and running < most:
            try:
                item = next(left)
            except StopIteration:
                more = False
                break
            pool.submit(item)
            running += 1
            if running > pool.count:
                pool.grow()
        if not running:
            return
        done = pool.next_done()
        watch()
        if done is not None:
            running -= 1
            if isinstance(done, _Failed):
                raise done.error
            took(done.result)


class _Stopped(Exception):
    """The pool was closed."""


class _Done(NamedTuple, Generic[_R]):
    result: _R


class _Failed(NamedTuple):
    error: BaseException


class _Pool(Generic[_T, _R]):
    """Up to ``most`` threads that do ``work``.

    Whoever uses it shares nothing with them that an interrupt could leave locked: queues and a flag, no conditions.
    """

    def __init__(self, work: Callable[[_T, Callable[[], None]], _R], most: int) -> None:
        self._work = work
        self._most = most
        self._tasks: SimpleQueue[tuple[_T] | None] = SimpleQueue()
        self._done: SimpleQueue[_Done[_R] | _Failed] = SimpleQueue()
        self._threads: list[Thread] = []
        self._stopped = False

    @property
    def count(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    def grow(self) -> bool:
        """Have one thread more, if there is one to be had. Whether there are any."""
        if len(self._threads) < self._most:
            thread = Thread(target=self._serve, name=f"weightwire-cache_{len(self._threads)}")
            # Before it is started: an interrupt may come right after.
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as error:
                self._threads.remove(thread)
                self._most = len(self._threads)
                _log.warning("only %d of the threads that work on a cache could be started: %s", self._most, error)
        return bool(self._threads)

    def submit(self, item: _T) -> None:
        """Have ``item`` worked on."""
        self._tasks.put((item,))

    def next_done(self) -> _Done[_R] | _Failed | None:
        """What came of an item; None if nothing was done for a moment."""
        try:
            return self._done.get(timeout=_LOOK)
        except Empty:
            return None

    def close(self) -> None:
        """Stop, and return when nobody works any more. Idempotent."""
        self._stopped = True
        self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _check(self) -> None:
        if self._stopped:
            raise _Stopped

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            done: _Done[_R] | _Failed
            try:
                self._check()
                done = _Done(self._work(task[0], self._check))
            except BaseException as error:
                done = _Failed(error)
            self._done.put(done)
            # Nothing is kept alive while this thread waits.
            del task, done
        self._tasks.put(None)  # for the next one
