"""Dropping behind: what has been sent leaves the page cache, so that a large model does not push all else out of it."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from weightwire.model import ModelTensor
from weightwire.ranges import FileRange
from weightwire.transport.memory import resident_bytes

__all__ = ["Claim", "DropBehind", "claims_for", "dropping"]

_BATCH: Final = 16 << 20
"""Bytes dropped at once: for pages that cannot be dropped yet the kernel disturbs every CPU."""

_LAG: Final = 64 << 20
"""Bytes behind, which are tried again each time: a page that still waits in a socket cannot be dropped."""

_PAGE: Final = mmap.PAGESIZE

_PAUSES: Final = (0.001, 0.005, 0.025)
"""Seconds between tries at the end. A page that was sent to a server on this machine may be free only a moment after it
was received: Linux hands packets back to the processor that sent them. Some of them it keeps until it receives another,
and what those hold stays in memory (the kernel's Documentation/admin-guide/sysctl/net.rst, skb_defer_max).
"""


class DropBehind:
    """Ranges of files, and how many still need each; what nobody needs any more is dropped.

    Every connection says what it will read with `want`, all of them before the first `done`. Ranges that follow each
    other are dropped as one, since only whole pages can be. Pages that somebody has mapped, and those not yet written
    to the disk, stay where they are. Source: posix_fadvise(2), POSIX_FADV_DONTNEED.

    Safe to use from several threads. The files must be open until `close`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._needed: Counter[FileRange] = Counter()
        self._behind: list[tuple[int, int, int]] = []
        """Descriptor, first byte and end of what was dropped last, or is to be with the next batch."""
        self._fresh = 0
        self._closed = False

    def want(self, payloads: Iterable[FileRange | memoryview]) -> None:
        """``payloads`` will be read by one more. Those in memory are nobody's to drop."""
        with self._lock:
            self._needed.update(payload for payload in payloads if isinstance(payload, FileRange) and payload.nbytes)

    def done(self, payload: FileRange | memoryview) -> None:
        """One of those who wanted ``payload`` will not read it again."""
        if not isinstance(payload, FileRange) or not payload.nbytes:
            return
        with self._lock:
            if self._closed:
                return  # and the file with it
            left = self._needed[payload] - 1
            if left > 0:
                self._needed[payload] = left
                return
            del self._needed[payload]
            self._add(payload.fd, payload.offset, payload.offset + payload.nbytes)
            if self._fresh >= _BATCH:
                self._drop(_LAG)

    def close(self) -> None:
        """Drop what is left, once more what a socket may have held, and what somebody still wanted: everything has
        arrived, and nobody reads any more. What cannot be dropped then is tried again for some 30 ms. Idempotent.
        """
        with self._lock:
            if self._closed:
                return
            for payload in sorted(self._needed, key=lambda payload: (payload.fd, payload.offset)):
                self._add(payload.fd, payload.offset, payload.offset + payload.nbytes)
            self._needed.clear()
            self._closed = True
            self._drop(_LAG)
            for pause in _PAUSES:
                if not any(_resident(fd, start, end) for fd, start, end in self._behind):
                    break
                time.sleep(pause)
                self._drop(_LAG)
            self._behind.clear()

    def _add(self, fd: int, start: int, end: int) -> None:
        self._fresh += end - start
        if self._behind:
            last_fd, last_start, last_end = self._behind[-1]
            # Between two tensors lies padding; the page that holds the end of one and the start of the next has to go,
            # too.
            if last_fd == fd and last_end <= start < last_end + _PAGE:
                self._behind[-1] = (fd, last_start, end)
                return
        self._behind.append((fd, start, end))

    def _drop(self, keep: int) -> None:
        """Drop all that is behind, and remember the last ``keep`` bytes of it."""
        self._fresh = 0
        kept: list[tuple[int, int, int]] = []
        for fd, start, end in reversed(self._behind):
            _advise(fd, start, end)
            if keep > 0:
                kept.append((fd, max(start, end - keep), end))
                keep -= end - start
        self._behind = kept[::-1]


class Claim:
    """What one of those who read wants of ``payloads``: all of them, each until it is `done`. Used by one thread."""

    def __init__(self, drop: DropBehind, payloads: Sequence[FileRange | memoryview]) -> None:
        self._drop = drop
        self._left = dict(enumerate(payloads))
        drop.want(payloads)

    def done(self, number: int) -> None:
        """Payload ``number`` will not be read again. Idempotent."""
        payload = self._left.pop(number, None)
        if payload is not None:
            self._drop.done(payload)

    def keep(self, numbers: Sequence[int]) -> None:
        """Only those numbered ``numbers`` will be read; from now on they count from 0, in this order."""
        kept = {new: self._left.pop(old) for new, old in enumerate(numbers)}
        self.close()
        self._left = kept

    def close(self) -> None:
        """None of them will be read again. Idempotent."""
        for number in list(self._left):
            self.done(number)


@contextlib.contextmanager
def dropping(wanted: bool) -> Iterator[DropBehind | None]:
    """Inside: files are dropped behind, if that is ``wanted``. Leave it before the files are closed."""
    drop = DropBehind() if wanted else None
    try:
        yield drop
    finally:
        if drop is not None:
            drop.close()


def claims_for(drop: DropBehind | None, chosen: Sequence[Sequence[ModelTensor]]) -> list[Claim | None]:
    """A claim for each of those who want ``chosen``."""
    return [None if drop is None else Claim(drop, [tensor.payload for tensor in tensors]) for tensors in chosen]


def _advise(fd: int, start: int, end: int) -> None:
    """Drop the pages that lie between ``start`` and ``end``. It is advice: where nobody takes it, nothing is wrong."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


def _resident(fd: int, start: int, end: int) -> int:
    """Bytes between ``start`` and ``end`` that are in memory; 0 where nobody can say."""
    with contextlib.suppress(OSError):
        return resident_bytes(fd, start, end - start)
    return 0
