"""Bytes by reference: where a payload lies, without reading it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FileRange"]


@dataclass(frozen=True, slots=True)
class FileRange:
    """``nbytes`` bytes from byte ``offset`` of the open file ``fd``, which its owner keeps open.

    Sent with ``sendfile(2)`` and hashed with ``pread(2)``: a file cut short under us is an error, where a mapping would
    be a SIGBUS that takes the process.
    """

    fd: int
    offset: int
    nbytes: int
    path: str = ""
