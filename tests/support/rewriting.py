"""A file that is written to in place, with its date set back."""

from __future__ import annotations

import os
from pathlib import Path


def rewrite(path: Path, offset: int = -8) -> None:
    """Put other bytes at ``offset`` (negative: from the end) and set the time of modification back.

    Some tools of synchronization do so. When this returns, only the time of change differs.
    """
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # time stamps are as coarse as the kernel's clock
        with path.open("r+b") as file:
            file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
            file.write(b"rewrites")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
