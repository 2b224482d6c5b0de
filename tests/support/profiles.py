"""What holds for every `LoadProfile`, whatever was loaded and however."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest

from weightwire.profile import LoadProfile
from weightwire.transport.profiling import LoadRecorder

INSIDE = ("read", "hash", "ask", "staging", "wire", "wait", "gap")
"""What the span consists of."""


def assert_adds_up(profile: LoadProfile) -> None:
    """Nothing is counted that cannot be. That the stages add up to the span holds by construction, since the span is
    their sum; whether it is the time that passed, `Spans` knows.
    """
    parts = {name: getattr(profile, f"{name}_ns") for name in INSIDE}
    assert profile.measured
    assert profile.span_ns > 0
    assert sum(parts.values()) == profile.span_ns, parts
    assert all(ns >= 0 for ns in parts.values())
    assert 0 <= profile.blocked_ns <= profile.wait_ns
    counted = {
        name: profile.commands[name].count for name in ("SET_TENSOR", "SET_TENSOR_2D") if name in profile.commands
    }
    assert sum(counted.values()) == profile.set_tensor_calls
    assert all(stat.count > 0 and stat.ns > 0 for stat in profile.commands.values())


@dataclass
class Stretch:
    """A stretch of a span, nanoseconds of CLOCK_MONOTONIC: before and after the call that began it, and before and
    after the last that said it lasts until then.
    """

    begin: tuple[int, int]
    mark: tuple[int, int] | None = None


class Spans:
    """A clock beside every recorder's, of the tests' own: when spans begin, and how long they last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._stretches: dict[LoadRecorder, list[Stretch]] = {}
        for name in ("begin", "begin_once", "mark"):
            self._watch(monkeypatch, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(LoadRecorder, name)

        def watched(recorder: LoadRecorder) -> None:
            before = time.monotonic_ns()
            real(recorder)
            between = (before, time.monotonic_ns())
            with self._lock:
                stretches = self._stretches.setdefault(recorder, [])
                if name == "mark":
                    if stretches:
                        stretches[-1].mark = between
                elif name == "begin" or not stretches:
                    stretches.append(Stretch(between))

        monkeypatch.setattr(LoadRecorder, name, watched)

    def of(self, side: str) -> list[list[Stretch]]:
        """The stretches of each recorder of ``side``, in the order in which they first began."""
        with self._lock:
            return [stretches for recorder, stretches in self._stretches.items() if recorder.side == side]

    def check(self, profile: LoadProfile, stretches: list[Stretch]) -> None:
        """The stages of ``profile`` add up to the time that passed in ``stretches``, within what the calls took that
        began and ended them, which is far less than the 2 % that are promised unless somebody else had the CPU.
        """
        assert_adds_up(profile)
        least = most = 0
        for stretch in stretches:
            assert stretch.mark is not None
            least += stretch.mark[0] - stretch.begin[1]
            most += stretch.mark[1] - stretch.begin[0]
        parts = {name: getattr(profile, f"{name}_ns") for name in INSIDE}
        assert least <= sum(parts.values()) <= most, (least, parts, most)
