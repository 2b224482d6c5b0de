"""Hash tensors ahead of those who send them, on several threads, each tensor once however many want it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from queue import Empty, SimpleQueue
from typing import Final

from weightwire.client.sources import hash_blocks
from weightwire.errors import ModelError
from weightwire.hashing import hash_payloads
from weightwire.index import Hashes, hash_together, hash_with_digest
from weightwire.ranges import FileRange
from weightwire.threads import Thread

__all__ = ["HashFeed", "HashPool"]

_log = logging.getLogger(__name__)

_LOOK: Final = 0.2
"""Seconds between two looks around while a hash is waited for: a tensor can take minutes."""

Payload = FileRange | memoryview
Watch = Callable[[], object]


class _State(IntEnum):
    WAITING = 0
    RUNNING = 1
    DONE = 2


class _Cancelled(Exception):
    """The pool was closed."""


class HashPool:
    """FNV-1a 64 of ``payloads``, on ``threads`` threads of its own; with 0, on the thread that asks.

    ``known`` has the hashes that are known beforehand, by number of payload; those payloads are not read for them.
    ``digest`` are the numbers whose BLAKE3 is wanted, too: it is taken in the same pass over the bytes. ``group``
    payloads are hashed together by one thread, but for those numbered ``blocks``, which are read ahead in large blocks.
    ``plain`` hashes byte by byte, and takes no BLAKE3. Who wants hashes makes a `feed` before `start`.

    `start` and `close` belong to one ``try`` and its ``finally``: an interrupt may come at any moment. The first
    failure of any thread is raised to everybody who asks afterwards.
    """

    def __init__(
        self,
        payloads: Sequence[Payload],
        *,
        threads: int,
        known: Mapping[int, int] | None = None,
        digest: Collection[int] = (),
        group: int = 1,
        blocks: frozenset[int] = frozenset(),
        plain: bool = False,
    ) -> None:
        self._payloads = payloads
        self._plain = plain
        self._count = threads
        self._group = max(group, 1)
        # Only the threads wait for the condition, and it is entered by its lock: an interrupt in the Python code of
        # either would leave that taken, or have it released by who does not hold it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._callers: list[SimpleQueue[None]] = []
        self._hashes: list[int | None] = [None] * len(payloads)
        self._state = [_State.WAITING] * len(payloads)
        for index, value in (known or {}).items():
            self._hashes[index] = value
            self._state[index] = _State.DONE
        self._known = frozenset(known or {})
        self._wanted = frozenset(digest)
        self._digests: dict[int, bytes] = {}
        self._blocks = blocks
        self._feeds: list[HashFeed] = []
        self._turn = 0
        self._threads: list[Thread] = []
        self._failure: BaseException | None = None
        self._closed = False
        self.spent_ns = 0
        """What its threads have spent on hashing so far, summed over them."""

    def feed(self, order: Sequence[int], in_flight: int) -> HashFeed:
        """The hashes of the payloads numbered ``order``, one after the other, for one who sends them.

        At most ``in_flight`` bytes of them are hashed before `HashFeed.release`, or one larger payload alone.
        """
        feed = HashFeed(self, order, in_flight)
        self._feeds.append(feed)
        return feed

    def start(self) -> None:
        """Begin with the first payloads of every feed."""
        work = sum(state is _State.WAITING for state in self._state)
        for number in range(min(self._count, work)):
            thread = Thread(target=self._work, name=f"weightwire-hash-{number}")
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more of them
                self._threads.pop()
                self._count = len(self._threads)
                _log.warning("only %d of the threads that hash could be started: %s", self._count, error)
                return

    def close(self) -> None:
        """Stop, within about a tenth of a second where files take no longer to read 1 MiB; afterwards nothing reads the
        payloads, so files may be closed.
        """
        try:
            self._end()
        except BaseException:
            self._end()  # whoever interrupts this closes the files next
            raise

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            self._tell()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def check(self) -> None:
        """Raise what a thread failed with, if one did."""
        if self._failure is not None:
            raise self._failure

    @property
    def threads(self) -> int:
        """How many threads it may use."""
        return self._count

    def results(self) -> dict[int, Hashes]:
        """Both hashes of those whose BLAKE3 was wanted and which were hashed here, by payload."""
        with self._lock:
            return {
                index: Hashes(value, digest)
                for index, digest in sorted(self._digests.items())
                if (value := self._hashes[index]) is not None
            }

    def hash_of(self, index: int) -> int | None:
        """The hash of payload number ``index``, if it is known by now."""
        return self._hashes[index]

    # For feeds and workers.

    def _tell(self) -> None:
        """Something has changed. The lock is held."""
        self._changed.notify_all()
        for caller in self._callers:
            caller.put(None)

    def _wait(self, done: Callable[[], bool], watch: Watch) -> None:
        told: SimpleQueue[None] = SimpleQueue()
        with self._lock:
            self._callers.append(told)
        try:
            until = time.monotonic() + _LOOK
            while True:
                with self._lock:
                    if done() or self._failure is not None or self._closed:
                        self.check()
                        if not done():
                            raise RuntimeError("the hashes were given up")
                        return
                try:
                    told.get(timeout=max(0.0, until - time.monotonic()))
                except Empty:
                    watch()
                    until = time.monotonic() + _LOOK
        finally:
            with self._lock:
                self._callers.remove(told)

    def _work(self) -> None:
        try:
            while True:
                with self._lock:
                    while not (indices := self._take()):
                        if self._closed:
                            return
                        self._changed.wait()
                    if self._closed:
                        return
                self._run(indices)
        except _Cancelled:
            pass
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
                self._tell()

    def _stop_if_closed(self) -> None:
        if self._closed or self._failure is not None:
            raise _Cancelled

    def _take(self) -> list[int]:
        """Payloads to do next, none if there is nothing to do. The lock is held."""
        if self._closed or self._failure is not None:
            return []
        for step in range(len(self._feeds)):
            feed = self._feeds[(self._turn + step) % len(self._feeds)]
            indices = feed._take(self._group)
            if indices:
                self._turn += step + 1
                return indices
        return []

    def _run(self, indices: list[int]) -> None:
        started = time.monotonic_ns()
        found = self._hash(indices, self._stop_if_closed)
        with self._lock:
            self.spent_ns += time.monotonic_ns() - started
            self._note(indices, found)

    def _note(self, indices: Sequence[int], found: Sequence[Hashes]) -> None:
        """They are done. The lock is held."""
        for index, hashes in zip(indices, found, strict=True):
            self._hashes[index] = hashes.fnv1a
            self._state[index] = _State.DONE
            if hashes.blake3:
                self._digests[index] = hashes.blake3
        self._tell()

    def _hash(self, indices: Sequence[int], check: Watch) -> list[Hashes]:
        payloads = [self._payloads[index] for index in indices]
        if self._plain:
            return [Hashes(value, b"") for value in hash_payloads(payloads, check=check, plain=True)]
        if len(indices) == 1 or not self._blocks.isdisjoint(indices):
            return [self._hash_one(index, check) for index in indices]
        if self._wanted.isdisjoint(indices):
            return [Hashes(value, b"") for value in hash_payloads(payloads, check=check)]
        return hash_together(payloads, [index in self._wanted for index in indices], check)

    def _hash_one(self, index: int, check: Watch) -> Hashes:
        payload, digest = self._payloads[index], index in self._wanted
        if index in self._blocks and isinstance(payload, FileRange):
            return hash_blocks(payload, check, digest=digest)
        if digest:
            return hash_with_digest(payload, check)
        return Hashes(hash_payloads([payload], check=check)[0], b"")


class HashFeed:
    """The hashes of some of a pool's payloads, in the order of one sender; made by `HashPool.feed`.

    ``get`` and ``release`` take positions in that order, and ``known`` of its hashes were known beforehand. Used by one
    thread.
    """

    def __init__(self, pool: HashPool, order: Sequence[int], in_flight: int) -> None:
        self.pool = pool
        self._order = order
        self.in_flight = in_flight
        self._next = 0
        self._demand = -1
        self._bytes = 0
        self.known = sum(index in pool._known for index in order)
        self._held: set[int] = set()

    def __len__(self) -> int:
        return len(self._order)

    def spent_before(self) -> int:
        """What of the pool's ``spent_ns`` so far was not for this sender: nothing, if there is no other, however early
        the threads began.
        """
        return 0 if len(self.pool._feeds) == 1 else self.pool.spent_ns

    def get(self, position: int, watch: Watch) -> int:
        """The hash of the payload at ``position``, waited for if need be.

        ``watch`` is called a few times a second meanwhile; what it raises ends the wait. Raises ModelError where a
        file, be it another one's, cannot be read.
        """
        pool, index = self.pool, self._order[position]
        pool.check()
        here = pool.threads == 0
        while (value := pool._hashes[index]) is None:
            with pool._lock:
                self._demand = max(self._demand, position)
                indices = self._take(pool._group) if here and pool._state[index] is _State.WAITING else []
                pool._tell()
            if indices:
                self._hash_here(indices, watch)
            else:
                # Without threads it is another feed's caller who is at it, and he may give up.
                pool._wait(
                    lambda: pool._state[index] is _State.DONE or (here and pool._state[index] is _State.WAITING), watch
                )
        return value

    def release(self, position: int) -> None:
        """The payload at ``position`` has been dealt with; others may be hashed in its place."""
        with self.pool._lock:
            self._let_go(self._order[position])
            self.pool._tell()

    def leave_out(self, positions: Collection[int]) -> None:
        """Want the payloads at ``positions`` no more; those behind move up. Before the first `get`."""
        with self.pool._lock:
            gone = {self._order[position] for position in positions}
            self._order = [index for index in self._order if index not in gone]
            self.known = sum(index in self.pool._known for index in self._order)
            self._next = 0
            for index in gone:
                self._let_go(index)
            self.pool._tell()

    def close(self) -> None:
        """Want no more hashes; what another feed wants goes on."""
        with self.pool._lock:
            self._next = len(self._order)
            self._held.clear()
            self._bytes = 0
            self.pool._tell()

    # The lock is held in these.

    def _take(self, group: int) -> list[int]:
        """The next payloads to hash, at most ``group`` of them, as far as the bytes in flight allow; now running."""
        pool, order = self.pool, self._order
        if self._demand >= 0 and pool._state[order[self._demand]] is _State.WAITING:
            self._next = min(self._next, self._demand)  # somebody else began it and gave up
        taken: list[int] = []
        while self._next < len(order) and len(taken) < group:
            index = order[self._next]
            if pool._state[index] is _State.WAITING:
                nbytes = pool._payloads[index].nbytes
                full = self._bytes > 0 and self._bytes + nbytes > self.in_flight
                if full and (taken or self._next > self._demand):
                    break
                pool._state[index] = _State.RUNNING
                self._held.add(index)
                self._bytes += nbytes
                taken.append(index)
            self._next += 1
        return taken

    def _let_go(self, index: int) -> None:
        if index in self._held:
            self._held.remove(index)
            self._bytes -= self.pool._payloads[index].nbytes

    # Without threads.

    def _hash_here(self, indices: list[int], watch: Watch) -> None:
        pool = self.pool
        looked = time.monotonic()

        def check() -> None:
            nonlocal looked
            if time.monotonic() - looked >= _LOOK:
                watch()
                looked = time.monotonic()

        try:
            found = pool._hash(indices, check)
        except BaseException as error:
            with pool._lock:
                for index in indices:
                    pool._state[index] = _State.WAITING
                if isinstance(error, ModelError):
                    pool._failure = pool._failure or error
                pool._tell()
            raise
        with pool._lock:
            pool._note(indices, found)
