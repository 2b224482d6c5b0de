"""The pool of threads behind seeding and checking: whenever an interrupt comes, no thread stays behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cachedir import contents, name_of
from support.everywhere import run_script
from support.leaks import LeakCheck, eventually

from weightwire.cache import verify_cache
from weightwire.cache.pool import run_each


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weightwire-cache")]


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("before", [False, True])
def test_an_interrupt_while_a_thread_is_started(
    which: int, before: bool, monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    """Starting one waits for it, and is where a signal is likely to be heard."""
    start, started = threading.Thread.start, 0

    def interrupted(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        if started == which and before:
            raise KeyboardInterrupt
        start(thread)
        if started == which:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_each(range(10), lambda item, check: item, 2)
    assert eventually(lambda: not workers())


EVERYWHERE = """
import threading
from support.everywhere import Everywhere
from weightwire import threads
from weightwire.cache import pool

def work(item, check):
    check()
    return item

everywhere = Everywhere(threading, pool, threads)
for _ in everywhere:
    took = []
    try:
        everywhere.trace(lambda: pool.run_each(range(6), work, 2, took=took.append))
    except KeyboardInterrupt:
        everywhere.count += 1
    else:
        assert sorted(took) == list(range(6)), took
    everywhere.settle()
print(everywhere.count)
"""


def test_an_interrupt_at_any_line() -> None:
    assert run_script(EVERYWHERE) > 100


@pytest.mark.parametrize("who", ["took", "watch"])
@pytest.mark.parametrize("threads", [0, 2])
def test_what_the_caller_raises_comes_out_as_it_is(who: str, threads: int, no_leaks: LeakCheck) -> None:
    def stop(*_: object) -> None:
        raise StopIteration(who)

    with pytest.raises(StopIteration, match=who):
        run_each(range(10), lambda item, check: item, threads, **{who: stop})
    assert not workers()


def test_what_work_raises_comes_out_as_it_is(no_leaks: LeakCheck) -> None:
    def work(item: int, check: Callable[[], None]) -> int:
        if item == 5:
            raise StopIteration("five")
        return item

    for threads in (0, 2):
        with pytest.raises(StopIteration, match="five"):
            run_each(range(10), work, threads)
    assert not workers()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "entries"
    folder.mkdir()
    for data in contents(*range(1000, 1020)).values():
        (folder / name_of(data)).write_bytes(data)
    return folder


def interrupt(name: str, done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_of_who_takes_the_results_of_a_check(directory: Path, no_leaks: LeakCheck) -> None:
    """Whoever reports it holds its traceback, with all that was in hand, until the process waits for its threads."""
    with pytest.raises(KeyboardInterrupt) as held:
        verify_cache(directory, threads=2, index=False, progress=interrupt)
    assert not workers()
    assert held.tb is not None
