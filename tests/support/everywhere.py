"""A signal at each line of some modules in turn, in a process of its own.

By a real signal, which the main thread handles where Python looks for it next. A script that `run_script` runs says::

    everywhere = Everywhere(threading, module)
    for _ in everywhere:
        try:
            everywhere.trace(work)
        except KeyboardInterrupt:
            everywhere.count += 1
        everywhere.settle()
    print(everywhere.count)
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

__all__ = ["Everywhere", "run_script"]

_SECONDS = 100


class Everywhere:
    """Rounds, in each of which ``number`` comes one line later in what is traced; the last is without it.

    ``but`` says which lines are left out.
    """

    def __init__(
        self,
        *modules: ModuleType,
        number: int = signal.SIGINT,
        but: Callable[[FrameType], bool] = lambda frame: False,
    ) -> None:
        self.at = 0
        self.count = 0
        self._files = {module.__file__ for module in modules}
        self._number = number
        self._but = but
        self._left = 0
        self._kill = ctypes.PyDLL(None).kill
        self._before = threading.active_count()
        faulthandler.dump_traceback_later(_SECONDS, exit=True)

    def __iter__(self) -> Iterator[int]:
        while self._left <= 0:
            self.at += 1
            self._left = self.at
            yield self.at

    def trace(self, work: Callable[[], object]) -> None:
        sys.settrace(self._trace)
        try:
            work()
        finally:
            sys.settrace(None)

    def settle(self, held: Callable[[], bool] = lambda: False) -> None:
        """Wait until no thread is left that was not there before, and nothing is ``held``."""
        deadline = time.monotonic() + 20
        while threading.active_count() > self._before or held():
            assert time.monotonic() < deadline, (self.at, threading.enumerate())
            time.sleep(0.001)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line" and not self._but(frame):
            self._left -= 1
            if self._left == 0:
                # Neither the C library's function nor unpacking looks for signals, and no further line is traced: what
                # is interrupted is the traced code, where Python itself would look next.
                sys.settrace(None)
                (_,) = map(self._kill, (os.getpid(),), (self._number,))
        return self._trace


def run_script(script: str, *arguments: str) -> int:
    """The number that ``script`` prints."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS + 10)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
