"""The threads that read and hash."""

from __future__ import annotations

import logging
import threading

import pytest
from support.leaks import LeakCheck, eventually

from weightwire.cache.workers import Workers


def test_none_before_the_first_task_and_no_more_than_needed(no_leaks: LeakCheck) -> None:
    before = threading.active_count()
    workers = Workers(3)
    assert threading.active_count() == before
    go, running = threading.Event(), threading.Semaphore(0)

    def task() -> None:
        running.release()
        go.wait(20)

    for _ in range(5):
        assert workers.submit(task)
    for _ in range(3):
        assert running.acquire(timeout=20)
    assert threading.active_count() == before + 3
    go.set()
    for _ in range(2):
        assert running.acquire(timeout=20)
    workers.close()
    assert threading.active_count() == before
    assert not workers.submit(task)
    workers.close()


def test_a_task_that_fails_does_not_end_its_thread(no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers(1)
    done = threading.Event()
    workers.submit(lambda: 1 // 0)
    workers.submit(done.set)
    assert done.wait(20)
    assert "ZeroDivisionError" in caplog.text
    workers.close()


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "weightwire")

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    workers = Workers()
    assert not workers.submit(lambda: None)
    assert "can't start" in caplog.text
    workers.close()


def test_a_task_is_let_go_of(no_leaks: LeakCheck) -> None:
    """What it refers to is memory of a client."""
    import weakref

    class Task:
        def __call__(self) -> None:
            pass

    workers = Workers(1)
    task = Task()
    alive = weakref.ref(task)
    workers.submit(task)
    del task
    assert eventually(lambda: alive() is None)
    workers.close()
