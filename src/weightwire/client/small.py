"""Small payloads of files, read many at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from weightwire.errors import ModelError
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
        wanted = end - start
        got = 0
        while got < wanted:
            try:
                count = os.preadv(first.fd, [self._memory[got:wanted]], start + got)
            except OSError as error:
                raise ModelError(f"cannot read: {error.strerror}", path=first.path, offset=start + got) from error
            if count == 0:
                raise ModelError(
                    "file is shorter than when opened",
                    path=first.path,
                    offset=start + got,
                    hint="something changed the file; open the model again",
                )
            got += count
        self._fd, self._start, self._end = first.fd, start, end
