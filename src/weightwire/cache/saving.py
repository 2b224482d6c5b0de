"""Entries written while the next tensors are received, from the memory the tensors are in.

A tensor that is to be kept goes through three stages: workers hash it while it arrives; a thread writes it to a
temporary file; another one syncs that file and puts it in place. What has been written is not needed in memory any
more. Until then nobody may change that memory without asking (`Save.settle`), so what is in the file is what was
hashed.

A disk slower than the network holds nobody up: what waits for it lies in memory that its client holds anyway. It is
waited for where that memory is to be overwritten, or is wanted by somebody else after its client has left it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from weightwire.cache.kept import Save
from weightwire.cache.progress import Progress
from weightwire.cache.store import TensorCache, same_bytes
from weightwire.cache.workers import Workers
from weightwire.cache.writing import CacheWriter
from weightwire.threads import Thread
from weightwire.transport.files import write_back

__all__ = ["MAX_UNSYNCED", "SOON", "Saver"]

logger = logging.getLogger(__name__)

MAX_UNSYNCED: Final = 1 << 30
_MAX_FILES: Final = 64
"""Bytes, and files, that may have been written and wait for the disk; a larger one alone."""

SOON: Final = 256 << 20
"""An entry with more than that to be written before it, bytes, is not waited for by who asks for it: it is missed."""

_THREADS: Final = ("save", "sync")
_STEP: Final = 4 << 20
_SYNC_STEP: Final = 32 << 20


class Saver:
    """Keeps tensors in ``cache`` for all clients of a server. Its two threads start with the first tensor.

    Whatever goes wrong loses an entry and nothing else. Thread-safe.
    """

    def __init__(self, cache: TensorCache, workers: Workers) -> None:
        self.workers = workers
        self.progress = Progress()
        self.condition = self.progress.condition
        self._cache = cache
        self._pending: dict[Save, None] = {}
        self._to_write: deque[Save] = deque()
        self._to_sync: deque[Save] = deque()
        self._writing: Save | None = None
        self._syncing: Save | None = None
        self._syncing_fd = -1
        self._threads: list[Thread] = []
        self._process = os.getpid()
        self._closing = False
        self._behind = False
        self._left: list[tuple[int, list[Save]]] = []
        self._unlisted = False
        self._stored = 0
        self._lost = 0

    def counts(self) -> tuple[int, int, int]:
        """How many entries have been stored; how many could not be; how many have arrived and are neither yet."""
        with self.progress.lock:
            return self._stored, self._lost, sum(save.received for save in self._pending)

    def begin(self, window: memoryview) -> Save | None:
        """Keep the tensor that will be received into ``window``.

        None if it cannot be kept: no thread can be started, the server ends.
        """
        save = Save(self, window.nbytes, window)
        with self.condition:
            if self.progress.hurried:
                return None
            if not self._started():
                self._lost += 1
                return None
            self._pending[save] = None
        return save

    def put(self, writer: CacheWriter, content_hash: int, nbytes: int) -> None:
        """Sync what ``writer`` has written, and put it in place; the writer belongs to the saver from now on."""
        save = Save(self, nbytes, None)
        late = writer.fd >= 0 and not self.progress.wait(self._disk_has_room) and not self.progress.hurried
        if writer.fd < 0 or late:
            writer.abort()
            save.lost = True
            self._count(save)
            if late:
                self._fell_behind(1)
            return
        save.content_hash, save.received, save.writer = content_hash, True, writer
        with self.condition:
            if not self._closing and self._started():
                self._pending[save] = None
                self._to_sync.append(save)
                self.condition.notify_all()
                return
        self._sync(save)
        self._count(save)
        self._sync_names()

    def settled(self, content_hash: int, nbytes: int) -> None:
        """Wait for what is being kept and is, or may turn out to be, the entry ``content_hash`` of ``nbytes`` bytes;
        but not if much else is to be written before it.
        """

        def decided() -> bool:
            return not any(
                save.received
                and save.nbytes == nbytes
                and save.content_hash in (None, content_hash)
                and self._before(save) <= SOON
                for save in self._pending
            )

        self.progress.wait(decided)

    def _before(self, save: Save) -> int:
        """Bytes still to be written before ``save`` is. The lock is held."""
        if save.window is None or save is self._writing:
            return 0
        before = self._writing.nbytes - self._writing.written if self._writing is not None else 0
        for other in self._to_write:
            if other is save:
                break
            before += other.nbytes
        return before

    def leave(self, nbytes: int, saves: list[Save]) -> None:
        """Nobody needs ``nbytes`` bytes of memory any more but those saves, which lie in it."""
        with self.condition:
            self._left.append((nbytes, saves))

    @property
    def left(self) -> int:
        """Bytes of memory that nobody needs but to be written from."""
        with self.condition:
            self._left = [(nbytes, saves) for nbytes, saves in self._left if any(save.window for save in saves)]
            return sum(nbytes for nbytes, _ in self._left)

    def clear(self, enough: Callable[[], bool]) -> bool:
        """Have memory that was left written, until ``enough``, asked with the lock held, is true. A disk that takes too
        long loses the entries that are not written yet. Whether it is enough.
        """
        if self.progress.wait(enough):
            return True
        with self.condition:
            self.give_up([save for _, saves in self._left for save in saves])
        return self.progress.wait(enough, 1.0, anyhow=True)

    def give_up(self, saves: list[Save]) -> None:
        """The disk has been waited for long enough: no entry comes of those that are not written yet."""
        with self.condition:
            lost = [save for save in saves if save.window is not None]
            for save in lost:
                save.lost = True
                save.abandon()
        if lost and not self.progress.hurried:
            self._fell_behind(len(lost))

    def _fell_behind(self, lost: int) -> None:
        level = logging.DEBUG if self._behind else logging.WARNING
        self._behind = True
        logger.log(
            level, "cache %s: the disk cannot keep up; %d tensors are served but not cached; not reported again "
            "until it can", self._cache.directory, lost,
        )  # fmt: skip

    def reach(self, save: Save, condition: Callable[[], bool], longest: float | None = None) -> bool:
        """As `Progress.wait`; ``save`` comes next meanwhile."""
        with self.condition:
            if save in self._to_write:
                self._to_write.remove(save)
                self._to_write.appendleft(save)
        return self.progress.wait(condition, longest)

    def hurry(self) -> None:
        """Nobody waits for the disk any more, and nothing further is kept: the server ends."""
        self.progress.hurry()

    def close(self, timeout: float = 5.0) -> None:
        """Finish what is being kept, for at most ``timeout`` seconds, give up the rest, and end the threads.

        No temporary file stays. Idempotent; in a fork of the process nothing.
        """
        if os.getpid() != self._process:
            return
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
        # Last: a process that does not wait for whoever is in here does it again as it ends.
        atexit.unregister(self.close)

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
        self.progress.moved()

    def _count(self, save: Save) -> None:
        with self.condition:
            self._stored += save.stored
            self._lost += save.lost and not save.stored

    def _sync_names(self) -> None:
        """Have the new entries' names on the disk: a crash may undo the renaming until then, and costs the entries."""
        with self.condition:
            unlisted, self._unlisted = self._unlisted, False
        if unlisted:
            self._cache.sync_names()

    def _started(self) -> bool:
        if len(self._threads) == len(_THREADS):
            return True
        for name in _THREADS[len(self._threads) :]:
            work = self._write_all if name == "save" else self._sync_all
            thread = Thread(target=work, name=f"weightwire-{name}", daemon=True)
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
                self.progress.moved(disk=True)
                if not going_on:
                    self._end(save)
            del save

    def _write(self, save: Save) -> bool:
        """Write the tensor to a temporary file. Whether that has to be synced now."""
        window, content_hash = save.window, save.content_hash
        if window is None or content_hash is None or save.cancelled:
            return False
        if self._cache.holds(content_hash, window, lambda: save.cancelled) or self._on_its_way(save, window):
            return False
        save.writer = writer = self._cache.writer()
        for start in range(0, window.nbytes, _STEP):
            if save.cancelled or writer.fd < 0:
                save.lost = save.lost or not save.cancelled
                return False
            writer.write(window[start : start + _STEP])
            # On its way to the disk now, and not all of it when it is synced.
            write_back(writer.fd, start, _STEP)
            with self.condition:
                if writer.fd >= 0:
                    save.written = min(start + _STEP, save.nbytes)
                    self.progress.moved(disk=True)
        del window
        with self.condition:
            # From here on the file has it all: what happens to the memory is of no matter.
            if save.cancelled or writer.fd < 0:
                save.lost = save.lost or not save.cancelled
                return False
            self._behind = False
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

    def _on_its_way(self, save: Save, window: memoryview) -> bool:
        """Whether a file with the very same content only waits for the disk. Looked at with the lock held, so that it
        is not closed meanwhile; several clients that push one model at once are the ones it is for.
        """
        fd = -1
        with self.condition:
            for other in (*self._to_sync, self._syncing):
                if other is None or other.content_hash != save.content_hash or other.nbytes != window.nbytes:
                    continue
                written = self._syncing_fd if other is self._syncing else other.writer.fd if other.writer else -1
                with contextlib.suppress(OSError):  # no descriptor is free
                    fd = os.dup(written)
                break
        if fd < 0:
            return False
        try:
            return same_bytes(fd, window, lambda: save.cancelled)
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
                with contextlib.suppress(OSError):  # no descriptor is free: they write it for themselves
                    self._syncing_fd = os.dup(save.writer.fd)
                self.condition.notify_all()
            try:
                self._sync(save)
            except Exception:
                logger.exception("cache %s: storing a tensor failed", self._cache.directory)
                save.lost = True
            with self.condition:
                if self._syncing_fd >= 0:
                    os.close(self._syncing_fd)
                self._syncing, self._syncing_fd = None, -1
                self.progress.moved(disk=True)
                self._end(save)
                more = bool(self._to_sync)
            del save
            if not more:
                self._sync_names()

    def _sync(self, save: Save) -> None:
        writer, content_hash = save.writer, save.content_hash
        assert writer is not None
        assert content_hash is not None
        with writer:
            # In steps that show as progress.
            for start in range(0, save.nbytes, _SYNC_STEP):
                if save.cancelled:
                    return
                write_back(writer.fd, start, _SYNC_STEP, wait=True)
                with self.condition:
                    self.progress.moved(disk=True)
            there = self._cache.holds_file(content_hash, writer.fd, save.nbytes, lambda: save.cancelled)
            if not there and not save.cancelled:
                save.stored = writer.commit(content_hash, lambda: not save.cancelled)
                save.lost = save.lost or not (save.stored or save.cancelled)
                with self.condition:
                    self._unlisted |= save.stored
