"""File systems that are small, for what happens when they are full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from support.require import do_without


@contextlib.contextmanager
def disk_of(place: Path, mib: int) -> Iterator[Path]:
    """Inside: ``place`` is a file system of ``mib`` MiB (tmpfs). Whoever uses it has to be gone at the end."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0777", "tmpfs", str(place)]
    if os.geteuid():
        do_without("a small file system", "mounting one needs root")
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        do_without("a small file system", done.stderr.strip())
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
