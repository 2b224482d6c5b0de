"""File systems of the tests' own: small ones, for what happens when they are full, and one whose files share blocks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
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


@contextlib.contextmanager
def sharing_disk(place: Path, mib: int) -> Iterator[Path]:
    """Inside: ``place`` is a file system (btrfs, in a file beside it) of ``mib`` MiB whose files can share blocks."""
    if os.geteuid() or shutil.which("mkfs.btrfs") is None:
        do_without("a file system whose files can share blocks", "it takes root and mkfs.btrfs")
    image = place.with_suffix(".img")
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(mib << 20)
    subprocess.run(["mkfs.btrfs", "-q", image], capture_output=True, check=True)
    done = subprocess.run(["mount", "-o", "loop", image, place], capture_output=True, text=True, check=False)
    if done.returncode:
        # Not every kernel has btrfs, nor every container loop devices: nothing that could be installed.
        pytest.skip(f"no btrfs can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
        image.unlink()
