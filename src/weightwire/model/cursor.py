"""A reading position in a file header, with a bounded window of it in memory."""

from __future__ import annotations

import struct
from typing import Final

from weightwire.errors import ModelError
from weightwire.model.base import ModelFile

__all__ = ["HeaderCursor"]

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_FIRST_WINDOW: Final = 64 * 1024
_LAST_WINDOW: Final = 1024 * 1024


class HeaderCursor:
    """Reads little-endian fields one after another; what it cannot read is a ModelError with the field's offset.

    The window starts at 64 KiB and doubles to 1 MiB, so that a small header costs one small read and a large one few.
    Lengths are compared with the file's size before anything is read or allocated.
    """

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._base = 0  # the file offset of the window's first byte
        self._window = b""
        self._at = 0  # the position in the window; it may lie past its end after a skip
        self._next_window = _FIRST_WINDOW

    @property
    def offset(self) -> int:
        """The position, in bytes from the file's start."""
        return self._base + self._at

    @property
    def remaining(self) -> int:
        """Bytes between the position and the file's end."""
        return self._file.size - self.offset

    def error(self, detail: str, *, offset: int | None = None, hint: str = "") -> ModelError:
        """A ModelError about this file, at ``offset`` or at the position."""
        return ModelError(detail, path=self._file.path, offset=self.offset if offset is None else offset, hint=hint)

    def truncated(self, what: str, needed: int, *, offset: int | None = None) -> ModelError:
        """The ModelError for a file that ends before ``what``."""
        start = self.offset if offset is None else offset
        return self.error(
            f"the file ends inside {what}: {needed} bytes needed, {max(self._file.size - start, 0)} left",
            offset=start,
            hint="the file is truncated or damaged; fetch it again",
        )

    def _need(self, nbytes: int, what: str) -> int:
        """Make the next ``nbytes`` bytes lie in the window; returns their index in it and moves past them."""
        at = self._at
        if at + nbytes > len(self._window):
            start = self._base + at
            if nbytes > self._file.size - start:
                raise self.truncated(what, nbytes)
            # Bytes the old window still has are read again: that is at most one field.
            self._window = self._file.read_at(start, min(max(nbytes, self._next_window), self._file.size - start))
            self._next_window = min(2 * self._next_window, _LAST_WINDOW)
            self._base, self._at, at = start, 0, 0
        self._at = at + nbytes
        return at

    def take(self, nbytes: int, what: str) -> bytes:
        """The next ``nbytes`` bytes."""
        at = self._need(nbytes, what)
        return self._window[at : at + nbytes]

    def u32(self, what: str) -> int:
        """The next four bytes as an unsigned number."""
        at = self._need(4, what)
        value: int = _U32.unpack_from(self._window, at)[0]
        return value

    def u64(self, what: str) -> int:
        """The next eight bytes as an unsigned number."""
        at = self._need(8, what)
        value: int = _U64.unpack_from(self._window, at)[0]
        return value

    def skip(self, nbytes: int, what: str) -> None:
        """Move past ``nbytes`` bytes without reading them."""
        if nbytes > self.remaining:
            raise self.truncated(what, nbytes)
        self._at += nbytes

    def skip_strings(self, count: int, what: str) -> None:
        """Move past ``count`` strings, each a 64-bit length and that many bytes, without decoding them."""
        if 8 * count > self.remaining:
            raise self.truncated(what, 8 * count)
        unpack, size = _U64.unpack_from, self._file.size
        while count:
            at = start = self._need(8, what)
            window = self._window
            last = len(window) - 8
            while count and at <= last:
                start = at
                at += 8 + unpack(window, at)[0]
                count -= 1
            self._at = start
            if self._base + at > size:
                raise self.truncated(what, at - start)
            self._at = at
