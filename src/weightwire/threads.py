"""Starting threads: not to be interrupted, and where the system gives no more of them, that is its refusal and not a
defect of ours.
"""

from __future__ import annotations

import errno
import signal
import threading
from typing import Final

from weightwire.errors import TransportError

__all__ = ["NO_THREAD", "begin", "start"]

NO_THREAD: Final = "pthread_create"
"""The ``operation`` of such an error."""


_HEARD: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOMENT: Final = 1.0


def begin(thread: threading.Thread) -> None:
    """Start ``thread``. What a signal's handler raises comes when it has been started, and not in the middle, where it
    would leave a lock taken that the new thread waits for. RuntimeError as of `threading.Thread.start`.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()  # handlers run on the main thread alone
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    run, started = thread.run, threading.Lock()
    started.acquire()

    def unblocked() -> None:
        # Not before it has been started: a signal that waits would be given to this thread, and be handled at once.
        started.acquire(timeout=_MOMENT)
        # The mask is inherited, by what this thread starts as well (pthread_sigmask(3)).
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        del thread.run
        run()

    thread.run = unblocked  # type: ignore[method-assign]
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        thread.start()
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        finally:
            started.release()


def start(thread: threading.Thread, endpoint: str = "") -> None:
    """Start ``thread``. TransportError (EAGAIN; ``endpoint`` is what the thread is for) where the system has none to
    give, pthread_create(3); the thread may not be joined then.
    """
    try:
        begin(thread)
    except RuntimeError as error:
        raise TransportError(
            f"no thread can be started ({error})",
            endpoint=endpoint,
            operation=NO_THREAD,
            errno=errno.EAGAIN,
            hint="this user has as many processes and threads as allowed (see ulimit -u, or pids.max of its cgroup), "
            "or there is no memory for one more (see ulimit -v, or memory.max)",
        ) from error
