"""Bytes by reference: where a payload lies, without reading it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FileRange"]


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
