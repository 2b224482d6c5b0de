"""The plain way of receiving, which is there to be measured against: what a stock server does, and no more.

A payload is received into a message of its own, which is cleared before and copied to its place after; hashing is byte
by byte; entries of the cache are written, and read as a whole, by the thread that serves the client, one request after
the other; no memory is touched ahead (docs/performance.md). What a client sends and is told is the same, and so is
what is checked: a header before there is memory for its payload, an entry before it is used.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Final

from weightwire.cache.kept import Save
from weightwire.cache.reading import EntryChanged, ReadingStopped, read_exactly
from weightwire.cache.saving import Saver
from weightwire.cache.store import NOT_ITS_NAME, TensorCache
from weightwire.cache.workers import Workers
from weightwire.cache.writing import CacheWriter
from weightwire.hashing import FNV_OFFSET, hash_payloads
from weightwire.profile import Stage
from weightwire.server.buffers import Block
from weightwire.server.destinations import Destination
from weightwire.server.filling import Filler, Question
from weightwire.server.populate import PopulateJob, Populator
from weightwire.server.receive import Receiver
from weightwire.server.staging import STAGING_BYTES, rows_of
from weightwire.transport.memory import HostRegion, cleared_memory
from weightwire.transport.profiling import LoadRecorder

__all__ = ["NoPopulator", "PlainFiller", "PlainReceiver", "PlainSaver"]

_PIECE: Final = 8 << 20
"""Bytes copied, read or written between two chances for other threads."""

_AT_THE_END: Final = 3.0
"""Seconds that an entry may still take once the server ends."""


class NoPopulator(Populator):
    """Touches nothing ahead, and has no thread."""

    def add(self, region: HostRegion) -> PopulateJob:
        """A job that nobody works on."""
        return PopulateJob(self, region)


class PlainSave(Save):
    """One tensor that is hashed and written when it is complete; ``recorder`` is told that it is hashed."""

    def __init__(self, saver: PlainSaver, window: memoryview) -> None:
        super().__init__(saver, window.nbytes, window)
        self.recorder: LoadRecorder | None = None
        self._plain = saver

    def landed(self, end: int) -> None:
        """Nothing is done before the end."""

    def complete(self) -> None:
        """All of it is in place: keep it, before the next request is read."""
        window, self._window = self._window, None
        if window is not None:
            self._plain.keep(self, window)

    def abandon(self) -> None:
        """It did not arrive."""
        self._window = None


class PlainSaver(Saver):
    """Keeps tensors in ``cache`` on the threads that receive them, and has none of its own."""

    def __init__(self, cache: TensorCache, workers: Workers) -> None:
        super().__init__(cache, workers)
        self._until: float | None = None
        self._keeping = 0

    def counts(self) -> tuple[int, int, int]:
        """As of `Saver`: what has arrived and is neither is being kept by the thread that received it."""
        with self.progress.lock:
            return self._stored, self._lost, self._keeping

    def begin(self, window: memoryview) -> Save | None:
        """Keep the tensor that will be received into ``window``."""
        return PlainSave(self, window)

    def put(self, writer: CacheWriter, content_hash: int, nbytes: int) -> None:
        """Sync what ``writer`` has written, and put it in place. ReadingStopped if the server ends meanwhile."""
        with writer, self._counted(Save(self, nbytes, None)) as save:
            if writer.fd >= 0 and self._cache.holds_file(content_hash, writer.fd, nbytes, self._late):
                save.lost = False
                return
            self.check()
            save.stored = writer.commit(content_hash)

    def keep(self, save: PlainSave, window: memoryview) -> None:
        """Make an entry of a tensor in memory, unless there is one. ReadingStopped if the server ends meanwhile."""
        with self._counted(save):
            previous = 0 if save.recorder is None else save.recorder.switch(Stage.HASH)
            try:
                content_hash = hash_payloads([window], check=self.check, plain=True)[0]
            finally:
                if save.recorder is not None:
                    save.recorder.switch(previous)
            if self._cache.holds(content_hash, window, self._late):
                save.lost = False
                return
            self.check()
            with self._cache.writer() as writer:
                for start in range(0, window.nbytes, _PIECE):
                    self.check()
                    writer.write(window[start : start + _PIECE])
                save.stored = writer.commit(content_hash)

    @contextlib.contextmanager
    def _counted(self, save: Save) -> Iterator[Save]:
        """Count ``save`` as on its way inside, and afterwards as what it came to: lost, unless somebody says else."""
        save.lost = True
        with self.condition:
            self._keeping += 1
        try:
            yield save
        finally:
            with self.condition:
                self._keeping -= 1
                self._count(save)
                self._unlisted |= save.stored
                last = not self._keeping
            # Once for all who keep something at the same time.
            if last:
                self._sync_names()

    def hurry(self) -> None:
        """The server ends: what is at hand may still be finished, if that is soon."""
        super().hurry()
        self._until = time.monotonic() + _AT_THE_END

    def check(self) -> None:
        """ReadingStopped once it has taken too long."""
        if self._late():
            raise ReadingStopped

    def _late(self) -> bool:
        return self._until is not None and time.monotonic() > self._until


class PlainReceiver(Receiver):
    """Takes in the payloads of one client, each in one piece. AllocationError where there is no memory for one."""

    def _whole(self, nbytes: int) -> memoryview:
        """The next ``nbytes`` bytes of the stream, in memory that was zero before, as of a whole message."""
        message = cleared_memory(self._head_bytes + nbytes, "a message")
        payload = message[self._head_bytes :]
        self._recv_into(payload)
        self._copied(payload)
        return payload

    def _into_memory(self, block: Block, window: memoryview, start: int, save: Save | None) -> None:
        if isinstance(save, PlainSave):
            save.recorder = self._recorder
        _copy(self._whole(window.nbytes), window)

    def _into_hook(self, destination: Destination, start: int, nbytes: int, writer: CacheWriter | None) -> int:
        payload = self._whole(nbytes)
        _hand_over(payload, destination, start)
        if writer is None:
            return FNV_OFFSET
        check = self._saver.check if isinstance(self._saver, PlainSaver) else None
        writer.write(payload)
        previous = self._recorder.switch(Stage.HASH)
        try:
            return hash_payloads([payload], check=check, plain=True)[0]
        finally:
            self._recorder.switch(previous)

    def _rows(self, block: Block, start: int, row: int, rows: int, stride: int) -> None:
        packed = self._whole(row * rows)
        if block.direct is not None:
            extent = (rows - 1) * stride + row
            rows_of(block.direct.window(start, extent), row, rows, stride)[:] = rows_of(packed, row, rows, row)
            return
        for index in range(rows):
            _hand_over(packed[index * row : (index + 1) * row], block.destination, start + index * stride)


class PlainFiller(Filler):
    """Answers the questions of one client one by one, out of files that are read to their end first."""

    @property
    def room(self) -> int:
        """No further question is taken in."""
        return 0

    def _begin(self, question: Question) -> None:
        self._questions.append(question)

    def _settle(self, question: Question, cache: TensorCache) -> bool:
        content_hash, nbytes = question.content_hash, question.nbytes
        fd = cache.lookup(content_hash, nbytes)
        if fd is None:
            cache.look_into(content_hash, nbytes, self._check)
            return False
        try:
            try:
                content = self._read(fd, nbytes)
            except OSError as error:
                cache.failed(content_hash, fd, error)
                return False
            if cache.verify == "content" and self._hash(content) != content_hash:
                self._recorder.corrupt_hits += 1
                cache.quarantine(content_hash, NOT_ITS_NAME, fd)
                return False
            previous = self._recorder.switch(Stage.STAGING)
            try:
                self._fill(question, content)
            finally:
                self._recorder.switch(previous)
            cache.used(fd)
            return True
        finally:
            os.close(fd)

    def _read(self, fd: int, nbytes: int) -> memoryview:
        """The whole entry. EntryChanged if it is written to meanwhile, OSError if it cannot be read."""
        before = os.fstat(fd)
        previous = self._recorder.switch(Stage.STAGING)
        try:
            content = cleared_memory(nbytes, "an entry of the cache")
        finally:
            self._recorder.switch(previous)
        previous = self._recorder.switch(Stage.READ)
        try:
            for start in range(0, nbytes, _PIECE):
                self._check()
                read_exactly(fd, content[start : start + _PIECE], start)
        finally:
            self._recorder.switch(previous)
        after = os.fstat(fd)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise EntryChanged("it was written to while it was read")
        return content

    def _hash(self, content: memoryview) -> int:
        previous = self._recorder.switch(Stage.HASH)
        try:
            return hash_payloads([content], check=self._check, plain=True)[0]
        finally:
            self._recorder.switch(previous)

    def _fill(self, question: Question, content: memoryview) -> None:
        """Copy an entry that has been checked to the tensor's place."""
        buffer = question.located.buffer
        block = buffer.memory
        block.about_to_write(question.start, question.nbytes)
        question.placed = buffer.begin(question.located)
        self._recorder.copies += 1
        self._recorder.copied_bytes += question.nbytes
        try:
            if block.direct is not None:
                _copy(content, block.direct.window(question.start, question.nbytes))
            else:
                _hand_over(content, block.destination, question.start)
        except BaseException:
            buffer.spoil(question.placed)
            raise


def _copy(source: memoryview, target: memoryview) -> None:
    for start in range(0, source.nbytes, _PIECE):
        target[start : start + _PIECE] = source[start : start + _PIECE]


def _hand_over(payload: memoryview, destination: Destination, start: int) -> None:
    """To a hook, in pieces no larger than it may expect."""
    for done in range(0, payload.nbytes, STAGING_BYTES):
        destination.write(start + done, payload[done : done + STAGING_BYTES].toreadonly())
