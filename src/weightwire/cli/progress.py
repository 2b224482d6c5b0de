"""Progress on stderr: a bar on a terminal, otherwise a line every two seconds.

The work only stores how far it is; a thread of its own shows it. So a report costs the work next to nothing, and a
transfer that stalls still says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from weightwire.cli.output import human_bytes, note, printable
from weightwire.threads import Latch, Thread

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["BarDisplay", "LineDisplay", "Progress", "choose_display"]

LINE_SECONDS = 2.0
BAR_SECONDS = 0.1


class Display(Protocol):
    """Something that shows a state every ``interval`` seconds; a ``total`` of 0 bytes means that it is not known."""

    interval: float

    def show(self, label: str, name: str, done: int, total: int, seconds: float) -> None: ...

    def stop(self) -> None: ...


class LineDisplay:
    """One plain line per showing, for logs and pipes."""

    def __init__(self, interval: float = LINE_SECONDS, write: Callable[[str], None] = note) -> None:
        self.interval = interval
        self._write = write

    def show(self, label: str, name: str, done: int, total: int, seconds: float) -> None:
        if not total:
            self._write(f"{label}: {seconds:.0f} s")
            return
        share = f"{100 * done // total:3d} %"
        rate = done / seconds / 2**30 if seconds > 0 else 0.0
        where = f", {printable(name)}" if name else ""
        self._write(f"{label}: {share}, {human_bytes(done)} of {human_bytes(total)}, {rate:.2f} GiB/s{where}")

    def stop(self) -> None:
        """Nothing to put back."""


class BarDisplay:
    """A bar that redraws itself and is gone when the work ends."""

    def __init__(self, interval: float = BAR_SECONDS) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        self.interval = interval
        self._bar: RichProgress = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[tensor]}", markup=False),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._task: TaskID | None = None
        self._label = ""

    def show(self, label: str, name: str, done: int, total: int, seconds: float) -> None:
        name = printable(name)
        if self._task is None:
            self._task = self._bar.add_task(label, total=total or None, tensor=name)
            self._bar.start()
        if self._label != label:
            # Otherwise the speed of one phase would be an average with the one before.
            self._label = label
            self._bar.reset(self._task, total=total or None)
        self._bar.update(self._task, description=label, completed=done, total=total or None, tensor=name[:40])
        self._bar.refresh()

    def stop(self) -> None:
        if self._task is not None:
            self._bar.stop()


def choose_display(quiet: bool) -> Display | None:
    """A bar when stderr is a terminal that can redraw a line, lines when it is not, nothing when ``quiet``."""
    if quiet:
        return None
    if not _redraws(sys.stderr):
        return LineDisplay()
    return BarDisplay()


def _redraws(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


class Progress:
    """Show how far a piece of work is, from entering to leaving the ``with`` block.

    ``report(name, done, total)`` takes the tensor in hand and bytes. ``then`` names a second phase that begins when
    all bytes have been reported once.
    """

    def __init__(self, label: str, total: int, display: Display | None, *, then: str = "") -> None:
        self._display = display
        self._then = then
        self._state = (label, "", 0, total, time.monotonic())
        self._ended = Latch()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        if self._display is not None:
            thread = Thread(target=self._run, args=(self._display,), name="weightwire-progress", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return self  # the system has no thread to give: the work goes on unseen
            except BaseException:
                self._ended.set()
                raise
            self._thread = thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def report(self, name: str, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` bytes are through, the last of them of tensor ``name``."""
        label, _, _, known, started = self._state
        if done < total:
            self._state = (label, name, done, total, started)
        elif self._then:
            self._state = (self._then, "", 0, 0, time.monotonic())
            self._then = ""
        elif known:
            self._state = (label, name, done, total, started)

    def _run(self, display: Display) -> None:
        try:
            while not self._ended.wait(display.interval):
                label, name, done, total, started = self._state
                display.show(label, name, done, total, time.monotonic() - started)
        except (OSError, ValueError):
            pass  # a terminal that went away: the work goes on unseen
        finally:
            with contextlib.suppress(OSError, ValueError):
                display.stop()
