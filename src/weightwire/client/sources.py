"""How the bytes of a model's files are read: left to the kernel, or in large blocks; ahead, where a network is between.

The kernel reads ahead by some hundred KiB, one request or two at a time. Over a network each costs a round trip, so
that a fast one stands still most of the time. Advice for the next `AHEAD` bytes, in pieces as large as the kernel
takes at once, keeps many requests on their way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Sequence
from typing import Final

from weightwire.client.dropping import Claim
from weightwire.index import Hashes, hash_with_digest
from weightwire.model.mounts import is_remote, readahead_bytes
from weightwire.model.reading import read_range
from weightwire.ranges import FileRange

__all__ = ["BLOCK", "Sources", "hash_blocks", "in_blocks"]

BLOCK: Final = 8 << 20
"""Bytes read at once, or handed to the kernel where they are read ahead."""

AHEAD: Final = 32 << 20
"""Bytes on their way before they are needed, and so what of the page cache is taken for them."""

Payload = FileRange | memoryview


class _Ahead:
    """Advice for one file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._step = readahead_bytes(fd)

    def want(self, start: int, end: int) -> None:
        """Bytes ``start`` to ``end`` of the file will be read soon."""
        # In steps: of more than one read-ahead's worth the kernel takes only so much, and forgets the rest.
        with contextlib.suppress(OSError):
            for at in range(start, end, self._step):
                os.posix_fadvise(self._fd, at, min(self._step, end - at), os.POSIX_FADV_WILLNEED)


class Sources:
    """The bytes of ``payloads`` in the order they are sent, and word of what has been.

    ``read`` is ``"mmap"`` (the kernel sends out of its page cache), ``"read"`` (blocks are read into memory of ours,
    ahead where a network is between) or ``"auto"`` (the kernel sends, from what is read ahead where a network is
    between). Those numbered ``cached`` may turn out not to be needed, so that nothing of them is read ahead before
    `part` asks. ``claim`` hears what nobody reads any more. Used by one thread.
    """

    def __init__(
        self,
        payloads: Sequence[Payload],
        *,
        cached: Container[int] = (),
        read: str = "auto",
        claim: Claim | None = None,
    ) -> None:
        self._payloads = payloads
        self._cached = cached
        self._claim = claim
        self._blocks = read == "read"
        self._memory: memoryview | None = None
        self._files: dict[int, _Ahead] = {}
        if read != "mmap":
            for fd in {payload.fd for payload in payloads if isinstance(payload, FileRange)}:
                if is_remote(fd):
                    self._files[fd] = _Ahead(fd)
        # Where advice has come to: a payload, how much of it, and the bytes of the certain ones before it.
        self._next = self._upto = self._asked = 0
        self._before: list[int] = []
        if self._files:
            total = 0
            for number, payload in enumerate(payloads):
                self._before.append(total)
                total += 0 if number in cached else payload.nbytes
        self._alone = (-1, 0)

    def in_blocks(self, index: int) -> bool:
        """Whether no more than `BLOCK` bytes of payload ``index`` are to be asked for at once."""
        payload = self._payloads[index]
        return isinstance(payload, FileRange) and (self._blocks or payload.fd in self._files)

    def part(self, index: int, position: int, size: int) -> Payload:
        """``size`` bytes from byte ``position`` of payload ``index``: where they are, or read, until the next call.

        Raises ModelError where they are to be read and cannot be.
        """
        payload = self._payloads[index]
        if isinstance(payload, memoryview):
            return payload[position : position + size]
        self.ahead(index, position)
        if self._blocks:
            if self._memory is None:
                self._memory = memoryview(bytearray(BLOCK))
            return read_range(payload, position, self._memory[:size])
        if position == 0 and size == payload.nbytes:
            return payload
        return FileRange(payload.fd, payload.offset + position, size, payload.path)

    def ahead(self, index: int, position: int = 0) -> None:
        """Payload ``index`` is read from byte ``position`` on: have what follows read, too."""
        payload = self._payloads[index]
        if not self._files or not isinstance(payload, FileRange) or payload.fd not in self._files:
            return
        if index in self._cached:
            known = self._alone[1] if self._alone[0] == index else 0
            end = min(position + AHEAD, payload.nbytes)
            self._want(payload, max(known, position), end)
            self._alone = (index, end)
            return
        if self._asked < self._before[index] + position:
            self._next, self._upto, self._asked = index, position, self._before[index] + position
        goal = self._before[index] + position + AHEAD
        while self._asked < goal and self._next < len(self._payloads):
            following = self._payloads[self._next]
            if self._next not in self._cached:
                end = min(following.nbytes, self._upto + goal - self._asked)
                self._want(following, self._upto, end)
                self._asked += end - self._upto
                self._upto = end
                if end < following.nbytes:
                    return
            self._next += 1
            self._upto = 0

    def done(self, index: int) -> None:
        """Payload ``index`` will not be read again."""
        if self._claim is not None:
            self._claim.done(index)

    def _want(self, payload: Payload, start: int, end: int) -> None:
        if isinstance(payload, FileRange) and start < end and (file := self._files.get(payload.fd)) is not None:
            file.want(payload.offset + start, payload.offset + end)


def in_blocks(payloads: Sequence[Payload], read: str) -> frozenset[int]:
    """The numbers of those ``payloads`` that are to be hashed by `hash_blocks`."""
    if read == "mmap":
        return frozenset()
    files = {payload.fd for payload in payloads if isinstance(payload, FileRange)}
    chosen = {fd for fd in files if read == "read" or is_remote(fd)}
    return frozenset(
        number for number, payload in enumerate(payloads) if isinstance(payload, FileRange) and payload.fd in chosen
    )


def hash_blocks(payload: FileRange, check: Callable[[], object], *, digest: bool) -> Hashes:
    """FNV-1a 64 and BLAKE3 of a range of a file that is read ahead where a network is between, a block at a time.

    ``check``, ``digest`` and errors are those of `hash_with_digest`.
    """
    sources = Sources([payload])
    asked = -BLOCK

    def ahead(position: int) -> None:
        nonlocal asked
        if position >= asked + BLOCK:
            asked = position
            sources.ahead(0, position)

    return hash_with_digest(payload, check, digest=digest, ahead=ahead)
