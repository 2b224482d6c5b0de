"""One client's buffers: handles, addresses, bounds, and which tensors lie where."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from weightwire.cache import progress
from weightwire.cache.kept import Save
from weightwire.cache.saving import Saver
from weightwire.errors import WeightwireError
from weightwire.server.capacity import MAX_BUFFERS, AddressSpace, Capacity
from weightwire.server.coverage import Coverage
from weightwire.server.destinations import Destination, HostMemory
from weightwire.server.errors import BadRequest, log_failure
from weightwire.server.populate import PopulateJob, Populator
from weightwire.server.served import MAX_TENSORS, Registry, ServedTensor
from weightwire.wire.tensor import RpcTensor

__all__ = ["MAX_CLIENT_BUFFERS", "Block", "Buffer", "BufferTable", "Located", "Placed"]

logger = logging.getLogger(__name__)

MAX_CLIENT_BUFFERS: Final = 4096
"""Buffers one client may hold, so that several clients can have some of `MAX_BUFFERS`."""


class Block:
    """A destination and how many need it: its buffer, and every listed tensor in it. Thread-safe, but for what is being
    kept of it, which is its session's own.
    """

    def __init__(self, destination: Destination, nbytes: int, capacity: Capacity, job: PopulateJob | None) -> None:
        self.destination = destination
        self.closed = False
        self._nbytes = nbytes
        self._capacity = capacity
        self._job = job
        self._users = 1
        self._saves: list[tuple[int, int, Save]] = []
        self._lock = threading.Lock()
        # Only this very class writes by memcpy and by nothing else; see HostMemory.
        self.direct: HostMemory | None = destination if type(destination) is HostMemory else None
        self._returns_itself = isinstance(destination, HostMemory)
        if isinstance(destination, HostMemory):
            destination.when_freed(lambda: capacity.give_back(nbytes))

    def reached(self, end: int, *, ahead: bool = True) -> None:
        """Data up to offset ``end`` is about to come; unless ``ahead``, memory behind it is not to be prepared yet."""
        if self._job is not None:
            self._job.reached(end, ahead=ahead)

    def keep(self, start: int, save: Save) -> None:
        """The tensor from byte ``start`` on is being written to the cache from this memory."""
        self._saves.append((start, start + save.nbytes, save))

    def kept(self, start: int, nbytes: int) -> bool:
        """Whether some of that range is needed for the cache at this moment."""
        return bool(self.needed(start, nbytes))

    def leave(self, saver: Saver) -> None:
        """The buffer is gone: what the cache still needs is all that the memory is there for, unless it is listed."""
        needed = self.needed(0, self._nbytes)
        if needed and self.closed:
            saver.leave(self._nbytes, [save for _, _, save in needed])

    def about_to_write(self, start: int, nbytes: int) -> None:
        """Must be called before any byte of the range changes: waits until the cache has what it needs of it."""
        self.settle(self.needed(start, nbytes), start + nbytes)

    @staticmethod
    def settle(needed: Iterable[tuple[int, int, Save]], end: int) -> None:
        """Return when bytes up to ``end`` of what is ``needed`` may change: `LONGEST` seconds later at most, for all of
        it. What the disk has not taken by then comes to no entry.
        """
        deadline = time.monotonic() + progress.LONGEST
        for low, _, save in needed:
            save.settle(end - low, max(0.0, deadline - time.monotonic()))

    def needed(self, start: int, nbytes: int) -> list[tuple[int, int, Save]]:
        """What of that range is needed for the cache at this moment: first byte, end, and for which tensor."""
        if not self._saves:
            return []
        self._saves = [entry for entry in self._saves if entry[2].window is not None]
        return [entry for entry in self._saves if entry[0] < start + nbytes and start < entry[1]]

    def hold(self) -> None:
        """One more needs the destination."""
        with self._lock:
            self._users += 1

    def drop(self) -> None:
        """One fewer; the last one closes the destination."""
        with self._lock:
            self._users -= 1
            if self._users or self.closed:
                return
            self.closed = True
        if self._job is not None:
            self._job.cancel()
        try:
            self.destination.close()
        except BaseException as error:
            log_failure(logger, error, "closing a destination of %d bytes failed", self._nbytes)
        if not self._returns_itself:
            self._capacity.give_back(self._nbytes)


class Placed:
    """One tensor somewhere in a buffer, and how much of it has been written."""

    __slots__ = ("coverage", "end", "identity", "served", "start")

    def __init__(self, identity: object, start: int, end: int) -> None:
        self.identity = identity
        self.start = start
        self.end = end
        self.coverage: Coverage | None = None
        self.served: ServedTensor | None = None


class Located(NamedTuple):
    """A tensor of a request, checked: it lies in ``buffer`` from byte ``start`` on and spans ``nbytes`` bytes."""

    tensor: RpcTensor
    buffer: Buffer
    start: int
    nbytes: int

    def range(self, offset: int, nbytes: int) -> int:
        """Where in the buffer bytes ``offset`` to ``offset + nbytes`` of the tensor start. BadRequest if they are not
        its.
        """
        if offset + nbytes > self.nbytes:
            raise BadRequest(
                f"bytes {offset} to {offset + nbytes} are not in tensor {self.tensor.label!r} of {self.nbytes} bytes"
            )
        return self.start + offset


class Buffer:
    """What one ALLOC_BUFFER made. ``block`` is None for a buffer of no bytes. Used by its session's thread only."""

    def __init__(self, handle: int, base: int, nbytes: int, block: Block | None, table: BufferTable) -> None:
        self.handle = handle
        self.base = base
        self.nbytes = nbytes
        self.block = block
        self._table = table
        self._starts: list[int] = []
        self._placed: list[Placed] = []
        self._empty: dict[object, Placed] = {}

    @property
    def memory(self) -> Block:
        """The block, for a range that has bytes."""
        if self.block is None:
            raise BadRequest("the buffer has no bytes")
        return self.block

    def begin(self, located: Located) -> Placed | None:
        """The tensor at this place, about to be written. Others that overlap it are gone with that.

        None if this client has too many tensors already for one more to be remembered.
        """
        tensor, start, nbytes = located.tensor, located.start, located.nbytes
        identity = (tensor.name, tensor.type, tensor.ne, tensor.nb)
        if not nbytes:
            return self._begin_empty(identity, start)
        end = start + nbytes
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start:
            there = self._placed[at]
            if there.identity == identity:
                if there.served is not None and not self._table.registry.listed(there.served):
                    # Forgotten, or replaced by another client's: written again, it counts as new.
                    there.served = None
                    there.coverage = None
                return there
        low = at - 1 if at and self._placed[at - 1].end > start else at
        high = bisect_left(self._starts, end, low)
        for old in self._placed[low:high]:
            self._unlist(old)
        placed = Placed(identity, start, end) if self._table.count(1 - (high - low)) else None
        self._starts[low:high] = [start] if placed else []
        self._placed[low:high] = [placed] if placed else []
        return placed

    def _begin_empty(self, identity: object, start: int) -> Placed | None:
        key = (identity, start)
        placed = self._empty.get(key)
        if placed is None and self._table.count(1):
            placed = self._empty[key] = Placed(identity, start, start)
        return placed

    def wrote(self, placed: Placed | None, located: Located, offset: int, nbytes: int) -> None:
        """Bytes ``offset`` to ``offset + nbytes`` of the tensor have arrived."""
        if placed is None or placed.served is not None:
            return
        if nbytes != located.nbytes:
            if placed.coverage is None:
                placed.coverage = Coverage(located.nbytes, self._table.registry.pieces)
            placed.coverage.add(offset, offset + nbytes)
            if not placed.coverage.complete:
                return
        self._complete(placed, located)

    def wrote_rows(
        self, placed: Placed | None, located: Located, offset: int, nbytes: int, rows: int, stride: int
    ) -> None:
        """Rows of the tensor have arrived."""
        if placed is None or placed.served is not None:
            return
        if placed.coverage is None:
            placed.coverage = Coverage(located.nbytes, self._table.registry.pieces)
        placed.coverage.add_rows(offset, nbytes, rows, stride)
        if placed.coverage.complete:
            self._complete(placed, located)

    def _complete(self, placed: Placed, located: Located) -> None:
        placed.coverage = None
        placed.served = ServedTensor(located.tensor, self.block, located.start, located.nbytes)
        self._table.completed += 1
        if not self._table.registry.add(placed.served):
            self._table.say_full()

    def spoil(self, placed: Placed | None) -> None:
        """The tensor's bytes are not what anybody sent: nothing of it counts as written."""
        if placed is not None:
            self._unlist(placed)
            placed.coverage = None

    def forget_all(self) -> None:
        """Every tensor in the buffer has been overwritten by something else, or its client has gone."""
        for placed in (*self._placed, *self._empty.values()):
            self._unlist(placed)
        self.leave_all()

    def leave_all(self) -> None:
        """Stop keeping track, leaving listed what is listed: the registry has its own bound on that."""
        self._table.count(-len(self._placed) - len(self._empty))
        self._starts, self._placed, self._empty = [], [], {}

    def _unlist(self, placed: Placed) -> None:
        if placed.served is not None:
            self._table.registry.remove(placed.served)
            placed.served = None


