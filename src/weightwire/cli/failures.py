"""From what went wrong to an exit code and two lines that say it."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from weightwire.cli.output import StdoutClosed, StdoutFailed, note, object_, printable
from weightwire.cli.shortage import HINT, out_of_memory
from weightwire.errors import (
    AllocationError,
    CacheDirectoryError,
    CacheError,
    CacheUnavailable,
    CompletionError,
    ConfigError,
    IntegrityError,
    ModelError,
    PeerClosed,
    RdmaUnavailable,
    TransferTimeout,
    TransportError,
    VersionError,
    WeightwireError,
)
from weightwire.threads import NO_THREAD

__all__ = [
    "CONTENT",
    "ENVIRONMENT",
    "FAILED",
    "INTERRUPTED",
    "PIPE_CLOSED",
    "USAGE",
    "Failure",
    "as_failure",
    "as_usage",
    "by_signal",
    "cannot_here",
    "debug",
    "error_facts",
    "say",
]

FAILED = 1
USAGE = 2
ENVIRONMENT = 3
CONTENT = 4
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
PIPE_CLOSED = 141  # 128 + SIGPIPE


class Failure(Exception):
    """A verb ended without doing what it was asked.

    ``error`` is why, ``code`` the exit code, ``kind`` the error's name.

    It is deliberately not an OSError: click ends a program silently on the ones it takes for a closed pipe.
    """

    def __init__(self, error: BaseException, code: int, *, detail: str = "", hint: str = "", kind: str = "") -> None:
        super().__init__(detail or str(error))
        self.error = error
        self.code = code
        self.kind = kind or type(error).__name__
        self.detail = detail or getattr(error, "detail", "") or str(error) or type(error).__name__
        self.hint = hint or getattr(error, "hint", "")


def as_failure(error: Exception) -> Failure:
    """Give ``error`` the exit code that docs/configuration.md promises for it."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, click.UsageError):
        context = error.ctx
        hint = f"try '{context.command_path} --help'" if context is not None else "try 'weightwire --help'"
        return Failure(error, USAGE, detail=error.format_message(), hint=hint, kind="UsageError")
    if isinstance(error, click.ClickException):
        return Failure(error, USAGE, detail=error.format_message(), kind="UsageError")
    if isinstance(error, CacheDirectoryError):
        return Failure(error, ENVIRONMENT)
    if isinstance(error, ConfigError):
        return Failure(error, USAGE)
    if isinstance(error, IntegrityError):
        return Failure(error, CONTENT)
    if isinstance(error, (StdoutFailed, CacheUnavailable)):
        return Failure(error, ENVIRONMENT)
    if isinstance(error, CacheError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Failure(error, ENVIRONMENT)
    if isinstance(error, TransportError) and error.operation == NO_THREAD:
        return Failure(error, ENVIRONMENT)
    if isinstance(error, WeightwireError):
        # Including a ModelError: one raised before the transfer has been turned into a usage failure already.
        return Failure(error, FAILED)
    if short := out_of_memory(error):
        return Failure(error, ENVIRONMENT, detail=short, hint=HINT, kind="MemoryError")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return Failure(error, ENVIRONMENT, detail=f"{where}{error.strerror or error}")
    return Failure(
        error,
        FAILED,
        # The only texts with lines that somebody meant to be lines.
        detail=" ".join(f"internal error: {type(error).__name__}: {error}".split()),
        hint="this is a defect in weightwire; WEIGHTWIRE_DEBUG=1 shows where it happened",
        kind="InternalError",
    )


def by_signal(number: int) -> int:
    """The exit code of a verb that signal ``number`` ended, as a shell reports it."""
    return 128 + number


@contextmanager
def as_usage() -> Iterator[None]:
    """Inside: what the command line named is opened. A model that cannot be read there is the caller's mistake."""
    try:
        yield
    except ModelError as error:
        raise Failure(error, USAGE) from error
    except OSError as error:
        if isinstance(error, WeightwireError):
            raise
        raise Failure(error, USAGE, detail=f"{error.filename or 'model'}: {error.strerror or error}") from error


@contextmanager
def cannot_here(hint: str = "") -> Iterator[None]:
    """Inside: something of this machine is claimed, such as a port. Being refused is the environment's doing."""
    try:
        yield
    except (TransportError, AllocationError) as error:
        raise Failure(error, ENVIRONMENT, hint=error.hint or hint) from error
    except OSError as error:
        if isinstance(error, WeightwireError):
            raise
        failure = as_failure(error)
        raise Failure(error, ENVIRONMENT, detail=failure.detail, hint=failure.hint or hint) from error


def debug() -> bool:
    """Whether the environment asks for tracebacks (WEIGHTWIRE_DEBUG set to anything but empty or 0)."""
    return os.environ.get("WEIGHTWIRE_DEBUG", "") not in ("", "0")


def say(error: Exception, *, json: bool) -> int:
    """Report ``error`` on stderr, and with ``json`` as an object on stdout too; return its exit code."""
    failure = as_failure(error)
    if debug():
        note("".join(traceback.format_exception(failure.error)).rstrip())
    note(f"weightwire: error: {printable(failure.detail)}")
    if failure.hint:
        note(f"weightwire: hint: {printable(failure.hint)}")
    if json:
        # Where stdout is gone, the exit code and stderr have said it already.
        with suppress(StdoutClosed, StdoutFailed):
            object_({"error": error_facts(failure)})
    return failure.code


def error_facts(failure: Failure) -> dict[str, Any]:
    """The members of an error's object."""
    error = failure.error
    facts: dict[str, Any] = {
        "type": failure.kind,
        "detail": failure.detail,
        "hint": failure.hint,
        "exit_code": failure.code,
    }
    names: tuple[str, ...] = ()
    if isinstance(error, ModelError):
        names = ("path", "offset")
    elif isinstance(error, IntegrityError):
        names = ("name", "expected", "actual")
    elif isinstance(error, CacheError):
        names = ("path", "errno")
    elif isinstance(error, AllocationError):
        names = ("nbytes",)
    elif isinstance(error, CacheUnavailable):
        names = ("endpoint",)
    elif isinstance(error, VersionError):
        names = ("ours", "theirs")
    elif isinstance(error, TransferTimeout):
        names = ("phase", "elapsed", "tensor", "bytes_done")
    elif isinstance(error, PeerClosed):
        names = ("endpoint", "operation", "position", "tensor", "bytes_done")
    elif isinstance(error, CompletionError):
        names = ("endpoint", "operation", "status", "vendor_err", "tensor", "bytes_done")
    elif isinstance(error, RdmaUnavailable):
        names = ("endpoint", "operation", "errno", "reason")
    elif isinstance(error, TransportError):
        names = ("endpoint", "operation", "errno")
    return facts | {name: getattr(error, name) for name in names}
