"""Progress: lines where there is no terminal, a bar where there is one, and no thread left."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from support.leaks import LeakCheck
from support.scripted import Peer, ScriptedServer, StandIn

from weightwire.cli.progress import LINE_SECONDS, BarDisplay, LineDisplay, Progress, choose_display


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_says_how_far_it_is() -> None:
    lines: list[str] = []
    LineDisplay(write=lines.append).show("pushing", "blk.0\n", 256 << 20, 1 << 30, 0.5)
    LineDisplay(write=lines.append).show("pushing", "", 0, 0, 7.2)
    assert lines == [
        "pushing:  25 %, 256.0 MiB of 1.0 GiB, 0.50 GiB/s, blk.0\\n",
        "pushing: 7 s",
    ]


def test_lines_come_every_two_seconds() -> None:
    assert LINE_SECONDS == 2.0
    assert LineDisplay().interval == 2.0


def test_a_stalled_transfer_still_says_so_and_the_thread_ends() -> None:
    lines: list[str] = []
    seen = threading.Event()

    def write(text: str) -> None:
        lines.append(text)
        if len(lines) >= 3:
            seen.set()

    with Progress("pushing", 100, LineDisplay(0.001, write)) as progress:
        progress.report("a", 40, 100)
        assert seen.wait(30)
    assert "40 %" in lines[-1]
    count = len(lines)
    assert not [t for t in threading.enumerate() if t.name == "weightwire-progress"]
    assert len(lines) == count


def test_nothing_is_shown_when_quiet() -> None:
    assert choose_display(quiet=True) is None
    with Progress("pushing", 100, None) as progress:
        progress.report("a", 1, 100)
    assert not [t for t in threading.enumerate() if t.name == "weightwire-progress"]


@pytest.mark.parametrize(
    ("terminal", "term", "kind"),
    [(True, "xterm", BarDisplay), (True, "dumb", LineDisplay), (True, "", LineDisplay), (False, "xterm", LineDisplay)],
)
def test_only_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str, kind: type) -> None:
    monkeypatch.setattr(sys, "stderr", _Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("TERM", term)
    assert isinstance(choose_display(quiet=False), kind)


def test_the_bar_shows_label_name_and_amount_and_takes_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    bar = BarDisplay()
    bar.show("pushing", "[bold]blk.0", 512 << 20, 1 << 30, 1.0)
    bar.show("verifying", "", 0, 0, 1.0)
    bar.stop()
    shown = terminal.getvalue()
    for word in ("pushing", "[bold]blk.0", "0.5/1.0 GiB", "verifying"):
        assert word in shown


def test_a_display_that_breaks_does_not_break_the_work() -> None:
    called = threading.Event()

    def write(text: str) -> None:
        called.set()
        raise OSError("gone")

    with Progress("pushing", 100, LineDisplay(0.001, write)) as progress:
        assert called.wait(30)
        progress.report("a", 100, 100)


def test_a_second_phase_begins_when_the_first_has_all_bytes() -> None:
    lines: list[str] = []
    shown = threading.Event()

    def write(text: str) -> None:
        lines.append(text)
        shown.set()

    def wait_for(start: str) -> str:
        while True:
            shown.clear()
            assert shown.wait(30)
            if lines[-1].startswith(start):
                return lines[-1]

    with Progress("pushing", 100, LineDisplay(0.001, write), then="verifying") as progress:
        progress.report("a", 99, 100)
        assert " 99 %" in wait_for("pushing")
        progress.report("b", 100, 100)
        progress.report("an empty tensor at the end", 100, 100)
        assert wait_for("verifying") == "verifying: 0 s"
        progress.report("a", 50, 100)
        assert wait_for("verifying:  50 %")


def test_no_descriptor_is_left(no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with Progress("pushing", 100, choose_display(quiet=False)) as progress:
        progress.report("a", 50, 100)


@pytest.mark.timeout(120)
def test_a_push_that_stalls_goes_on_writing_lines_where_there_is_no_terminal(spawn, small_gguf: Path) -> None:
    """Lines are only waited for, so that a slow machine is no failure; none can come early."""

    def where(line: str) -> list[str]:
        return line.split(",")[:2]

    stalled, on = threading.Event(), threading.Event()
    serving = StandIn()

    def stall(peer: Peer) -> None:
        take = peer.head

        def head() -> tuple[int, int]:
            command, size = take()
            if command == 6 and not stalled.is_set():  # the first SET_TENSOR: its payload is left lying
                stalled.set()
                assert on.wait(60)
            return command, size

        peer.head = head  # type: ignore[method-assign]
        serving(peer)

    with ScriptedServer(stall) as scripted:
        started = time.monotonic()
        process = spawn("push", str(small_gguf), scripted.endpoint)
        try:
            assert stalled.wait(60)
            lines = [process.stderr.readline(), process.stderr.readline()]
            # Until it is still at the same place, and yet speaks.
            while lines[-1] and where(lines[-2]) != where(lines[-1]):
                lines.append(process.stderr.readline())
            seconds = time.monotonic() - started
            assert not on.is_set()
        finally:
            on.set()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "876 tensors" in out
    assert seconds >= len(lines) * LINE_SECONDS
    for line in lines:
        assert re.fullmatch(r"pushing: .* s\n|pushing: +\d+ %, .* of 16\.0 MiB, .*\n", line), line
