"""Which bytes of a tensor have been written."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

from weightwire.server.capacity import Tally

__all__ = ["MAX_PIECES", "Coverage"]

MAX_PIECES: Final = 1 << 16
"""Separate pieces tracked per tensor. A client that scatters more cannot make the server remember more."""

_UNCOUNTED: Final = 8
"""Pieces that are not worth counting: what a tensor has that comes in order, or in a few strands."""

_BATCH: Final = 64
"""Pieces counted at once."""


class Coverage:
    """A set of byte ranges ``[start, end)`` of a tensor of ``nbytes`` bytes, kept merged and in order.

    Pieces beyond the first few are taken from ``tally``, which all clients share, and go back to it with the object.
    Not thread-safe: a session adds to the coverage of its own tensors only.
    """

    __slots__ = ("_counted", "_ends", "_lost", "_starts", "_tally", "nbytes")

    def __init__(self, nbytes: int, tally: Tally) -> None:
        self.nbytes = nbytes
        self._tally = tally
        self._counted = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._lost = False

    def __del__(self) -> None:
        if self._counted:
            self._tally.give_back(self._counted)

    @property
    def complete(self) -> bool:
        """Whether every byte is covered (an empty tensor always is)."""
        if self.nbytes == 0:
            return True
        return len(self._starts) == 1 and self._starts[0] == 0 and self._ends[0] == self.nbytes

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The ranges covered, ascending and apart."""
        return list(zip(self._starts, self._ends, strict=True))

    def add(self, start: int, end: int) -> None:
        """Cover ``[start, end)``; bytes outside the tensor are the caller's mistake (ValueError)."""
        if not 0 <= start <= end <= self.nbytes:
            raise ValueError(f"[{start}, {end}) is not within a tensor of {self.nbytes} bytes")
        if start == 0 and end == self.nbytes:
            self._starts, self._ends = ([0], [end]) if end else ([], [])
            return
        if start == end or self._lost:
            return
        # Everything that overlaps or touches [start, end) melts into it.
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        if low < high:
            start = min(start, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]
        if len(self._starts) > _UNCOUNTED + self._counted:
            more = max(len(self._starts) - _UNCOUNTED - self._counted, _BATCH)
            if len(self._starts) > MAX_PIECES or not self._tally.take(more):
                self._give_up()
                return
            self._counted += more

    def add_rows(self, offset: int, nbytes: int, rows: int, stride: int) -> None:
        """Cover ``rows`` ranges of ``nbytes`` bytes, the first at ``offset``, each ``stride`` bytes after the last."""
        if not rows or not nbytes:
            return
        if stride == nbytes:
            self.add(offset, offset + rows * nbytes)
            return
        if rows > MAX_PIECES:
            self._give_up()
            return
        for row in range(rows):
            self.add(offset + row * stride, offset + row * stride + nbytes)

    def clear(self) -> None:
        """Nothing is covered any more."""
        self._starts, self._ends = [], []
        if self._counted:
            self._tally.give_back(self._counted)
            self._counted = 0

    def _give_up(self) -> None:
        # A lower bound is all this is for: forgetting only means that the tensor is not announced as complete unless
        # it is written whole.
        self.clear()
        self._lost = True
