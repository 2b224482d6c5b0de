"""The states servers' caches can be in before a round, brought about and checked outside of the time that is taken."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from harness.rounds import Peer, Rounds, settle, side_by_side

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

_ENTRY = re.compile(r"[0-9a-f]{16}", re.ASCII)
_PATIENCE = 120


class State(Enum):
    """What the server's cache has of the model when a round begins, and what weightwire's index of hashes has of it."""

    NONE = "no cache"
    COLD = "cold"
    """Neither has anything; the client fills the index, as it does unless it is told otherwise."""
    WARM = "warm"
    """The cache has it all; the client fills the index, as it does with a file that it has not seen before."""
    INDEX = "warm, index"
    """Both have it all."""

    @property
    def warm(self) -> bool:
        """Whether the cache has it all."""
        return self in (State.WARM, State.INDEX)


class CachedPeer:
    """A peer whose servers keep a cache each, all in one ``state`` at the beginning of every round.

    ``caches`` has the directory of each server, and what it holds when it is full: the bytes of each entry by its name.
    `prepare` and `finish` come before and after each `round`, untimed. A cold round begins with empty directories; it
    leaves every entry, written back to the disk, so that no later round of anybody waits for that. In a warm round no
    entry may be written: one that is shows that the cache was not used.
    """

    def __init__(
        self, peer: Peer, caches: Mapping[Path, Mapping[str, int]], state: State, index: Path | None = None
    ) -> None:
        self.name = peer.name
        #: Seconds after the end of each round until all entries were in place (a server may still be writing them).
        self.late: list[float] = []
        self._peer = peer
        self._caches = {directory: dict(expected) for directory, expected in caches.items()}
        self._state = state
        self._index = index
        self._before: dict[Path, dict[str, int]] = {}

    def prepare(self) -> None:
        """Bring the directories into their state."""
        if self._state is State.COLD:
            self._empty()
            if self._index is not None:
                empty(self._index)
        elif self._state.warm:
            if any(entries(directory) != expected for directory, expected in self._caches.items()):
                self._fill()
            if self._state is State.WARM and self._index is not None:
                empty(self._index)
            self._before = self._written()

    def round(self) -> float:
        return self._peer.round()

    def finish(self) -> None:
        """Wait for what the server still has to write, and look at what it wrote. RuntimeError if that is not what this
        state should lead to.
        """
        if self._state is State.COLD:
            started = time.perf_counter()
            self._wait_for_entries()
            self.late.append(time.perf_counter() - started)
            self._write_back()
        elif self._state.warm and self._written() != self._before:
            raise RuntimeError(f"{self.name}: a round with a warm cache wrote entries")

    def close(self) -> None:
        self._peer.close()

    def _fill(self) -> None:
        self._empty()
        self._peer.round()
        self._wait_for_entries()
        self._write_back()

    def _empty(self) -> None:
        for directory in self._caches:
            empty(directory)

    def _written(self) -> dict[Path, dict[str, int]]:
        return {directory: written(directory) for directory in self._caches}

    def _write_back(self) -> None:
        for directory in self._caches:
            write_back(directory)

    def _wait_for_entries(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        for directory, expected in self._caches.items():
            while (found := entries(directory)) != expected:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{self.name}: {len(found)} cache entries of {sum(found.values())} bytes, expected "
                        f"{len(expected)} of {sum(expected.values())}"
                    )
                time.sleep(0.002)


def push_options(state: State, index: Path) -> dict[str, object]:
    """How weightwire's client pushes in a ``state``, with its index in the folder ``index``."""
    if state is State.NONE:
        return {"cache": "never"}
    return {"cache": "auto", "index": str(index / "index.sqlite3")}


def cached_rounds(
    benchmark: BenchmarkFixture,
    subject: CachedPeer,
    others: Sequence[CachedPeer],
    nbytes: int,
    rounds: int,
    warmed_up: Callable[[], object],
) -> Rounds:
    """What each peer took in every round, after one of each that does not count; between them ``warmed_up`` is called.

    Each round begins in the peer's state, with memory that is warm for ``nbytes``.
    """
    taken = Rounds(nbytes)

    def before(peer: CachedPeer) -> None:
        peer.prepare()
        settle(nbytes)

    for peer in (subject, *others):  # the page cache, allocators, the congestion window
        before(peer)
        peer.round()
        peer.finish()
    subject.late.clear()
    warmed_up()
    side_by_side(
        benchmark,
        subject,
        others,
        rounds,
        before=before,
        run=lambda peer: taken.add(peer.name, peer.round()),
        after=CachedPeer.finish,
    )
    return taken


def entries(directory: Path) -> dict[str, int]:
    """The bytes of each entry by its name; temporary and other files are none."""
    with os.scandir(directory) as found:
        return {entry.name: entry.stat().st_size for entry in found if _ENTRY.fullmatch(entry.name)}


def written(directory: Path) -> dict[str, int]:
    """When each entry was last written, nanoseconds."""
    with os.scandir(directory) as found:
        return {entry.name: entry.stat().st_mtime_ns for entry in found if _ENTRY.fullmatch(entry.name)}


def empty(directory: Path) -> None:
    """Remove the files of the directory, and see that the disk knows."""
    for name in os.listdir(directory):
        with contextlib.suppress(IsADirectoryError, FileNotFoundError):
            os.unlink(directory / name)
    _sync(directory)


def write_back(directory: Path) -> None:
    """Wait until the entries are on the disk; they stay in the page cache."""
    for name in entries(directory):
        _sync(directory / name)
    _sync(directory)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_system(path: Path) -> str:
    """The kind of file system that ``path`` is on, such as ext4 (proc_pid_mountinfo(5))."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return "unknown"
