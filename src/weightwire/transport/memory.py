"""Host memory for tensors, how much of it there is, and what of a file is in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from weightwire._native import _memory
from weightwire.errors import AllocationError

__all__ = ["HostRegion", "available_memory", "cleared_memory", "first_difference", "resident_bytes"]

HostRegion = _memory.HostRegion
first_difference = _memory.first_difference
resident_bytes = _memory.resident_bytes


def available_memory() -> int:
    """Bytes of memory this process can still be given without swapping.

    The least of what the machine has and what the control groups above this process leave. Never negative.
    Source: proc(5) MemAvailable; the kernel's cgroup-v2.rst, memory.max, and cgroup-v1 memory.rst.
    """
    available = _mem_available(Path("/proc/meminfo"))
    limits = [left for left in _cgroup_room(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")) if left is not None]
    return max(0, min([available, *limits]))


_SURELY_THERE: Final = 64 << 20


def cleared_memory(nbytes: int, what: str) -> memoryview:
    """``nbytes`` bytes of ordinary memory, every one of them written with zero. AllocationError, which names ``what``
    they are for, where they are not to be had: the system would give them and then kill whoever writes them.
    """
    if nbytes <= _SURELY_THERE or nbytes <= available_memory():
        try:
            return memoryview(bytearray(nbytes))
        except MemoryError:
            pass
    raise AllocationError(
        f"there is no memory for {what} of {nbytes} bytes",
        nbytes=nbytes,
        hint="the optimized way of loading, which is the default, needs none for it",
    )


def _mem_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_room(membership: Path, root: Path) -> list[int | None]:
    """What each memory control group above this process leaves; ``None`` where one sets no limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    room: list[int | None] = []
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's, and what is mounted here is the group itself.
        group = top / path.lstrip("/")
        group = group if group.is_dir() else top
        while True:
            room.append(_group_room(group, *names))
            if group == top or top not in group.parents:
                break
            group = group.parent
    return room


def _group_room(group: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    try:
        limit = (group / limit_file).read_text().strip()
        if limit == "max":
            return None
        usage = int((group / usage_file).read_text())
        # File pages nobody has used of late count as used, but give way.
        reclaimable = 0
        for line in (group / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == cache_key:
                reclaimable = int(value)
        return int(limit) - usage + min(reclaimable, usage)
    except (OSError, ValueError):
        return None
