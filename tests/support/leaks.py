"""Counting what a process holds, to see that it gives everything back."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path


def open_descriptors(pid: int | None = None) -> int:
    """How many file descriptors a process has open (this one, if None)."""
    folder = Path("/proc") / (str(pid) if pid else "self") / "fd"
    # Listing the folder of this process opens one descriptor of its own.
    return len(os.listdir(folder)) - (0 if pid else 1)


def descriptors_below(folder: Path) -> int:
    """How many file descriptors of this process lead to ``folder`` or what is or was in it: what else the process opens
    or closes meanwhile does not matter.
    """
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += Path(os.readlink(f"/proc/self/fd/{name}")).is_relative_to(folder)
    return found


def mappings() -> set[str]:
    """The address ranges mapped without a file behind them that are 1 MiB or larger, as /proc shows them."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        start, _, end = fields[0].partition("-")
        if len(fields) == 5 and int(end, 16) - int(start, 16) >= 1 << 20:
            found.add(fields[0])
    return found


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until `condition` holds; False if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class LeakCheck:
    """Descriptors and threads at one moment, and whether a later moment has no more of either."""

    def __init__(self) -> None:
        gc.collect()
        self.descriptors = open_descriptors()
        self.threads = threading.active_count()

    def settled(self) -> bool:
        """True once there are no more descriptors and threads than at the start (what just ended may take a moment)."""

        def back() -> bool:
            return open_descriptors() <= self.descriptors and threading.active_count() <= self.threads

        def back_without_garbage() -> bool:
            gc.collect()
            return back()

        return back() or eventually(back_without_garbage)

    def report(self) -> str:
        """What there is more of, for a failure's text."""
        names = ", ".join(thread.name for thread in threading.enumerate())
        descriptors = f"descriptors {self.descriptors} -> {open_descriptors()}"
        return f"{descriptors}, threads {self.threads} -> {threading.active_count()} ({names})"
