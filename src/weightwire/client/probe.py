"""The edges of a tensor, which tell whether a cache has filled it, or only a part of it, or nothing.

Stock servers look a cached tensor up by name alone. A file that is empty or was cut short is a hit; what it lacks stays
as it was (docs/protocol.md, section 9).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from weightwire.model.reading import read_bytes
from weightwire.ranges import FileRange

__all__ = ["EDGE", "Edge", "edges_of"]

EDGE: Final = 128
"""Bytes at either end."""

_INVERT: Final = bytes(255 - value for value in range(256))


class Edge(NamedTuple):
    """Bytes at an end of a tensor: their ``offset`` in it, and what they must be."""

    offset: int
    expected: bytes

    @property
    def inverse(self) -> bytes:
        """The same number of bytes, each of them wrong."""
        return self.expected.translate(_INVERT)


def edges_of(payload: FileRange | memoryview) -> tuple[Edge, ...]:
    """The last and the first `EDGE` bytes of ``payload``; of one with less than twice as many, all of them once.

    A file is read, not mapped. Raises ModelError where it no longer has the bytes.
    """
    size = payload.nbytes
    if size <= 2 * EDGE:
        return (Edge(0, _bytes_at(payload, 0, size)),) if size else ()
    return Edge(size - EDGE, _bytes_at(payload, size - EDGE, EDGE)), Edge(0, _bytes_at(payload, 0, EDGE))


def _bytes_at(payload: FileRange | memoryview, offset: int, nbytes: int) -> bytes:
    if isinstance(payload, memoryview):
        return bytes(payload.cast("B")[offset : offset + nbytes])
    return read_bytes(payload, offset, nbytes)
