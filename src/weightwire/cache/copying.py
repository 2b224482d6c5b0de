"""An entry made from bytes that lie in a file already: cloned, copied by the kernel, or read and written."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from typing import Final, Self

from weightwire.cache.store import TensorCache
from weightwire.cache.writing import CacheWriter
from weightwire.model.reading import read_range
from weightwire.ranges import FileRange
from weightwire.transport.files import write_back

__all__ = ["CopyingWriter", "StrictCache", "copy_range"]

_FICLONERANGE: Final = 0x4020940D  # ioctl_ficlonerange(2): _IOW(0x94, 13, struct file_clone_range)
_PIECE: Final = 8 << 20
"""Bytes the kernel copies at a time: a look around in between."""

_SYNC_STEP: Final = 32 << 20
_WINDOW: Final = 1 << 20
_CANNOT: Final = frozenset(
    {
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.EXDEV,
        errno.EINVAL,
        errno.ENOTTY,
        errno.EPERM,
        errno.EBADF,
        errno.ETXTBSY,
        errno.EIO,
        errno.EISDIR,
    }
)
"""How copy_file_range(2) and FICLONERANGE say that these files or file systems do not have it; after EIO, reading and
writing tells which side it was."""


class StrictCache(TensorCache):
    """A cache whose writers raise OSError where an entry cannot be stored, for those whose whole work it is."""

    def lost(self, what: str, error: OSError) -> None:
        """Raise ``error``."""
        raise error


class CopyingWriter(CacheWriter):
    """A `CacheWriter` that takes its content from a payload and can tell what it hashes to, as it lies on the disk."""

    nbytes = 0

    def __enter__(self) -> Self:
        return self

    def fill(self, payload: FileRange | memoryview, check: Callable[[], object], tell: Callable[[int], object]) -> int:
        """Make the content that of ``payload``; returns how many bytes are shared with its file (cloned).

        ``check`` is called every few MiB, ``tell`` with the bytes done since the last time. Raises OSError where the
        entry cannot be written, ModelError where the payload's file cannot be read or is too short now.
        """
        if isinstance(payload, FileRange):
            cloned = copy_range(payload, self._fd, check, tell)
            self.nbytes = payload.nbytes
            return cloned
        for start in range(0, payload.nbytes, _PIECE):
            piece = payload[start : start + _PIECE]
            self.write(piece)
            check()
            tell(piece.nbytes)
        self.nbytes = payload.nbytes
        return 0

    def put_down(self, check: Callable[[], object]) -> None:
        """Have what was written on the disk, but for what only an fsync brings there: in steps, each with a ``check``
        before, because an fsync of all of it cannot be stopped.
        """
        for start in range(0, self.nbytes, _SYNC_STEP):
            check()
            write_back(self._fd, start, _SYNC_STEP, wait=True)

    def content(self) -> FileRange:
        """What was written, to be hashed; valid until `commit` or `abort`."""
        return FileRange(self._fd, 0, self.nbytes, self._temp)


def copy_range(source: FileRange, target: int, check: Callable[[], object], tell: Callable[[int], object]) -> int:
    """Copy ``source`` to the start of the file ``target``, in the cheapest way there is; returns the bytes cloned.

    Sharing the blocks (FICLONERANGE) needs both files on one file system that can, and a range that begins where a
    block does; copy_file_range(2) lets the kernel, or the server of a network file system, do it. Raises as
    `CopyingWriter.fill` says.
    """
    done = cloned = _clone(source, target)
    tell(done)
    while done < source.nbytes:
        check()
        try:
            got = os.copy_file_range(source.fd, target, min(_PIECE, source.nbytes - done), source.offset + done, done)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            break
        if not got:
            break  # at the end of the file, or a file system that cannot and does not say so
        done += got
        tell(got)
    if done < source.nbytes:
        _read_and_write(source, target, done, check, tell)
    return cloned


def _clone(source: FileRange, target: int) -> int:
    """Share as many whole blocks from the start of ``source`` as the file system can; returns their bytes."""
    status = os.fstatvfs(source.fd)
    block = max(status.f_frsize, 4096)
    whole = source.nbytes - source.nbytes % block
    if source.offset % block or not whole:
        return 0
    request = struct.pack("=qQQQ", source.fd, source.offset, whole, 0)
    try:
        fcntl.ioctl(target, _FICLONERANGE, request)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return 0
    return whole


def _read_and_write(
    source: FileRange, target: int, done: int, check: Callable[[], object], tell: Callable[[int], object]
) -> None:
    window = memoryview(bytearray(min(_WINDOW, source.nbytes - done)))
    while done < source.nbytes:
        check()
        got = min(window.nbytes, source.nbytes - done)
        read_range(source, done, window[:got])
        put = 0
        while put < got:
            put += os.pwrite(target, window[put:got], done + put)
        done += got
        tell(got)
