"""Entries read straight into memory, in parallel pieces, hashed behind the reading.

FNV-1a is a chain, so the bytes of one entry are hashed in order, one piece after the other. The thread that
wants the answer hashes and reads; so do the workers, for that entry and for those that are wanted next.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final

from weightwire.cache.workers import Workers
from weightwire.hashing import FNV_OFFSET, fnv1a64
from weightwire.profile import Stage

__all__ = ["PIECE", "EntryChanged", "Fill", "Reader", "ReadingStopped", "advise", "read_exactly"]

PIECE: Final = 4 << 20
"""Bytes read or hashed at once: whole huge pages, so that no two threads touch the same fresh one."""

_AHEAD: Final = 32 << 20
"""Bytes the kernel is asked to have ready beyond the piece at hand."""

_SMALL: Final = 256 << 10
"""An entry up to this size is read and hashed by whoever wants it: handing it over would take longer."""


class EntryChanged(OSError):
    """The file became shorter or was written to while it was read."""


class ReadingStopped(Exception):
    """`Reader.stop` was called while somebody waited for an entry."""


def advise(fd: int, start: int, nbytes: int) -> None:
    """Ask the kernel to read that range of the file ahead. Only a hint (posix_fadvise(2))."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_WILLNEED)


def read_exactly(fd: int, piece: memoryview, offset: int) -> None:
    """Fill ``piece`` from byte ``offset`` of the file. EntryChanged if it ends before, OSError if it cannot be read."""
    done = 0
    while done < piece.nbytes:
        got = os.preadv(fd, [piece[done:]], offset + done)
        if not got:
            raise EntryChanged(f"it ends at byte {offset + done}, shorter than when it was opened")
        done += got


class Fill:
    """One entry on its way into memory; made by `Reader.start`, which owns ``fd`` from then on.

    ``placed_at`` is where ``window`` starts in its mapping, bytes: pieces end at multiples of `PIECE` there. With
    ``hashed`` what is in place is hashed, in order, by whoever comes first.
    """

    def __init__(self, reader: Reader, fd: int, window: memoryview, placed_at: int, hashed: bool) -> None:
        self.nbytes = window.nbytes
        self._reader = reader
        self._fd = fd
        self._before = os.fstat(fd)
        self._window: memoryview | None = window
        self._first = min(self.nbytes, PIECE - placed_at % PIECE)
        self._claimed = 0
        self._running = 0
        self._ready = 0
        self._early: dict[int, int] = {}
        self._hashed = 0 if hashed else self.nbytes
        self._hashing = False
        self._digest: int | None = FNV_OFFSET if hashed else None
        self._error: BaseException | None = None
        self._dropped = False

    @property
    def fd(self) -> int:
        """The open file, until `drop`."""
        return self._fd

    def finish(self) -> int | None:
        """Wait until the entry is in memory; the FNV-1a 64 of what is there, if it was to be hashed.

        Raises EntryChanged if the file was written to meanwhile, OSError if it could not be read, ReadingStopped after
        `Reader.stop`. Nobody writes to the memory any more when it returns or raises OSError.
        """
        self._reader.finish(self)
        after = os.fstat(self._fd)
        if (after.st_size, after.st_mtime_ns) != (self._before.st_size, self._before.st_mtime_ns):
            raise EntryChanged("it was written to while it was read")
        return self._digest

    def drop(self) -> None:
        """Close the file as soon as nobody reads from it any more, and read no further pieces. Idempotent."""
        with self._reader.condition:
            self._dropped = True
            self._release()
        self._reader.forget(self)

    def _release(self) -> None:
        if self._dropped and not self._running and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._window = None

    # For the reader: with its lock held, but for `work`.

    @property
    def reading(self) -> bool:
        """Whether some of it is not in memory yet."""
        return self._ready < self.nbytes

    def finished(self) -> bool:
        """Whether all is in place, and hashed. Raises what went wrong, once nobody is at it any more."""
        if self._running:
            return False
        if self._error is not None:
            raise self._error
        return self._ready == self._hashed == self.nbytes

    def claim_read(self) -> tuple[int, int, bool] | None:
        """The next piece nobody reads yet, ``[start, end)`` and False; None if there is none."""
        start = self._claimed
        if start >= self.nbytes or self._error is not None or self._dropped:
            return None
        end = self._first if not start else min(start + PIECE, self.nbytes)
        self._claimed = end
        self._running += 1
        return start, end, False

    def claim_hash(self) -> tuple[int, int, bool] | None:
        """The next piece to be hashed, and True; None if it is not in place yet, or somebody hashes already."""
        start = self._hashed
        if start >= self._ready or self._hashing or self._error is not None or self._dropped:
            return None
        self._hashing = True
        self._running += 1
        return start, min(self._ready, start + PIECE), True

    def work(self, start: int, end: int, hashing: bool) -> None:
        """Read or hash a claimed piece."""
        window = self._window
        assert window is not None
        if hashing:
            assert self._digest is not None
            self._digest = fnv1a64(window[start:end], self._digest)
            return
        if self.nbytes > PIECE:
            advise(self._fd, end, min(self.nbytes - end, _AHEAD))
        read_exactly(self._fd, window[start:end], start)

    def done(self, start: int, end: int, hashing: bool, error: BaseException | None) -> None:
        """A claimed piece has been dealt with."""
        self._running -= 1
        if error is not None:
            self._error = self._error or error
        if hashing:
            self._hashing = False
            self._hashed = end
        elif error is None:
            self._early[start] = end
            while (after := self._early.pop(self._ready, None)) is not None:
                self._ready = after
        self._release()


