"""Small payloads of files, read many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from weightwire.model.reading import read_range
from weightwire.ranges import FileRange

__all__ = ["SMALL", "WINDOW", "SmallReader"]

SMALL: Final = 64 * 1024
"""Bytes; a payload below this costs more in calls than in bytes."""

WINDOW: Final = 256 * 1024
"""Bytes read at once, as far as the small payloads that follow lie in them."""


class SmallReader:
    """The bytes of small ranges, in the order of ``payloads``, out of one window that one read fills for many of them.

    `fill` overwrites what earlier views show.
    """

    def __init__(self, payloads: Sequence[FileRange | memoryview]) -> None:
        self._payloads = payloads
        self._memory: memoryview | None = None
        self._fd = -1
        self._start = 0
        self._end = 0

    def get(self, payload: FileRange) -> memoryview | None:
        """The bytes of ``payload`` if they are in the window."""
        start = payload.offset - self._start
        if payload.fd != self._fd or start < 0 or payload.offset + payload.nbytes > self._end or self._memory is None:
            return None
        return self._memory[start : start + payload.nbytes]

    def fill(self, index: int) -> None:
        """Read payload number ``index`` (a small FileRange) and the small ones after it that lie within the window.

        Raises ModelError if the file has become too short or cannot be read.
        """
        first = self._payloads[index]
        assert isinstance(first, FileRange)
        start, end = first.offset, first.offset + first.nbytes
        for at in range(index + 1, len(self._payloads)):
            following = self._payloads[at]
            if (
                not isinstance(following, FileRange)
                or following.fd != first.fd
                or following.nbytes >= SMALL
                or following.offset < start
                or following.offset + following.nbytes > start + WINDOW
            ):
                break
            end = max(end, following.offset + following.nbytes)
        if self._memory is None:
            self._memory = memoryview(bytearray(WINDOW))
        self._fd = -1
        read_range(first, start - first.offset, self._memory[: end - start])
        self._fd, self._start, self._end = first.fd, start, end
