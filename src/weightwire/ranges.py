"""Bytes by reference: where a payload lies, without reading it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["SYSCALL_MAX", "FileRange"]

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
