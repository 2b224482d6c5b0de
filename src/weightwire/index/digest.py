"""FNV-1a 64 and BLAKE3 of the same bytes in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, NamedTuple

from blake3 import blake3

from weightwire.hashing import FNV_OFFSET, fnv1a64, fnv1a64_many
from weightwire.model.reading import read_range
from weightwire.ranges import FileRange

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["DIGEST_BYTES", "Hashes", "hash_together", "hash_with_digest"]

DIGEST_BYTES: Final = 32

_WINDOW: Final = 512 << 10
"""Bytes hashed both ways before the next are read: they stay in the CPU's cache meanwhile."""

_CHECK_BYTES: Final = 32 << 20
_CHECK_SECONDS: Final = 0.1


class Hashes(NamedTuple):
    """``fnv1a`` is the 64-bit name in a tensor cache, ``blake3`` (32 bytes) tells what the content really is; it is
    empty where it was not wanted, and such hashes are no entry of an index.
    """

    fnv1a: int
    blake3: bytes


def hash_with_digest(
    payload: Buffer | FileRange,
    check: Callable[[], object] | None = None,
    *,
    digest: bool = True,
    ahead: Callable[[int], object] | None = None,
) -> Hashes:
    """FNV-1a 64 and BLAKE3 of a buffer, or of a range of a file, read once with ``preadv(2)`` in windows of 512 KiB.

    The GIL is free while bytes are read and hashed. ``check`` is called on this thread about every 32 MiB or 0.1 s;
    what it raises ends the hashing and is passed on. Without ``digest`` there is no BLAKE3. ``ahead`` is called with
    the position of each window before that is read. Raises ModelError for a file that has become too short or cannot
    be read, TypeError for what is no buffer.
    """
    fnv, strong = FNV_OFFSET, blake3()
    for data in _windows(payload, check, ahead):
        fnv = fnv1a64(data, fnv)
        if digest:
            strong.update(data)
    return Hashes(fnv, strong.digest() if digest else b"")


def hash_together(
    payloads: Sequence[Buffer | FileRange], digest: Sequence[bool], check: Callable[[], object] | None = None
) -> list[Hashes]:
    """`hash_with_digest` of several payloads, each read once, a window of each at a time: where the CPU has no vectors
    for one, the FNV-1a 64 of several is sooner done together. ``digest`` says of which BLAKE3 is wanted, too.
    """
    fnv = [FNV_OFFSET] * len(payloads)
    strong = [blake3() if wanted else None for wanted in digest]
    with ExitStack() as stack:
        windows = {}
        for number, payload in enumerate(payloads):
            windows[number] = of_one = _windows(payload, check, None)
            stack.callback(of_one.close)
        while windows:
            at_hand = {number: data for number, each in windows.items() if (data := next(each, None)) is not None}
            windows = {number: windows[number] for number in at_hand}
            values = fnv1a64_many(at_hand.values(), [fnv[number] for number in at_hand])
            for (number, data), value in zip(at_hand.items(), values, strict=True):
                fnv[number] = value
                if (hasher := strong[number]) is not None:
                    hasher.update(data)
    return [Hashes(value, b"" if each is None else each.digest()) for value, each in zip(fnv, strong, strict=True)]


def _windows(
    payload: Buffer | FileRange, check: Callable[[], object] | None, ahead: Callable[[int], object] | None
) -> Generator[memoryview, None, None]:
    """The bytes, in order; each window is good until the next is asked for."""
    if isinstance(payload, FileRange):
        window = memoryview(bytearray(min(payload.nbytes, _WINDOW)))
        nbytes = payload.nbytes
    else:
        window = memoryview(payload)
        if nbytes := window.nbytes:  # a view with a zero in its shape cannot be cast
            window = window.cast("B")
    checked, at = time.monotonic(), 0
    with window:
        for start in range(0, nbytes, _WINDOW):
            size = min(_WINDOW, nbytes - start)
            if isinstance(payload, FileRange):
                if ahead is not None:
                    ahead(start)
                with window[:size] as data:
                    yield read_range(payload, start, data)
            else:
                with window[start : start + size] as data:
                    yield data
            if check is not None and (start - at >= _CHECK_BYTES or time.monotonic() - checked >= _CHECK_SECONDS):
                check()
                checked, at = time.monotonic(), start
