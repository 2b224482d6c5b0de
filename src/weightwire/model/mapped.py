"""Arrays that lie in mapped files: their bytes by position instead of through the mapping.

Touching a page that a file has lost since it was mapped ends the process (SIGBUS, mmap(2)); a read(2) that meets the
same is an error. So memory with a file behind it is read from that file, or, where the file cannot be opened any more
or memory and file may differ (a private mapping), from ``/proc/self/mem``, which copies pages on this process's behalf
and says EIO where there is none (proc(5)).
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from weightwire.errors import ModelError
from weightwire.model.base import ModelFile
from weightwire.ranges import FileRange, model_closed

__all__ = ["MappedFiles", "MappedRange", "lies_in_a_file", "reading", "written_through_mappings"]

# Shared anonymous memory has an inode as well, but nothing that could cut it short.
_ANONYMOUS = ("/dev/zero (deleted)", "/anon_hugepage (deleted)", "/SYSV")


# Arrays and views, each made of the next: numpy keeps such chains to two or three.
_CHAIN = 32


class _Area(NamedTuple):
    start: int
    end: int
    shared: bool
    writable: bool
    offset: int
    device: str
    inode: int
    path: str


class _Behind(ModelFile):
    """A file behind a mapping. Where this process may write to it through one, only its size counts."""

    needed = 0
    watched = False
    """Whether it may not be written to meanwhile."""

    def range(self, offset: int, nbytes: int) -> FileRange:
        """``nbytes`` bytes from byte ``offset``, by reference; not ``dated`` where writing sets no time."""
        return FileRange(self.fd, offset, nbytes, self.path, dated=self.watched)

    def check_unchanged(self) -> None:
        """ModelError if the file no longer has the bytes that are wanted of it, or is closed."""
        if self.closed:
            raise model_closed(self.path)
        status = os.fstat(self.fd)
        size = status.st_size
        if self.watched and (size, status.st_mtime_ns) != (self.size, self.mtime_ns) and size >= self.needed:
            raise ModelError(
                "file was modified since its array was looked at",
                path=self.path,
                hint="something writes to it; load the array again when that is done",
            )
        if size < self.needed:
            raise ModelError(
                f"file is shorter than its mapping: {size} bytes, where byte {self.needed - 1} is in an array",
                path=self.path,
                hint="something cut it short; load the array again",
            )


class MappedRange(NamedTuple):
    """``nbytes`` bytes of memory: at ``offset`` of ``file``, which is the mapped one or this process's memory."""

    file: ModelFile
    offset: int


class MappedFiles:
    """Which of this process's memory lies in files that were mapped when this was made, and those files, opened."""

    def __init__(self) -> None:
        self._areas = _areas()
        self._starts = [area.start for area in self._areas]
        self._opened: dict[object, _Behind] = {}

    @property
    def files(self) -> tuple[ModelFile, ...]:
        """What was opened so far."""
        return tuple(self._opened.values())

    def close(self) -> None:
        """Close what was opened. Idempotent; never raises."""
        for file in self._opened.values():
            file.close()

    def find(self, address: int, nbytes: int) -> MappedRange | None:
        """Where to read the ``nbytes`` bytes at ``address`` from; None if no file lies behind any of them.

        ModelError if their file is too short for them already or there is no way to read them.
        """
        end = address + nbytes
        at = max(bisect_right(self._starts, address) - 1, 0)
        hit = []
        while at < len(self._areas) and self._areas[at].start < end:
            if self._areas[at].end > address:
                hit.append(self._areas[at])
            at += 1
        if not hit:
            return None
        area = hit[0]
        file = self._open(area) if area.shared and area.start <= address and end <= area.end else None
        if file is None:
            return MappedRange(self._memory(area), address)
        offset = area.offset + address - area.start
        file.needed = max(file.needed, offset + nbytes)
        file.check_unchanged()
        return MappedRange(file, offset)

    def _open(self, area: _Area) -> _Behind | None:
        """The very file that is mapped, if its name still leads to it and it may be read."""
        key = (area.device, area.inode)
        if key not in self._opened:
            try:
                file = _Behind(area.path)
            except ModelError:
                return None
            if _key(os.fstat(file.fd)) != key:
                file.close()
                return None
            # Its owner may write through a mapping of his own, and mean it; what comes in another way he cannot.
            file.watched = not any(
                other.shared and other.writable for other in self._areas if (other.device, other.inode) == key
            )
            self._opened[key] = file
        return self._opened[key]

    def _memory(self, area: _Area) -> _Behind:
        # One for each mapping: who reads neighbouring ranges of a file at once must find no hole between them.
        if area.start not in self._opened:
            try:
                file = _Behind("/proc/self/mem")
            except ModelError as error:
                raise ModelError(
                    f"an array lies in the mapped file {area.path}, which could be cut short: {error.detail}",
                    hint="pass a copy: numpy.array(x)",
                ) from error
            file.path = f"memory mapped from {area.path}"
            self._opened[area.start] = file
        return self._opened[area.start]


