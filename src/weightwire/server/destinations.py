"""Where weights end up: plain host memory, or whatever an embedder puts behind `Destination`."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from weightwire.transport.memory import HostRegion

__all__ = ["Destination", "HostMemory"]

_FILL_PIECE: Final = 1 << 20


class Destination(ABC):
    """``nbytes`` bytes of somebody's memory, behind a write hook. Derive from it, and pass the class (or a callable
    ``(nbytes, device) -> Destination``) as ``Server(destination=…)``.

    The server calls `write` for every byte a client writes: exactly once, in the order in which it comes, in pieces
    of any size, from the thread that serves the client, and never for two pieces of one buffer at once. (One exception
    to the order: the pieces of a COPY_TENSOR that moves a tensor up within one buffer, onto part of itself, come last
    piece first, as each is read before it is overwritten.) It calls `read` for what the client reads back and `close`
    once, from any thread, when nobody needs the buffer any more. An exception from `write`, `read` or `fill` ends that
    client. A derived class that has an ``__init__`` calls this one's.
    """

    def __init__(self, nbytes: int, device: int = 0) -> None:
        if nbytes < 0:
            raise ValueError(f"a destination cannot have {nbytes} bytes")
        self.nbytes = nbytes
        self.device = device

    @abstractmethod
    def write(self, offset: int, view: memoryview) -> None:
        """Take the bytes of ``view`` (read-only, one-dimensional, valid only during the call) at byte ``offset``."""

    @abstractmethod
    def read(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` (writable, one-dimensional) with the bytes from byte ``offset`` on."""

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """Set ``nbytes`` bytes from byte ``offset`` on to ``value`` (0 to 255). By default through `write`, in
        pieces.
        """
        piece = memoryview(bytes((value,)) * min(nbytes, _FILL_PIECE))
        end = offset + nbytes
        while offset < end:
            step = min(end - offset, _FILL_PIECE)
            self.write(offset, piece[:step])
            offset += step

    def close(self) -> None:  # noqa: B027 - optional to override
        """Give the memory back. By default nothing."""


class _Region(HostRegion):
    """A region that can be referred to weakly."""


class HostMemory(Destination):
    """Anonymous memory in huge pages: what a server uses unless told otherwise.

    Only this very class is written to directly. Of a class derived from it nobody knows what `write` does besides, so
    it is called like any other hook, by `fill` too. Raises MemoryError if the system has no room for ``nbytes``.
    """

    def __init__(self, nbytes: int, device: int = 0) -> None:
        super().__init__(nbytes, device)
        self._region: _Region | None = _Region(nbytes)
        self._view: memoryview | None = memoryview(self._region).cast("B")
        self._pristine = True

    @property
    def region(self) -> HostRegion:
        """The mapping itself. ValueError after `close`."""
        if self._region is None:
            raise ValueError("this memory has been given back")
        return self._region

    def window(self, offset: int, nbytes: int) -> memoryview:
        """The bytes themselves, to be written to; keeps the memory alive as long as it exists.

        ValueError outside the memory or after `close`.
        """
        self._pristine = False
        return self._slice(offset, nbytes)

    def look(self, offset: int, nbytes: int) -> memoryview:
        """Like `window`, but read-only."""
        return self._slice(offset, nbytes).toreadonly()

    def _slice(self, offset: int, nbytes: int) -> memoryview:
        if self._view is None:
            raise ValueError("this memory has been given back")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"[{offset}, {offset + nbytes}) is not within {self.nbytes} bytes of memory")
        return self._view[offset : offset + nbytes]

    def write(self, offset: int, view: memoryview) -> None:
        """Copy ``view`` to byte ``offset``."""
        self.window(offset, view.nbytes)[:] = view

    def read(self, offset: int, view: memoryview) -> None:
        """Copy the bytes from byte ``offset`` on into ``view``."""
        view[:] = self._slice(offset, view.nbytes)

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """Set bytes to ``value``. Zeros into memory that nothing was written to cost nothing: it is zero already.

        A derived class that has a `write` of its own gets them all through that.
        """
        if type(self).write is not HostMemory.write:
            super().fill(offset, nbytes, value)
            return
        if self._pristine and value == 0:
            return
        self.window(offset, nbytes).release()  # checks the bounds
        self.region.fill(offset, nbytes, value)

    def close(self) -> None:
        """Let go of the memory; it is unmapped with the last view of it (a tensor's, an array's). Idempotent."""
        self._view = None
        self._region = None

    def when_freed(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` (from whichever thread) when the memory is really unmapped, not merely closed."""
        weakref.finalize(self.region, callback).atexit = False
