"""Signals wait where they must, and are never lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from weightwire.cli import signals
from weightwire.cli.signals import Terminated, deferred_signals, raising_on_signals


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


ENDING = [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]


@pytest.mark.parametrize("number", ENDING)
def test_what_would_end_the_process_raises_and_says_what_it_was(number: signal.Signals) -> None:
    with pytest.raises(Terminated) as caught, raising_on_signals():
        send(number)
    assert caught.value.number == number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_swarm_of_signals_raises_once() -> None:
    reached: list[str] = []
    with raising_on_signals():
        with pytest.raises(Terminated):
            send(signal.SIGHUP)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            send(number)
        reached.append("the end")
    assert reached == ["the end"]


def test_what_is_swallowed_can_be_sent_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SWARM_SECONDS", 0.0)
    with raising_on_signals():
        for _ in range(2):
            with pytest.raises(Terminated):
                send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), *((number, Terminated) for number in ENDING)]
)
def test_a_deferred_signal_takes_effect_at_the_end(number: signal.Signals, error: type[BaseException]) -> None:
    reached: list[str] = []
    with raising_on_signals(), pytest.raises(error), deferred_signals():
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
    numbers = (signal.SIGINT, *ENDING)
    before = [signal.getsignal(number) for number in numbers]
    with raising_on_signals(), deferred_signals():
        assert all(signal.getsignal(number) != was for number, was in zip(numbers, before, strict=True))
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_was_ignored_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with raising_on_signals(), deferred_signals():
            assert signal.getsignal(number) is signal.SIG_IGN
            send(number)
    finally:
        signal.signal(number, before)


def test_on_another_thread_it_does_nothing() -> None:
    seen: list[object] = []

    def run() -> None:
        with raising_on_signals(), deferred_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
