"""How threads are started."""

from __future__ import annotations

import errno
import signal
import threading

import pytest
from support.leaks import LeakCheck

from weightwire.errors import TransportError
from weightwire.threads import begin, start


def mask() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_a_thread_has_the_signal_mask_of_who_started_it(no_leaks: LeakCheck) -> None:
    """And so has a process that it starts: blocked signals would be inherited, and a child that cannot be stopped."""
    before, seen = mask(), []
    assert signal.SIGINT not in before
    thread = threading.Thread(target=lambda: seen.append(mask()))
    begin(thread)
    assert mask() == before
    thread.join(20)
    assert seen == [before]


def test_one_that_another_thread_starts(no_leaks: LeakCheck) -> None:
    seen: list[str] = []

    def work() -> None:
        inner = threading.Thread(target=lambda: seen.append("inner"))
        begin(inner)
        inner.join(20)

    outer = threading.Thread(target=work)
    begin(outer)
    outer.join(20)
    assert seen == ["inner"]


@pytest.mark.parametrize("way", [begin, start])
def test_no_thread_to_be_had(way: object, monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = mask()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError if way is begin else TransportError) as caught:
        way(threading.Thread())  # type: ignore[operator]
    assert way is begin or caught.value.errno == errno.EAGAIN  # type: ignore[attr-defined]
    assert mask() == before
