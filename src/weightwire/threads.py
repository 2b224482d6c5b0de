"""Starting threads: where the system gives no more of them, that is its refusal and not a defect of ours."""

from __future__ import annotations

import errno
import threading
from typing import Final

from weightwire.errors import TransportError

__all__ = ["NO_THREAD", "start"]

NO_THREAD: Final = "pthread_create"
"""The ``operation`` of such an error."""


def start(thread: threading.Thread, endpoint: str = "") -> None:
    """Start ``thread``. TransportError (EAGAIN; ``endpoint`` is what the thread is for) where the system has none to
    give, pthread_create(3); the thread may not be joined then.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise TransportError(
            f"no thread can be started ({error})",
            endpoint=endpoint,
            operation=NO_THREAD,
            errno=errno.EAGAIN,
            hint="this user has as many processes and threads as allowed (see ulimit -u, or pids.max of its cgroup), "
            "or there is no memory for one more (see ulimit -v, or memory.max)",
        ) from error