def written_through_mappings(fds: Iterable[int]) -> set[int]:
    """Those of the open files ``fds`` that this process may write to through a mapping. Their times do not tell what is
    in them: they need not be set before the next msync(2) (mmap(2)), and Linux sets them once for many writes of a
    page.

    A file that cannot be looked at is none of them.
    """
    areas = [area for area in _areas() if area.shared and area.writable]
    if not areas:
        return set()
    inodes = {(area.device, area.inode) for area in areas}
    # On some file systems (overlayfs, btrfs) a mapping has another device than stat(2) says.
    paths = {area.path for area in areas}
    found = set()
    for fd in fds:
        with suppress(OSError):
            status = os.fstat(fd)
            if _key(status) in inodes or os.readlink(f"/proc/self/fd/{fd}") in paths:
                found.add(fd)
    return found


def lies_in_a_file(view: memoryview) -> bool:
    """Whether a mapped file is behind any of a contiguous buffer's bytes."""
    mapped = MappedFiles()
    try:
        return mapped.find(_address(view), view.nbytes) is not None
    except ModelError:
        return True  # one that was cut short
    finally:
        mapped.close()


@contextmanager
def reading(data: object, view: memoryview) -> Iterator[memoryview | FileRange]:
    """How the bytes of ``view``, a buffer of ``data``, are sent: by position if they lie in a mapped file (`mmap`,
    `numpy.memmap`; a mapping that Python does not know of is not looked for), as they lie otherwise.

    ModelError for a mapped file that is too short already.
    """
    if not _is_mapped(data):
        yield view
        return
    mapped = MappedFiles()
    try:
        where = mapped.find(_address(view), view.nbytes)
        yield view if where is None else where.file.range(where.offset, view.nbytes)
    finally:
        mapped.close()


def _is_mapped(data: object) -> bool:
    """Whether an `mmap` is what ``data`` was made of."""
    for _ in range(_CHAIN):
        if data is None or isinstance(data, mmap.mmap):
            break
        data = data.obj if isinstance(data, memoryview) else getattr(data, "base", None)
    return isinstance(data, mmap.mmap)


def _key(status: os.stat_result) -> tuple[str, int]:
    """Device and inode as proc(5) has them for a mapping."""
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino


def _address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def _areas() -> list[_Area]:
    """The parts of this process's memory with a file behind them, in ascending order (proc(5), /proc/pid/maps)."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            lines = maps.read().splitlines()
    except OSError:
        return []
    areas = []
    for line in lines:
        span, permissions, offset, device, inode, *rest = line.split(maxsplit=5)
        path = os.fsdecode(rest[0]).replace("\\012", "\n") if rest else ""
        if inode == b"0" or path.startswith(_ANONYMOUS):
            continue
        start, _, end = span.partition(b"-")
        shared = permissions.endswith(b"s")
        writable = permissions[1:2] == b"w"
        where = int(offset, 16), device.decode(), int(inode), path
        areas.append(_Area(int(start, 16), int(end, 16), shared, writable, *where))
    return areas
