"""Ranges of files, read by position into memory of the caller's: a mapping of a file that was cut short kills."""

from __future__ import annotations

import os

from weightwire.errors import ModelError
from weightwire.ranges import SYSCALL_MAX, FileRange, check_open

__all__ = ["read_bytes", "read_range"]


def read_range(payload: FileRange, position: int, into: memoryview) -> memoryview:
    """Fill ``into`` from byte ``position`` of ``payload`` on, with ``preadv(2)``, and return it.

    Raises ModelError, with the place in the file, where it has become too short or cannot be read.
    """
    got = 0
    while got < into.nbytes:
        at = payload.offset + position + got
        try:
            count = os.preadv(payload.fd, [into[got : got + SYSCALL_MAX]], at)
        except OSError as error:
            check_open(payload, error.errno, at)
            raise ModelError(f"cannot read: {error.strerror}", path=payload.path, offset=at) from error
        if count == 0:
            raise ModelError(
                "the file is shorter than when opened",
                path=payload.path,
                offset=at,
                hint="something changed the file; open the model again",
            )
        got += count
    return into


def read_bytes(payload: FileRange, position: int, nbytes: int) -> bytes:
    """``nbytes`` bytes from byte ``position`` of ``payload``. Raises as `read_range` does."""
    data = bytearray(nbytes)
    with memoryview(data) as into:
        read_range(payload, position, into)
    return bytes(data)
