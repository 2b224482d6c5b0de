"""Entries written while the next tensors are received, from the memory the tensors are in.

A tensor that is to be kept goes through three stages: workers hash it while it arrives; a thread writes it to a
temporary file; another one syncs that file and puts it in place. From the end of the second stage on its memory is not
needed. Until then nobody may change that memory without asking (`Save.settle`), so what is in the file is what was
hashed.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from weightwire.cache.store import CacheWriter, TensorCache, same_bytes
from weightwire.cache.workers import Workers
from weightwire.hashing import FNV_OFFSET, fnv1a64

__all__ = ["MAX_UNSYNCED", "MAX_UNWRITTEN", "PATIENCE", "Save", "Saver"]

logger = logging.getLogger(__name__)

MAX_UNWRITTEN: Final = 256 << 20
"""Bytes that may wait for being written, in memory; a larger tensor waits alone."""

MAX_UNSYNCED: Final = 1 << 30
_MAX_FILES: Final = 64
"""Bytes, and files, that may wait for the disk; a larger one alone."""

PATIENCE: Final = 10.0
"""Seconds that a client is kept waiting for a disk that cannot keep up, before its tensor is served but not kept. Less
than the 30 s for which a client waits for a server that takes no bytes.
"""

_THREADS: Final = ("save", "sync")
_STEP: Final = 4 << 20
_SMALL: Final = 128 << 10
"""A tensor up to this size is hashed by the thread that received it: handing it over would take longer."""


class Save:
    """One tensor being kept; made by `Saver.begin`. `landed`, `complete` and `abandon` are for who receives it."""

    def __init__(self, saver: Saver, nbytes: int, window: memoryview | None) -> None:
        self.nbytes = nbytes
        self.content_hash: int | None = None
        self.received = False
        self.cancelled = False
        self.writer: CacheWriter | None = None
        self.lost = False
        """Whether it comes to no entry because something was in its way."""
        self.stored = False
        self._saver = saver
        self._window = window
        self._landed = 0
        self._hashed = 0
        self._digest = FNV_OFFSET
        self._hashing = False

    @property
    def window(self) -> memoryview | None:
        """The tensor's memory; None from when it is not needed any more."""
        return self._window

    def landed(self, end: int) -> None:
        """The first ``end`` bytes are in place."""
        with self._saver.condition:
            self._landed = end
            if self._hashing or end == self._hashed:
                return
            self._hashing = True
        if self.nbytes <= _SMALL or not self._saver.workers.submit(self._turn):
            while self._step():
                pass

    def complete(self) -> None:
        """All of it is in place, and counts as sent: whoever asks for this entry from now on waits for it."""
        with self._saver.condition:
            self.received = True
            if not self._hashing:
                self._saver.hashed(self)

    def abandon(self) -> None:
        """It did not arrive, or is about to change: no entry comes of it, unless it has been written already."""
        with self._saver.condition:
            if self._window is not None:
                self.cancelled = True
                if not self._hashing:
                    self._saver.hashed(self)

    def settle(self) -> None:
        """Return when the memory may be changed: after some waiting, if need be at the price of the entry."""
        if not self._saver.wait(lambda: self._window is None):
            with self._saver.condition:
                self.lost = self._window is not None
                self.abandon()

    def release(self) -> None:
        """The memory is not needed any more. The saver's lock is held."""
        if self._window is not None:
            self._window = None
            self._saver.unwritten -= self.nbytes
            self._saver.condition.notify_all()

    # On a worker.

    def _turn(self) -> None:
        while self._step():
            # To the end of the queue, behind the other clients' work.
            if self._saver.workers.submit(self._turn):
                return

    def _step(self) -> bool:
        """Hash what has landed, up to a few MiB. Whether there may be more."""
        with self._saver.condition:
            window = self._window
            end = min(self._landed, self._hashed + _STEP)
            if window is None or self.cancelled or end == self._hashed:
                self._hashing = False
                if self.received or self.cancelled:
                    self._saver.hashed(self)
                return False
        try:
            self._digest = fnv1a64(window[self._hashed : end], self._digest)
        except Exception:
            logger.exception("hashing a tensor for the cache failed")
            self.cancelled = self.lost = True
        self._hashed = end
        return True

    @property
    def digest(self) -> int:
        """The FNV-1a 64 of what has been hashed so far: of all of it, once it has been received."""
        return self._digest


