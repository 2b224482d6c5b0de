"""A bounded pool of threads for work on many files, which ends promptly whatever happens."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from typing import Final, TypeVar

from weightwire.config import LoadConfig

__all__ = ["run_each", "worker_count"]

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
) -> Iterator[_R]:
    """What ``work(item, check)`` gives for every item, in the order in which they are done.

    ``work`` calls ``check`` ten times a second or so. ``watch`` is called as often on the caller's thread. What either
    raises, and Ctrl-C, ends all work and is passed on, when no thread is at work any more.
    """
    if not threads:

        def look() -> None:
            watch()

        for item in items:
            yield work(item, look)
            watch()
        return
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise CancelledError

    left = iter(items)
    running: set[Future[_R]] = set()
    executor = ThreadPoolExecutor(threads, thread_name_prefix="weightwire-cache")
    try:
        while True:
            while len(running) < 2 * threads:
                try:
                    item = next(left)
                except StopIteration:
                    break
                running.add(executor.submit(work, item, check))
            if not running:
                return
            done, running = wait(running, _LOOK, FIRST_COMPLETED)
            watch()
            for each in done:
                yield each.result()
    finally:
        stopped.set()
        executor.shutdown(wait=True, cancel_futures=True)
