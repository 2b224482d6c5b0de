"""Entries read straight into memory, in parallel pieces, and hashed.

FNV-1a is a chain, so the bytes of one entry are hashed in order. Whoever has the front of the chain reads and hashes in
one go; others work at the fronts of the entries that are wanted next, or read pieces of this one ahead of its hash. The
thread that wants the answer takes part like the workers.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

from weightwire.cache.workers import Workers
from weightwire.hashing import FNV_OFFSET, fnv1a64, read_fnv1a64
from weightwire.profile import Stage

__all__ = ["PIECE", "EntryChanged", "Fill", "Reader", "ReadingStopped", "advise", "read_exactly"]

PIECE: Final = 1 << 23
"""Bytes read or hashed at once: whole huge pages, so that no two threads touch the same fresh one; and enough of them
(a millisecond) that handing over to another thread costs little."""

_AHEAD: Final = 32 << 20
"""Bytes the kernel is asked to have ready beyond the piece at hand."""

_SMALL: Final = 256 << 10
"""An entry up to this size is read and hashed by whoever wants it: handing it over would take longer."""


class EntryChanged(OSError):
    """The file became shorter or was written to while it was read."""


class ReadingStopped(Exception):
    """`Reader.stop` was called while somebody waited for an entry."""


def _ended(at: int) -> EntryChanged:
    return EntryChanged(f"it ends at byte {at}, shorter than when it was opened")


def advise(fd: int, start: int, nbytes: int) -> None:
    """Ask the kernel to read that range of the file ahead. Only a hint (posix_fadvise(2))."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_WILLNEED)


def _advise_missing(fd: int, start: int, end: int) -> None:
    """Have the pieces of ``[start, end)`` read ahead of which the first byte is not in the page cache.

    To advise what is there already would take the kernel a good part of the time of copying it.
    """
    for at in range(start, end, PIECE):
        try:
            os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
        except OSError:
            # Not there; or a file system that cannot say.
            advise(fd, at, min(PIECE, end - at))


def read_exactly(fd: int, piece: memoryview, offset: int) -> None:
    """Fill ``piece`` from byte ``offset`` of the file. EntryChanged if it ends before, OSError if it cannot be read."""
    done = 0
    while done < piece.nbytes:
        got = os.preadv(fd, [piece[done:]], offset + done)
        if not got:
            raise _ended(offset + done)
        done += got


class Doing(Enum):
    """What is done with a piece."""

    READ = 1
    HASH = 2
    BOTH = 3


class Piece(NamedTuple):
    """Bytes ``start`` to ``end`` of an entry, and what is done with them by whoever has claimed it."""

    start: int
    end: int
    doing: Doing


class Fill:
    """One entry on its way into memory; made by `Reader.start`, which owns ``fd`` from then on.

    ``placed_at`` is where ``window`` starts in its mapping, bytes: pieces end at multiples of `PIECE` there. With
    ``hashed`` it is hashed, too, in order, by whoever comes first.
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

    def claim_front(self) -> Piece | None:
        """The next piece nobody reads yet, if it can be hashed at once; else None."""
        if self._hashed < self._claimed or self._hashed == self.nbytes:
            return None
        piece = self.claim_read()
        if piece is not None:
            self._hashing = True
            return piece._replace(doing=Doing.BOTH)
        return None

    def claim_read(self) -> Piece | None:
        """The next piece nobody reads yet; None if there is none."""
        start = self._claimed
        if start >= self.nbytes or self._error is not None or self._dropped:
            return None
        end = self._first if not start else min(start + PIECE, self.nbytes)
        self._claimed = end
        self._running += 1
        return Piece(start, end, Doing.READ)

    def claim_hash(self) -> Piece | None:
        """What comes next to be hashed; None if it is not in place yet, or somebody hashes already."""
        start = self._hashed
        if start >= self._ready or self._hashing or self._error is not None or self._dropped:
            return None
        self._hashing = True
        self._running += 1
        return Piece(start, min(self._ready, start + PIECE), Doing.HASH)

    def work(self, piece: Piece) -> None:
        """Do what a claimed piece is for."""
        start, end, doing = piece
        window = self._window
        assert window is not None
        if doing is Doing.HASH:
            assert self._digest is not None
            self._digest = fnv1a64(window[start:end], self._digest)
            return
        _advise_missing(self._fd, end + _AHEAD - PIECE, min(self.nbytes, end + _AHEAD))
        if doing is Doing.READ:
            read_exactly(self._fd, window[start:end], start)
            return
        assert self._digest is not None
        got, self._digest = read_fnv1a64(self._fd, window[start:end], start, self._digest)
        if got < end - start:
            raise _ended(start + got)

    def done(self, piece: Piece, error: BaseException | None) -> None:
        """A claimed piece has been dealt with."""
        self._running -= 1
        if error is not None:
            self._error = self._error or error
        if piece.doing is not Doing.READ:
            self._hashing = False
            self._hashed = piece.end
        if piece.doing is not Doing.HASH and error is None:
            self._early[piece.start] = piece.end
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
            # One worker fewer than there are, because whoever waits for the entry works, too.
            most = max(1, self._workers.count - 1)
            wanted = 0 if fill.nbytes <= _SMALL else min(most, self._tokens + pieces) - self._tokens
            self._tokens += wanted
        if fill.nbytes > _SMALL:
            _advise_missing(fd, 0, min(fill.nbytes, _AHEAD))
        for _ in range(wanted):
            if not self._workers.submit(self._turn):
                with self.condition:
                    self._tokens -= 1
        return fill

    def finish(self, fill: Fill) -> None:
        """Return when ``fill`` is finished. Whoever wants it helps: workers may be few, or busy with other clients.
        And rather than wait for pieces others have, with what is wanted next.
        """
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
                    claimed = self._claim([fill]) or self._claim(self._fills)
                    if claimed is not None:
                        break
                    self._switch(Stage.READ if fill.reading else Stage.HASH)
                    self.condition.wait()
            # Reading and hashing in one go counts as reading.
            self._switch(Stage.HASH if claimed[1].doing is Doing.HASH else Stage.READ)
            self._work(*claimed)
            del claimed

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

    @staticmethod
    def _claim(fills: list[Fill]) -> tuple[Fill, Piece] | None:
        # Hashing cannot be shared out, so it must not lag behind. Reading ahead of it comes last: what is hashed later
        # has to be fetched from memory again.
        for claim in (Fill.claim_hash, Fill.claim_front, Fill.claim_read):
            for fill in fills:
                piece = claim(fill)
                if piece is not None:
                    return fill, piece
        return None

    def _turn(self) -> None:
        """One piece on a worker, then to the end of its queue again."""
        while True:
            with self.condition:
                claimed = self._claim(self._fills)
                if claimed is None:
                    self._tokens -= 1
                    return
            self._work(*claimed)
            del claimed
            if self._workers.submit(self._turn):
                return

    def _work(self, fill: Fill, piece: Piece) -> None:
        error: BaseException | None = None
        try:
            fill.work(piece)
        except BaseException as caught:
            error = caught
        with self.condition:
            fill.done(piece, error)
            self.condition.notify_all()
