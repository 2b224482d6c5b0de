"""Work done in a forked child."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable


def in_a_fork(work: Callable[[], object], seconds: int = 60) -> int:
    """Run ``work`` in a forked child; its exit code, 0 unless something was raised (which stderr then tells)."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
