"""Bytes by reference: where a payload lies, without reading it."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Final

from weightwire.errors import ModelError

__all__ = ["SYSCALL_MAX", "FileRange", "check_open", "model_closed"]

SYSCALL_MAX: Final = 1 << 30
"""Bytes that one call asks the kernel for at most, as in the C core (csrc/stream/stream.h)."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """``nbytes`` bytes from byte ``offset`` of the open file ``fd``, which its owner keeps open.

    Sent with ``sendfile(2)`` and hashed with ``pread(2)``: a file cut short under us is an error, where a mapping would
    be a SIGBUS that takes the process.

    Unless ``dated``, its bytes may change without the file's size or times telling: they are memory, or this process
    may write to them through a mapping. What was found out about them holds for the moment only.
    """

    fd: int
    offset: int
    nbytes: int
    path: str = ""
    dated: bool = True


def model_closed(path: str, offset: int | None = None, *, doing: str = "") -> ModelError:
    """The error of whoever wants something of ``path``, at byte ``offset``, of a model whose files are closed."""
    return ModelError(
        f"{doing}: the model is closed" if doing else "the model is closed",
        path=path,
        offset=offset,
        hint="close() was called while it was in use; let what reads it end first",
    )


def check_open(source: FileRange, code: int | None, offset: int) -> None:
    """ModelError if what a read at byte ``offset`` failed with, ``code``, is that ``source`` has been closed.

    EBADF alone does not say so: it is also that of a descriptor which is not open for reading (read(2)).
    """
    if code != errno.EBADF:
        return
    try:
        os.fstat(source.fd)
    except OSError as error:
        raise model_closed(source.path, offset, doing="cannot read") from error
