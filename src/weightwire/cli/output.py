"""What a verb says: results on stdout, everything else on stderr, both safe for whoever reads them."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from weightwire.errors import WeightwireError

__all__ = [
    "StdoutClosed",
    "StdoutFailed",
    "check_stdout",
    "counted",
    "gib_per_second",
    "human_bytes",
    "line",
    "note",
    "object_",
    "occupy_standard_descriptors",
    "printable",
]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class StdoutClosed(Exception):
    """Whoever read our standard output stopped reading, as ``head`` does. Not an error."""


class StdoutFailed(WeightwireError):
    """Standard output cannot be written, for another reason than a reader that left."""


def printable(text: str) -> str:
    """Make ``text`` fit for one line of a terminal: control characters and lone surrogates become escapes.

    Tensor names and metadata come from files and peers; a name must not be able to move a cursor or start a new line.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in text
    )


def counted(number: int, one: str, more: str) -> str:
    """``number`` and the word for that many: ``counted(1, "entry", "entries")`` is ``"1 entry"``."""
    return f"{number} {one if number == 1 else more}"


def human_bytes(nbytes: int) -> str:
    """Bytes in the unit that suits them, such as ``"241.4 MiB"``."""
    if nbytes < 1024:
        return counted(nbytes, "byte", "bytes")
    value = nbytes / 1024
    for unit in _UNITS[1:-1]:
        # What would be rounded up to 1024.0 is one of the next unit.
        if round(value, 1) < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def gib_per_second(nbytes: int, seconds: float) -> float:
    """``nbytes`` per ``seconds`` in GiB/s, to a thousandth; 0.0 when no time passed."""
    return round(nbytes / seconds / 2**30, 3) if seconds > 0 else 0.0


def occupy_standard_descriptors() -> None:
    """Open /dev/null where the process was started without stdin, stdout or stderr (``>&-``).

    Otherwise the next file or socket would take the number, and with it what somebody writes to "stderr".
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            # The lower numbers are taken, so it is this one.
            os.set_inheritable(null, True)


def check_stdout() -> None:
    """Raise StdoutFailed if there is no stdout, before work is done whose result nobody could be told."""
    # The interpreter's way to say that it was started without.
    if sys.stdout is None:
        raise StdoutFailed(
            "standard output is closed",
            hint="redirect it to /dev/null instead, if nobody is to read it",
        )


def line(text: str = "") -> None:
    """Write one line to stdout and flush it, so that a reader has it at once.

    Raises StdoutClosed when the reader has left, StdoutFailed when the line cannot be written (a full disk).
    """
    check_stdout()
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except UnicodeEncodeError:
        # A terminal that cannot show a name still gets the line, with escapes in it.
        encoding = getattr(sys.stdout, "encoding", None) or "ascii"
        line(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:
        _discard_stdout()
        raise StdoutClosed from None
    except OSError as error:
        _discard_stdout()
        raise StdoutFailed(f"standard output cannot be written: {error.strerror or error}") from error


def object_(value: Mapping[str, Any]) -> None:
    """Write one JSON object to stdout, on one line."""
    line(json.dumps(_plain(value), allow_nan=False))


def note(text: str) -> None:
    """Write one line to stderr. A stderr that is gone, or never was, is no reason to stop."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except UnicodeEncodeError:
        note(text.encode("ascii", "backslashreplace").decode("ascii"))
    except (OSError, ValueError):
        pass


def _plain(value: Any) -> Any:
    """``value`` as JSON knows it: JSON has neither infinities nor bytes, and metadata may hold both."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "backslashreplace")
    return str(value)


def _discard_stdout() -> None:
    """Point stdout at nothing, or the interpreter reports the same failure again when it flushes at exit."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass
