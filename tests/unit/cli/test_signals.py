"""Signals wait where they must, and are never lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from weightwire.cli.signals import Terminated, deferred_signals, raising_on_sigterm


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_deferred_signal_takes_effect_at_the_end(number: signal.Signals, error: type[BaseException]) -> None:
    reached: list[str] = []
    with raising_on_sigterm(), pytest.raises(error), deferred_signals():
        send(number)
        send(number)
        reached.append("the end")
    assert reached == ["the end"]


def test_it_takes_effect_when_the_block_fails_or_returns_too() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        send(signal.SIGINT)
        raise ValueError

    def leave() -> int:
        with deferred_signals():
            send(signal.SIGINT)
            return 1

    with pytest.raises(KeyboardInterrupt):
        leave()


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with raising_on_sigterm(), deferred_signals():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_signals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_on_another_thread_it_does_nothing() -> None:
    seen: list[object] = []

    def run() -> None:
        with deferred_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
