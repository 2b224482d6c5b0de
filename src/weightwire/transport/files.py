"""What is asked of the kernel for files besides reading and writing."""

from __future__ import annotations

from weightwire._native import _stream

__all__ = ["write_back"]


def write_back(fd: int, offset: int, nbytes: int, *, wait: bool = False) -> None:
    """Have bytes ``offset`` to ``offset + nbytes`` of a file written to the disk now, not when memory runs short.

    With ``wait`` they are there afterwards, as far as the file system says; what else the file needs (its size, say) is
    not: that takes an fsync. Only a hint (sync_file_range(2)); never raises. The GIL is free meanwhile.
    """
    _stream.write_back(fd, offset, nbytes, wait)
