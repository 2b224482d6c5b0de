"""FNV-1a 64 and SHA-256 of the same bytes in one pass, or SHA-256 alone."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from weightwire.errors import ModelError
from weightwire.hashing import FNV_OFFSET, fnv1a64
from weightwire.ranges import FileRange

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Hashes", "hash_with_digest", "sha256_of"]

_WINDOW: Final = 1 << 20
"""Bytes hashed both ways before the next are read: they stay in the CPU's cache meanwhile."""

_CHECK_BYTES: Final = 32 << 20
_CHECK_SECONDS: Final = 0.1


class Hashes(NamedTuple):
    """``fnv1a`` is the 64-bit name in a tensor cache, ``sha256`` (32 bytes) what the content really is."""

    fnv1a: int
    sha256: bytes


def hash_with_digest(payload: Buffer | FileRange, check: Callable[[], object] | None = None) -> Hashes:
    """FNV-1a 64 and SHA-256 of a buffer, or of a range of a file, read once with ``preadv(2)`` in windows of 1 MiB.

    The GIL is free while bytes are read and hashed. ``check`` is called on this thread about every 32 MiB or 0.1 s;
    what it raises ends the hashing and is passed on. Raises ModelError for a file that has become too short or cannot
    be read, TypeError for what is no buffer.
    """
    fnv, sha = FNV_OFFSET, hashlib.sha256()

    def update(data: memoryview) -> None:
        nonlocal fnv
        fnv = fnv1a64(data, fnv)
        sha.update(data)

    _go_over(payload, update, check)
    return Hashes(fnv, sha.digest())


def sha256_of(payload: Buffer | FileRange, check: Callable[[], object] | None = None) -> bytes:
    """SHA-256 alone (32 bytes), of what has its FNV-1a 64 already; otherwise as `hash_with_digest`."""
    sha = hashlib.sha256()
    _go_over(payload, sha.update, check)
    return sha.digest()


def _go_over(
    payload: Buffer | FileRange, update: Callable[[memoryview], object], check: Callable[[], object] | None
) -> None:
    if not isinstance(payload, FileRange):
        with memoryview(payload) as whole, whole.cast("B") as view:
            _in_windows(view.nbytes, lambda start, size: view[start : start + size], update, check)
        return
    window = memoryview(bytearray(min(payload.nbytes, _WINDOW)))
    _in_windows(payload.nbytes, lambda start, size: _read(payload, start, window[:size]), update, check)


def _in_windows(
    nbytes: int,
    piece: Callable[[int, int], memoryview],
    update: Callable[[memoryview], object],
    check: Callable[[], object] | None,
) -> None:
    checked, at = time.monotonic(), 0
    for start in range(0, nbytes, _WINDOW):
        with piece(start, min(_WINDOW, nbytes - start)) as data:
            update(data)
        if check is not None and (start - at >= _CHECK_BYTES or time.monotonic() - checked >= _CHECK_SECONDS):
            check()
            checked, at = time.monotonic(), start


def _read(source: FileRange, start: int, into: memoryview) -> memoryview:
    done = 0
    while done < into.nbytes:
        at = source.offset + start + done
        try:
            got = os.preadv(source.fd, [into[done:]], at)
        except OSError as error:
            raise ModelError(f"cannot read: {error.strerror}", path=source.path, offset=at) from error
        if got == 0:
            raise ModelError(
                f"the file is shorter than when opened: the range ends at byte {source.offset + source.nbytes}",
                path=source.path,
                offset=at,
                hint="something changed the file; open the model again",
            )
        done += got
    return into
