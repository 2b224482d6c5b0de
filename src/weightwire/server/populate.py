"""Touching fresh memory ahead of the data, on a thread of its own.

The first touch of anonymous memory costs more than a fast wire takes to deliver a page, so buffers are populated from
the moment they are allocated, at most `LOOK_AHEAD` bytes past the highest byte written or being received.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from weightwire.threads import Thread

if TYPE_CHECKING:
    from weightwire.transport.memory import HostRegion

__all__ = ["LOOK_AHEAD", "STEP", "PopulateJob", "Populator"]

logger = logging.getLogger(__name__)

LOOK_AHEAD: Final = 256 << 20
STEP: Final = 8 << 20
"""Bytes per call: what a buffer that is freed, or a server that closes, has to wait for (about a millisecond)."""

_HUGE_PAGE: Final = 2 << 20
_NEVER: Final = 1 << 64


class PopulateJob:
    """One region being populated. `reached` and `cancel`, from any thread, do not wait for the worker."""

    __slots__ = ("_ahead", "_nbytes", "_next", "_owner", "_reach", "_region", "_wake_at")

    def __init__(self, owner: Populator, region: HostRegion) -> None:
        self._owner = owner
        self._region: HostRegion | None = region
        self._nbytes = region.nbytes
        self._next = 0
        self._reach = 0
        self._ahead = True
        self._wake_at = _NEVER

    @property
    def done(self) -> int:
        """Offset up to which the worker has populated or has been overtaken, bytes."""
        return self._next

    def reached(self, end: int, *, ahead: bool = True) -> None:
        """Data up to offset ``end`` is there or on its way. Unless ``ahead``, what comes behind it is left alone until
        this is called again: nothing slower than memory is waited for.
        """
        self._ahead = ahead
        if end > self._reach:
            self._reach = end
        # Written by the worker after it has looked at the two above: it or this always sees what the other wrote.
        if ahead and self._reach >= self._wake_at:
            self._owner.wake(self)

    def cancel(self) -> None:
        """Let go of the region; the worker drops it after the step it is in."""
        self._region = None
        self._nbytes = 0

    def step(self) -> bool:
        """Populate the next few MiB. False when there is nothing (more) to do for now; called by the worker only."""
        region = self._region
        if region is None:
            return False
        # What the data has reached is touched already; to follow behind would only get in its way.
        start = max(self._next, -(-self._reach // _HUGE_PAGE) * _HUGE_PAGE)
        self._next = start
        end = min(start + STEP, self._nbytes, self._reach + (LOOK_AHEAD if self._ahead else 0))
        if start >= end:
            return False
        region.populate(start, end - start)
        self._next = end
        return True

    def park(self) -> bool:
        """Ask to be woken when the data has used up half of the look-ahead; False if it already has."""
        if self._region is None or self._next >= self._nbytes:
            self._wake_at = _NEVER
            return True
        self._wake_at = max(0, self._next - LOOK_AHEAD // 2)
        if self._ahead and self._reach >= self._wake_at:
            self._wake_at = _NEVER
            return False
        return True

    def unpark(self) -> bool:
        """Whether the job was parked; it no longer is."""
        parked = self._wake_at != _NEVER
        self._wake_at = _NEVER
        return parked


class Populator:
    """The worker thread; it starts with the first job. Without one to be had, the data touches its pages itself.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._ready: deque[PopulateJob] = deque()
        self._thread: Thread | None = None
        self._busy = False
        self._steps = 0
        self._closing = False

    def add(self, region: HostRegion) -> PopulateJob:
        """Start populating ``region``."""
        job = PopulateJob(self, region)
        with self._condition:
            if self._closing:
                return job
            if self._thread is None:
                self._begin()
            if self._thread is None:
                job.cancel()  # nobody would ever let go of its region
                return job
            self._ready.append(job)
            self._condition.notify_all()
        return job

    def _begin(self) -> None:
        thread = Thread(target=self._work, name="weightwire-populate", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.debug("no thread to populate memory ahead of the data: %s", error)
        else:
            self._thread = thread

    def wake(self, job: PopulateJob) -> None:
        """Put a parked job back to work."""
        with self._condition:
            if job.unpark():
                self._ready.append(job)
                self._condition.notify_all()

    def settle(self, timeout: float = 1.0) -> None:
        """Wait until the worker has let go of regions that were cancelled: until the end of the step it is in."""
        with self._condition:
            seen = self._steps
            self._condition.wait_for(lambda: not self._busy or self._steps != seen, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """End the thread after the step it is in, waiting for it at most ``timeout`` seconds. Idempotent."""
        with self._condition:
            self._closing = True
            self._ready.clear()
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._ready and not self._closing:
                    self._condition.wait()
                if self._closing:
                    return
                job = self._ready.popleft()
                self._busy = True
            more = self._step(job)
            with self._condition:
                self._busy = False
                self._steps += 1
                self._condition.notify_all()
                if self._closing:
                    return
                if more or not job.park():
                    self._ready.append(job)
            # Nothing may keep the last job's region alive while this thread waits.
            del job

    @staticmethod
    def _step(job: PopulateJob) -> bool:
        try:
            return job.step()
        except Exception:
            # Touching ahead only saves time: without it the data touches the pages itself.
            logger.debug("populating memory ahead of the data failed", exc_info=True)
            job.cancel()
            return False
