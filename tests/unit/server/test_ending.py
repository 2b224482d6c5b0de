"""Work that is done once, whoever asks for it."""

from __future__ import annotations

import threading

import pytest
from support.leaks import LeakCheck, eventually

from weightwire.server.ending import Ending
from weightwire.threads import Thread

SECONDS = 20.0


class Work:
    """Says which threads did it; waits for ``open`` in it."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.open = threading.Event()
        self.ending = Ending(self._do, SECONDS)

    def _do(self) -> None:
        self.threads.append(threading.current_thread())
        assert self.open.wait(SECONDS)


def elsewhere(work: Work, *, called_back: bool = False) -> Thread:
    thread = Thread(target=lambda: work.ending.run(called_back=called_back), name="test-asks")
    thread.start()
    return thread


def test_the_main_thread_has_it_done_and_waits(no_leaks: LeakCheck) -> None:
    work = Work()
    threading.Timer(0.05, work.open.set).start()
    work.ending.run()
    assert work.ending.over.wait(0)
    work.ending.run()
    assert [thread.name for thread in work.threads] == ["weightwire-close"]
    assert not work.threads[0].is_alive()


@pytest.mark.parametrize("called_back", [False, True])
def test_any_other_does_it_itself(called_back: bool, no_leaks: LeakCheck) -> None:
    work = Work()
    first = elsewhere(work, called_back=called_back)
    assert eventually(lambda: bool(work.threads))
    second = elsewhere(work)
    elsewhere(work, called_back=True).join()  # waits for nobody
    assert not work.ending.over.wait(0)
    assert not second.ended()
    work.open.set()
    work.ending.run()
    first.join()
    second.join()
    assert work.threads == [first]


def test_who_does_it_may_ask_for_it(no_leaks: LeakCheck) -> None:
    done: list[int] = []

    def do() -> None:
        ending.run()
        done.append(1)

    ending = Ending(do, SECONDS)
    ending.run()
    assert done == [1]


def test_one_that_was_interrupted_before_it_began_is_begun_again(
    monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    def interrupted(thread: Thread) -> None:
        raise KeyboardInterrupt

    work = Work()
    work.open.set()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("weightwire.threads.Thread.start", interrupted)
        work.ending.run()
    assert not work.threads
    work.ending.run()
    assert len(work.threads) == 1


def test_without_a_thread_to_be_had_the_main_one_does_it(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    """And does it again if it was interrupted in it."""

    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("weightwire.threads.Thread.start", refuse)
    done: list[threading.Thread] = []

    def do() -> None:
        done.append(threading.current_thread())
        if len(done) == 1:
            raise KeyboardInterrupt

    ending = Ending(do, SECONDS)
    with pytest.raises(KeyboardInterrupt):
        ending.run()
    assert not ending.over.wait(0)
    for _ in range(2):
        ending.run()
    assert done == [threading.main_thread()] * 2


def test_what_it_raises_keeps_nobody_waiting(no_leaks: LeakCheck) -> None:
    def fail() -> None:
        raise ValueError("a hook's")

    ending, caught = Ending(fail, SECONDS), []

    def ask() -> None:
        try:
            ending.run()
        except ValueError as error:
            caught.append(error)

    thread = Thread(target=ask)
    thread.start()
    assert ending.over.wait(SECONDS)
    thread.join()
    assert len(caught) == 1