class BufferTable:
    """All buffers of one client. Handles and addresses are numbers of this session and mean nothing in another's.

    ``completed`` counts the tensors that have become complete, one that was replaced and came again twice.
    """

    def __init__(
        self,
        *,
        capacity: Capacity,
        registry: Registry,
        populator: Populator,
        destination: Callable[[int, int], Destination],
        saver: Saver | None = None,
    ) -> None:
        self.registry = registry
        self._saver = saver
        self._capacity = capacity
        self._populator = populator
        self._destination = destination
        self._space = AddressSpace()
        self._buffers: dict[int, Buffer] = {}
        self.completed = 0
        self._full = False

    def __len__(self) -> int:
        return len(self._buffers)

    def count(self, change: int) -> bool:
        """Note that ``change`` tensors more are remembered; False (and nothing noted) if that is more than all clients
        together may have.
        """
        if change > 0 and not self.registry.remembered.take(change):
            self.say_full()
            return False
        if change < 0:
            self.registry.remembered.give_back(-change)
        return True

    def say_full(self) -> None:
        """Log, once for this client, that a tensor of it is not listed."""
        if not self._full:
            logger.warning("the server has %d tensors, the most it lists; further ones are not listed", MAX_TENSORS)
        self._full = True

    def allocate(self, nbytes: int, device: int) -> Buffer | None:
        """A new buffer of ``nbytes`` bytes, or None if there is no room for it."""
        if len(self._buffers) >= MAX_CLIENT_BUFFERS:
            logger.info("a buffer of %d bytes refused: the client holds %d buffers", nbytes, MAX_CLIENT_BUFFERS)
            return None
        if not self._take(nbytes):
            if self._capacity.crowded:
                logger.info("a buffer of %d bytes refused: all clients together hold %d buffers", nbytes, MAX_BUFFERS)
            else:
                logger.info("a buffer of %d bytes refused: %d bytes are free", nbytes, self.free_bytes)
            return None
        handle = 0
        while not handle or handle in self._buffers:
            handle = secrets.randbits(63)
        if not nbytes:
            # As a stock server has it: a handle that can be freed, and an address of 0.
            buffer = self._buffers[handle] = Buffer(handle, 0, 0, None, self)
            return buffer
        base = self._space.place(nbytes)
        block: Block | None = None
        try:
            block = self._make(nbytes, device) if base is not None else None
        finally:
            if block is None:
                if base is not None:
                    self._space.vacate(base)
                self._capacity.give_back(nbytes)
        if base is None or block is None:
            return None
        buffer = self._buffers[handle] = Buffer(handle, base, nbytes, block, self)
        return buffer

    def _take(self, nbytes: int) -> bool:
        """Reserve the memory of a buffer, if need be once the cache has what it needs of buffers that are gone."""
        if self._capacity.take(nbytes):
            return True
        # The step that was being taken on a buffer when it was freed.
        self._populator.settle()
        if self._capacity.take(nbytes):
            return True
        saver = self._saver
        if saver is None or not saver.left or nbytes > self.free_bytes:
            return False
        return saver.clear(lambda: self._capacity.take(nbytes))

    @property
    def free_bytes(self) -> int:
        """How much memory can be had at this moment, what the cache would have to hand over included."""
        return min(self._capacity.total, self._capacity.free + (self._saver.left if self._saver is not None else 0))

    def _make(self, nbytes: int, device: int) -> Block | None:
        """The memory of a buffer, or None. Whatever it raises, nothing is left of what it had made."""
        try:
            destination = self._destination(nbytes, device)
        except (MemoryError, OverflowError, OSError, WeightwireError) as error:
            logger.info("a buffer of %d bytes refused: %s", nbytes, error)
            return None
        except Exception as error:
            log_failure(logger, error, "making a destination of %d bytes failed", nbytes)
            return None
        if not isinstance(destination, Destination):
            logger.error(
                "making a destination of %d bytes failed: what came is of type %s, which is not derived from "
                "weightwire.Destination", nbytes, type(destination).__name__,
            )  # fmt: skip
            return None
        made = getattr(destination, "nbytes", None)
        if not isinstance(made, int):
            logger.error(
                "making a destination of %d bytes failed: %s has no nbytes; its __init__ must call that of "
                "weightwire.Destination", nbytes, type(destination).__name__,
            )  # fmt: skip
        elif made < nbytes:
            logger.error("a destination of %d bytes was made where %d were wanted", made, nbytes)
        else:
            try:
                job = self._populator.add(destination.region) if isinstance(destination, HostMemory) else None
                return Block(destination, nbytes, self._capacity, job)
            except Exception as error:
                log_failure(logger, error, "a buffer of %d bytes refused", nbytes)
        try:
            destination.close()
        except Exception as error:
            log_failure(logger, error, "closing a destination of %d bytes failed", nbytes)
        return None

    def get(self, handle: int) -> Buffer:
        """The buffer behind ``handle``. BadRequest if this client has none of that handle."""
        buffer = self._buffers.get(handle)
        if buffer is None:
            raise BadRequest(f"no buffer has the handle {handle:#x}")
        return buffer

    def knows(self, handle: int) -> bool:
        """Whether `get` would find it."""
        return handle in self._buffers

    def locate(self, tensor: RpcTensor) -> Located:
        """Check a tensor's type, buffer and place. BadRequest if one of them is not right."""
        nbytes = span(tensor)
        buffer = self.get(tensor.buffer)
        start = tensor.data - buffer.base
        if start < 0 or start + nbytes > buffer.nbytes:
            raise BadRequest(
                f"tensor {tensor.label!r} of {nbytes} bytes at {tensor.data:#x} is not within its buffer of "
                f"{buffer.nbytes} bytes at {buffer.base:#x}"
            )
        return Located(tensor, buffer, start, nbytes)

    def free(self, handle: int) -> None:
        """Give a buffer back. BadRequest if there is none.

        What is being kept of it is kept; its memory is free after that, or when it is wanted.
        """
        buffer = self.get(handle)
        del self._buffers[handle]
        self._space.vacate(buffer.base)
        if self.registry.keep:
            buffer.leave_all()
        else:
            buffer.forget_all()
        if buffer.block is not None:
            buffer.block.drop()
            if self._saver is not None:
                buffer.block.leave(self._saver)
        else:
            self._capacity.give_back(0)

    def free_all(self) -> None:
        """Give everything back: the client has gone."""
        for handle in list(self._buffers):
            self.free(handle)


def span(tensor: RpcTensor) -> int:
    """Bytes a tensor spans. BadRequest if its type is none."""
    try:
        return tensor.nbytes
    except ValueError as error:
        raise BadRequest(f"tensor {tensor.label!r}: {error}") from None
