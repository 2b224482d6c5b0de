"""FNV-1a 64 and SHA-256 of the same bytes in one pass."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from weightwire.hashing import FNV_OFFSET, fnv1a64
from weightwire.model.reading import read_range
from weightwire.ranges import FileRange

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Hashes", "hash_with_digest"]

_WINDOW: Final = 1 << 20
"""Bytes hashed both ways before the next are read: they stay in the CPU's cache meanwhile."""

_CHECK_BYTES: Final = 32 << 20
_CHECK_SECONDS: Final = 0.1


class Hashes(NamedTuple):
    """``fnv1a`` is the 64-bit name in a tensor cache, ``sha256`` (32 bytes) what the content really is; it is empty
    where nobody had time to compute it.
    """

    fnv1a: int
    sha256: bytes


def hash_with_digest(
    payload: Buffer | FileRange,
    check: Callable[[], object] | None = None,
    digest: Callable[[], bool] | None = None,
    *,
    ahead: Callable[[int], object] | None = None,
) -> Hashes:
    """FNV-1a 64 and SHA-256 of a buffer, or of a range of a file, read once with ``preadv(2)`` in windows of 1 MiB.

    The GIL is free while bytes are read and hashed. ``check`` is called on this thread about every 32 MiB or 0.1 s;
    what it raises ends the hashing and is passed on. Where ``digest`` is given it is asked before each window, and once
    it says False the SHA-256 is given up and left empty. ``ahead`` is called with the position of each window before
    that is read. Raises ModelError for a file that has become too short or cannot be read, TypeError for what is no
    buffer.
    """
    fnv, sha = FNV_OFFSET, hashlib.sha256()
    wanted = True

    def update(data: memoryview) -> None:
        nonlocal fnv, wanted
        fnv = fnv1a64(data, fnv)
        wanted = wanted and (digest is None or digest())
        if wanted:
            sha.update(data)

    if not isinstance(payload, FileRange):
        with memoryview(payload) as whole, whole.cast("B") as view:
            _in_windows(view.nbytes, lambda start, size: view[start : start + size], update, check)
        return Hashes(fnv, sha.digest() if wanted else b"")
    window = memoryview(bytearray(min(payload.nbytes, _WINDOW)))

    def piece(start: int, size: int) -> memoryview:
        if ahead is not None:
            ahead(start)
        return read_range(payload, start, window[:size])

    _in_windows(payload.nbytes, piece, update, check)
    return Hashes(fnv, sha.digest() if wanted else b"")


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
