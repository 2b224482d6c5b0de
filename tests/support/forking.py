"""Work in a forked copy of the test's process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

__all__ = ["in_a_fork"]


def in_a_fork(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked child; its exit code, 0 unless something was raised."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
