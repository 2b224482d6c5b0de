"""Which file this is, and whether a later write to it would show."""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple

__all__ = ["FileIdentity", "identity_of"]

_RACY_NS: Final = 2_000_000_000
"""Coarsest time stamp of a file system in use (FAT: 2 s): two writes within it may carry the same one."""


class FileIdentity(NamedTuple):
    """What tells a file and its content from others: stat(2)'s device, inode, size (bytes) and times (ns).

    ``taken_ns`` is when it was looked at (ns of the wall clock). It is no part of the identity: see `same`.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    taken_ns: int = 0

    def same(self, other: FileIdentity) -> bool:
        """Whether both are the same file with the same content, as far as stat(2) can tell."""
        return self[:5] == other[:5]

    @property
    def settled(self) -> bool:
        """Whether a write after this look would have changed the identity.

        Not so while the last change lies within the coarseness of time stamps. The time of a change (ctime) is set by
        the kernel alone; one in the future comes from a clock that is not this one, and says nothing.
        """
        if self.ctime_ns > self.taken_ns - _RACY_NS:
            return False
        return abs(self.taken_ns - self.mtime_ns) > _RACY_NS


def identity_of(fd: int) -> FileIdentity:
    """The identity of the open file ``fd``, now. OSError as fstat(2) has it."""
    # The clock first: read after it, the times could look older than they were.
    now = time.time_ns()
    found = os.fstat(fd)
    return FileIdentity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, now)
