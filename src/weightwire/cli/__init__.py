"""The command line: ``weightwire VERB ...``.

Results go to stdout; progress, logs and errors to stderr. docs/configuration.md lists options, variables and exit
codes.
This package is the only place that imports click and rich. It imports them, and all else that takes time, late: before
`main` runs, Ctrl-C is a traceback.
"""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130
_ENVIRONMENT = 3
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

try:
    import signal
except KeyboardInterrupt:
    sys.exit(_INTERRUPTED)

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line of this process, and end the process with its exit code (docs/configuration.md)."""
    # Who ignores SIGINT, as a shell's background job does, goes on ignoring it.
    catching = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if catching:
        # An exception could be raised anywhere in somebody else's import, and be lost there.
        signal.signal(signal.SIGINT, _leave)
    from weightwire.cli.shortage import HINT, out_of_memory

    try:
        from weightwire.cli.root import root
    except (ImportError, MemoryError) as error:
        short = out_of_memory(error)
        if not short:
            raise
        os.write(2, f"weightwire: error: {short}\nweightwire: hint: {HINT}\n".encode("utf-8", "replace"))
        sys.exit(_ENVIRONMENT)
    try:
        if catching:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(root())
    except KeyboardInterrupt:
        # Before root() catches it, or once more while it reports the first.
        sys.exit(_INTERRUPTED)
    finally:
        if catching:
            # All has been done and reported by then. The interpreter gives signals back to the system before it is
            # through, and the process would die of Ctrl-C.
            import atexit

            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process at once: nothing has begun, so there is nothing to clean up."""
    try:
        os.write(2, b"weightwire: interrupted\n")
    finally:
        os._exit(_INTERRUPTED)