class Saver:
    """Keeps tensors in ``cache`` for all clients of a server. Its two threads start with the first tensor.

    Whatever goes wrong loses an entry and nothing else. Thread-safe.
    """

    def __init__(self, cache: TensorCache, workers: Workers) -> None:
        self.workers = workers
        self.condition = threading.Condition()
        self.unwritten = 0
        self._cache = cache
        self._pending: dict[Save, None] = {}
        self._to_write: deque[Save] = deque()
        self._to_sync: deque[Save] = deque()
        self._writing: Save | None = None
        self._syncing: Save | None = None
        self._syncing_fd = -1
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._hurried = False
        self._closing = False
        self._behind = False
        self._stored = 0
        self._lost = 0

    def counts(self) -> tuple[int, int, int]:
        """How many entries have been stored; how many could not be; how many have arrived and are neither yet."""
        with self.condition:
            return self._stored, self._lost, sum(save.received for save in self._pending)

    def begin(self, window: memoryview) -> Save | None:
        """Keep the tensor that will be received into ``window``; waits where too much is being kept already.

        None if it cannot be kept: the disk is too slow (logged), no thread can be started, the server ends.
        """
        save = Save(self, window.nbytes, window)
        if not self.wait(lambda: not self.unwritten or self.unwritten + window.nbytes <= MAX_UNWRITTEN):
            if not self._hurried:
                with self.condition:
                    self._lost += 1
                level = logging.DEBUG if self._behind else logging.WARNING
                self._behind = True
                logger.log(
                    level, "cache %s: the disk cannot keep up; the tensor is served but not cached; not reported again "
                    "until it can", self._cache.directory,
                )  # fmt: skip
            return None
        with self.condition:
            if self._hurried:
                return None
            if not self._started():
                self._lost += 1
                return None
            self._behind = False
            self.unwritten += window.nbytes
            self._pending[save] = None
        return save

    def put(self, writer: CacheWriter, content_hash: int, nbytes: int) -> None:
        """Sync what ``writer`` has written, and put it in place; the writer belongs to the saver from now on."""
        save = Save(self, nbytes, None)
        if writer.fd < 0:
            save.lost = True
            self._count(save)
            return
        save.content_hash, save.received, save.writer = content_hash, True, writer
        self.wait(self._disk_has_room)
        with self.condition:
            if not self._closing and self._started():
                self._pending[save] = None
                self._to_sync.append(save)
                self.condition.notify_all()
                return
        self._sync(save)
        self._count(save)

    def settled(self, content_hash: int, nbytes: int) -> None:
        """Wait for what is being kept and is, or may turn out to be, the entry ``content_hash`` of ``nbytes`` bytes."""

        def decided() -> bool:
            return not any(
                save.received and save.nbytes == nbytes and save.content_hash in (None, content_hash)
                for save in self._pending
            )

        self.wait(decided)

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Wait until ``condition``, asked with the lock held, is true, at most `PATIENCE` seconds, and not at all once
        the server ends. Whether it is.
        """
        with self.condition:
            self.condition.wait_for(lambda: self._hurried or condition(), PATIENCE)
            return condition()

    def hurry(self) -> None:
        """Nobody waits for the disk any more, and nothing further is kept: the server ends."""
        with self.condition:
            self._hurried = True
            self.condition.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """Finish what is being kept, for at most ``timeout`` seconds, give up the rest, and end the threads.

        No temporary file stays. Idempotent; in a fork of the process nothing.
        """
        if os.getpid() != self._process:
            return
        atexit.unregister(self.close)
        deadline = time.monotonic() + timeout
        self.hurry()
        with self.condition:
            self._closing = True
            self.condition.notify_all()
            # What has not been received to its end belongs to a client that is gone.
            self.condition.wait_for(lambda: not any(save.received for save in self._pending), timeout)
            late = 0
            for save in list(self._pending):
                late += save.received
                save.lost = save.lost or save.received
                save.cancelled = True
                if save.writer is not None:
                    save.writer.unlink()
                if save is not self._syncing and save is not self._writing:
                    if save.writer is not None:
                        save.writer.abort()
                    self._end(save)
            self._to_write.clear()
            self._to_sync.clear()
            self.condition.notify_all()
        if late:
            logger.warning("cache %s: %d tensors could not be stored in time", self._cache.directory, late)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.1, deadline - time.monotonic()))

    def hashed(self, save: Save) -> None:
        """A tensor has been hashed to its end, or is not to be kept after all. The lock is held."""
        if save not in self._pending:
            return
        if save.cancelled:
            if save is self._writing:
                save.release()  # and its thread gives up
                return
            if save in self._to_write:
                self._to_write.remove(save)
            self._end(save)
        elif save.content_hash is None:
            save.content_hash = save.digest
            self._to_write.append(save)
            self.condition.notify_all()

    def _end(self, save: Save) -> None:
        save.release()
        if save in self._pending:
            del self._pending[save]
            self._count(save)
        self.condition.notify_all()

    def _count(self, save: Save) -> None:
        with self.condition:
            self._stored += save.stored
            self._lost += save.lost and not save.stored

    def _started(self) -> bool:
        if len(self._threads) == len(_THREADS):
            return True
        for name in _THREADS[len(self._threads) :]:
            work = self._write_all if name == "save" else self._sync_all
            thread = threading.Thread(target=work, name=f"weightwire-{name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._cache.lost("starting a thread", OSError(errno.EAGAIN, str(error)))
                return False
            self._threads.append(thread)
        # Of a server that is never closed, what was received is kept all the same, and no half of a file stays.
        atexit.register(self.close)
        return True

    # On the thread that writes.

    def _write_all(self) -> None:
        while True:
            with self.condition:
                self.condition.wait_for(lambda: self._to_write or (self._closing and not self._pending))
                if not self._to_write:
                    return
                save = self._writing = self._to_write.popleft()
            try:
                going_on = self._write(save)
            except Exception:
                logger.exception("cache %s: storing a tensor failed", self._cache.directory)
                save.lost = True
                going_on = False
            if not going_on and save.writer is not None:
                save.writer.abort()
            with self.condition:
                self._writing = None
                if not going_on:
                    self._end(save)
            del save

    def _write(self, save: Save) -> bool:
        """Write the tensor to a temporary file. Whether that has to be synced now."""
        window, content_hash = save.window, save.content_hash
        if window is None or content_hash is None or save.cancelled:
            return False
        if self._cache.holds(content_hash, window) or self._on_its_way(content_hash, window):
            return False
        save.writer = writer = self._cache.writer()
        for start in range(0, window.nbytes, _STEP):
            if save.cancelled or writer.fd < 0:
                save.lost = save.lost or not save.cancelled
                return False
            writer.write(window[start : start + _STEP])
        del window
        with self.condition:
            # From here on the file has it all: what happens to the memory is of no matter.
            if save.cancelled or writer.fd < 0:
                save.lost = save.lost or not save.cancelled
                return False
            save.release()
            self.condition.wait_for(lambda: save.cancelled or self._disk_has_room())
            if save.cancelled:
                return False
            self._to_sync.append(save)
            self.condition.notify_all()
        return True

    def _disk_has_room(self) -> bool:
        waiting = sum(save.nbytes for save in self._to_sync)
        return not self._to_sync or (len(self._to_sync) < _MAX_FILES and waiting < MAX_UNSYNCED)

    def _on_its_way(self, content_hash: int, window: memoryview) -> bool:
        """Whether a file with the very same content only waits for the disk. Looked at with the lock held, so that it
        is not closed meanwhile; several clients that push one model at once are the ones it is for.
        """
        fd = -1
        with self.condition:
            for other in (*self._to_sync, self._syncing):
                if other is None or other.content_hash != content_hash or other.nbytes != window.nbytes:
                    continue
                if other is self._syncing:
                    fd = os.dup(self._syncing_fd)
                elif other.writer is not None:
                    fd = os.dup(other.writer.fd)
                break
        if fd < 0:
            return False
        try:
            return same_bytes(fd, window)
        finally:
            os.close(fd)

    # On the thread that syncs.

    def _sync_all(self) -> None:
        while True:
            with self.condition:
                self.condition.wait_for(lambda: self._to_sync or (self._closing and not self._pending))
                if not self._to_sync:
                    return
                save = self._syncing = self._to_sync.popleft()
                assert save.writer is not None
                # For others to compare with: the writer closes its own as soon as it is done.
                self._syncing_fd = os.dup(save.writer.fd)
                self.condition.notify_all()
            try:
                self._sync(save)
            except Exception:
                logger.exception("cache %s: storing a tensor failed", self._cache.directory)
                save.lost = True
            with self.condition:
                os.close(self._syncing_fd)
                self._syncing, self._syncing_fd = None, -1
                self._end(save)
            del save

    def _sync(self, save: Save) -> None:
        writer, content_hash = save.writer, save.content_hash
        assert writer is not None
        assert content_hash is not None
        with writer:
            if not save.cancelled and not self._cache.holds_file(content_hash, writer.fd, save.nbytes):
                save.stored = writer.commit(content_hash, lambda: not save.cancelled)
                save.lost = save.lost or not (save.stored or save.cancelled)