class Reader:
    """What one client has being read. The oldest entry's pieces come first; clients take turns at the workers.

    ``switch`` is told the `Stage` of the thread inside `Fill.finish`, whether it does the work or waits for it. `stop`
    may be called from any thread, everything else from the client's.
    """

    def __init__(self, workers: Workers, switch: Callable[[int], int] = int) -> None:
        self.condition = threading.Condition()
        self._workers = workers
        self._switch = switch
        self._fills: list[Fill] = []
        self._tokens = 0
        self._stopped = False

    def start(self, fd: int, window: memoryview, placed_at: int, *, hashed: bool) -> Fill:
        """Begin to read all of ``window`` from the start of the file ``fd``, which belongs to the fill from now on."""
        fill = Fill(self, fd, window, placed_at, hashed)
        pieces = 1 + -(-window.nbytes // PIECE)
        with self.condition:
            self._fills.append(fill)
            wanted = 0 if fill.nbytes <= _SMALL else min(self._workers.count, self._tokens + pieces) - self._tokens
            self._tokens += wanted
        if wanted:
            advise(fd, 0, min(fill.nbytes, _AHEAD))
        for _ in range(wanted):
            if not self._workers.submit(self._turn):
                with self.condition:
                    self._tokens -= 1
        return fill

    def finish(self, fill: Fill) -> None:
        """Return when ``fill`` is finished. Whoever wants it helps: workers may be few, or busy with other clients."""
        before = self._switch(Stage.READ)
        try:
            self._finish(fill)
        finally:
            self._switch(before)

    def _finish(self, fill: Fill) -> None:
        while True:
            with self.condition:
                while True:
                    if self._stopped:
                        raise ReadingStopped
                    if fill.finished():
                        return
                    piece = fill.claim_hash() or fill.claim_read()
                    if piece is not None:
                        break
                    self._switch(Stage.READ if fill.reading else Stage.HASH)
                    self.condition.wait()
            self._switch(Stage.HASH if piece[2] else Stage.READ)
            self._work(fill, *piece)

    def forget(self, fill: Fill) -> None:
        """The fill is over."""
        with self.condition:
            if fill in self._fills:
                self._fills.remove(fill)

    def stop(self) -> None:
        """Whoever waits for an entry, now or later, gets ReadingStopped."""
        with self.condition:
            self._stopped = True
            self.condition.notify_all()

    def close(self) -> None:
        """Drop everything. Pieces being read at this moment are read to their end, into memory they keep alive."""
        with self.condition:
            fills = list(self._fills)
        for fill in fills:
            fill.drop()

    def _claim(self) -> tuple[Fill, tuple[int, int, bool]] | None:
        # Hashing cannot be shared out, so it must not lag behind; and it is quick while the bytes are still in a cache.
        for claim in (Fill.claim_hash, Fill.claim_read):
            for fill in self._fills:
                piece = claim(fill)
                if piece is not None:
                    return fill, piece
        return None

    def _turn(self) -> None:
        """One piece on a worker, then to the end of its queue again."""
        while True:
            with self.condition:
                claimed = self._claim()
                if claimed is None:
                    self._tokens -= 1
                    return
            fill, piece = claimed
            self._work(fill, *piece)
            del claimed, fill
            if self._workers.submit(self._turn):
                return

    def _work(self, fill: Fill, start: int, end: int, hashing: bool) -> None:
        error: BaseException | None = None
        try:
            fill.work(start, end, hashing)
        except BaseException as caught:
            error = caught
        with self.condition:
            fill.done(start, end, hashing, error)
            self.condition.notify_all()
