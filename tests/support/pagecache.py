"""What of a file the page cache holds, by mincore(2)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from support.require import do_without

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]

PAGE = mmap.PAGESIZE


def resident(path: Path) -> list[bool]:
    """For each page of the file, whether it is in memory."""
    nbytes = os.stat(path).st_size
    pages = -(-nbytes // PAGE)
    fd = os.open(path, os.O_RDONLY)
    try:
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        found = ctypes.create_string_buffer(pages)
        try:
            assert _libc.mincore(address, nbytes, found) == 0, os.strerror(ctypes.get_errno())
        finally:
            _libc.munmap(address, nbytes)
    finally:
        os.close(fd)
    return [bool(state & 1) for state in found.raw[:pages]]


def share(path: Path, offset: int = 0, nbytes: int | None = None) -> float:
    """How much of a range of the file is in memory, from 0 to 1."""
    pages = resident(path)
    end = os.stat(path).st_size if nbytes is None else offset + nbytes
    inside = pages[offset // PAGE : -(-end // PAGE)]
    return sum(inside) / len(inside)


def cache(path: Path) -> None:
    """Bring all of the file into memory, written to the disk: what is not cannot be dropped."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        at = 0
        while part := os.pread(fd, 1 << 20, at):
            at += len(part)
    finally:
        os.close(fd)


def need_droppable(folder: Path) -> None:
    """Do without the test where files in ``folder`` have no page cache apart from themselves (tmpfs, ramfs)."""
    path = folder / "droppable"
    path.write_bytes(bytes(1 << 20))
    cache(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    left = share(path)
    path.unlink()
    if left > 0.5:
        do_without("a file system on a disk for temporary files", "pages of its files cannot be dropped")


@contextlib.contextmanager
def one_processor() -> Iterator[None]:
    """Inside: this thread, and those it starts, run on one processor, so that a packet's pages are free once it has
    been received. Linux hands packets back to the processor that sent them, which keeps up to 64 of them, and the
    pages they held, until it receives another (the kernel's Documentation/admin-guide/sysctl/net.rst, skb_defer_max).
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
