from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pagecache import cache, need_droppable

from weightwire.errors import AllocationError
from weightwire.transport import memory
from weightwire.transport.memory import HostRegion, available_memory, first_difference

MiB = 1 << 20


def address(region: HostRegion) -> int:
    return np.frombuffer(region, dtype=np.uint8).ctypes.data


def mapping_of(at: int) -> str | None:
    """The line of /proc/self/smaps that begins the mapping which holds the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= at < high:
            return line
    return None


def resident(at: int, nbytes: int) -> list[bool]:
    page = resource.getpagesize()
    pages = (nbytes + page - 1) // page
    answer = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), answer) == 0
    return [bool(byte & 1) for byte in answer]


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 2 * MiB - 1, 2 * MiB, 2 * MiB + 1, 9 * MiB + 3])
def test_zeroes_writable_and_aligned(nbytes: int) -> None:
    region = HostRegion(nbytes)
    view = memoryview(region)
    assert view.nbytes == region.nbytes == len(region) == nbytes
    assert not view.readonly
    assert address(region) % (2 * MiB) == 0
    assert first_difference(view, bytes(nbytes)) == -1
    view[-1] = 7
    assert region.nbytes == nbytes
    assert bytes(view[-1:]) == b"\7"


def test_an_empty_region() -> None:
    region = HostRegion(0)
    assert bytes(memoryview(region)) == b""
    region.populate(0, 0)
    region.fill(0, 0, 9)


def test_views_keep_the_memory_and_the_last_one_gives_it_back() -> None:
    region = HostRegion(4 * MiB)
    at = address(region)
    region.fill(0, 4 * MiB, 0xAB)
    array = np.frombuffer(region, dtype=np.uint16)[10:20]
    view = memoryview(region)[100:200]
    del region
    gc.collect()
    assert (array == 0xABAB).all()
    assert bytes(view) == b"\xab" * 100
    assert mapping_of(at) is not None
    before = os_rss()
    del array
    gc.collect()
    assert bytes(view) == b"\xab" * 100
    del view
    gc.collect()
    assert before - os_rss() > 3 * MiB


def os_rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_nothing_is_touched_before_it_is_asked_for() -> None:
    region = HostRegion(64 * MiB)
    assert not any(resident(address(region), 64 * MiB))


def test_populate_touches_the_range_it_was_given() -> None:
    region = HostRegion(64 * MiB)
    region.populate(8 * MiB + 5, 16 * MiB)
    page = resource.getpagesize()
    touched = resident(address(region), 64 * MiB)
    assert all(touched[8 * MiB // page : 24 * MiB // page + 1])
    assert not any(touched[: 6 * MiB // page])
    assert not any(touched[28 * MiB // page :])
    assert first_difference(region, bytes(64 * MiB)) == -1


def test_populate_overwrites_nothing() -> None:
    region = HostRegion(6 * MiB)
    data = os.urandom(6 * MiB)
    memoryview(region)[:] = data
    region.populate(0, 6 * MiB)
    assert first_difference(region, data) == -1


def test_populate_overwrites_nothing_that_comes_meanwhile() -> None:
    size = 96 * MiB
    region = HostRegion(size)
    data = np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8)
    thread = threading.Thread(target=lambda: [region.populate(at, MiB) for at in range(0, size, MiB)])
    thread.start()
    np.frombuffer(region, dtype=np.uint8)[:] = data
    thread.join()
    assert first_difference(region, data) == -1


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 5), (0, -1), (0, 4097), (4097, 0), (2**70, 1), (1, 2**64)])
def test_ranges_outside_are_refused(offset: int, nbytes: int) -> None:
    region = HostRegion(4096)
    with pytest.raises(ValueError, match="outside a region of 4096"):
        region.populate(offset, nbytes)
    with pytest.raises(ValueError, match="outside a region of 4096"):
        region.fill(offset, nbytes, 0)


def test_fill() -> None:
    region = HostRegion(10)
    region.fill(2, 3, 0xFF)
    region.fill(9, 1, 1)
    assert bytes(memoryview(region)) == b"\0\0\xff\xff\xff\0\0\0\0\1"
    for bad in (-1, 256):
        with pytest.raises(ValueError, match="0 to 255"):
            region.fill(0, 1, bad)


@pytest.mark.parametrize("nbytes", [2**47, 2**62, 2**63, 2**64 - 1, 2**80])
def test_more_than_there_is(nbytes: int) -> None:
    with pytest.raises(AllocationError) as caught:
        HostRegion(nbytes)
    assert caught.value.nbytes == nbytes


def test_a_negative_size() -> None:
    with pytest.raises(ValueError, match="negative"):
        HostRegion(-1)


def test_regions_do_not_leak() -> None:
    before = os_rss()
    for _ in range(50):
        region = HostRegion(8 * MiB)
        region.fill(0, 8 * MiB, 1)
        del region
    assert os_rss() - before < 64 * MiB


# Comparing


@given(st.binary(max_size=300), st.integers(0, 299), st.integers(1, 255))
def test_first_difference_is_the_first(data: bytes, at: int, flip: int) -> None:
    other = bytearray(data)
    assert first_difference(data, other) == -1
    if at < len(data):
        other[at] ^= flip
        other[-1] ^= flip if at != len(data) - 1 else 0
        assert first_difference(data, other) == at


@pytest.mark.parametrize("at", [0, 4095, 4096, 64 * MiB - 1, 64 * MiB, 64 * MiB + 4097, 65 * MiB - 1])
def test_first_difference_in_something_large(at: int) -> None:
    a = np.zeros(65 * MiB, dtype=np.uint8)
    b = a.copy()
    b[at] = 1
    b[-1] = 1
    assert first_difference(a, b) == at
    assert first_difference(b, a) == at


def test_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="3 and 4 bytes"):
        first_difference(b"abc", b"abcd")
    with pytest.raises(ValueError, match="ascontiguousarray"):
        first_difference(np.zeros(8)[::2], bytes(32))
    kept = bytearray(3)
    with pytest.raises(TypeError):
        first_difference(kept, None)  # type: ignore[arg-type]
    kept.append(1)


# How much there is


def test_available_memory_is_within_the_machines() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory() <= total


def test_available_memory_of_meminfo(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:     42 kB\n")
    assert memory._mem_available(path) == 42 * 1024


def group(path: Path, limit: str, used: int, idle: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(limit + "\n")
    (path / "memory.current").write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 5\ninactive_file {idle}\nactive_file 1\n")


def test_a_control_group_and_those_above_it_limit(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "root"
    membership.write_text("0::/a/b\n")
    root.mkdir()
    group(root / "a", "1000", 700, 100)
    group(root / "a" / "b", "max", 600, 0)
    assert [room for room in memory._cgroup_room(membership, root) if room is not None] == [400]
    group(root / "a" / "b", "650", 600, 0)
    assert sorted(room for room in memory._cgroup_room(membership, root) if room is not None) == [50, 400]


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "root"
    membership.write_text("0::/somewhere/on/the/host\n")
    group(root, "1000", 300, 0)
    assert memory._cgroup_room(membership, root) == [700]


def test_control_groups_of_the_first_version(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "root"
    membership.write_text("5:cpu,memory:/job\n3:cpuset:/\n")
    job = root / "memory" / "job"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text("5000")
    (job / "memory.usage_in_bytes").write_text("4000")
    (job / "memory.stat").write_text("cache 900\ntotal_inactive_file 500\n")
    assert memory._cgroup_room(membership, root) == [1500, None]


def test_no_control_groups(tmp_path: Path) -> None:
    assert memory._cgroup_room(tmp_path / "none", tmp_path) == []


def test_what_of_a_file_is_in_memory(tmp_path: Path) -> None:
    need_droppable(tmp_path)
    page, count = mmap.PAGESIZE, 5000  # more than are looked at in one call
    path = tmp_path / "file"
    path.write_bytes(bytes(page * count))
    cache(path)
    with path.open("rb") as file:
        assert memory.resident_bytes(file.fileno(), 0, page * count) == page * count
        assert memory.resident_bytes(file.fileno(), 1, 3 * page - 2) == page, "whole pages only"
        assert memory.resident_bytes(file.fileno(), 1, page) == memory.resident_bytes(file.fileno(), 0, 0) == 0
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert memory.resident_bytes(file.fileno(), 0, page * count) == 0
        assert memory.resident_bytes(file.fileno(), page * count, 1 << 30) == 0, "nothing is behind its end"
        # However far that is: this would take years to look at.
        assert memory.resident_bytes(file.fileno(), page * count, 1 << 63) == 0
        assert memory.resident_bytes(file.fileno(), (1 << 64) - 100, 50) == 0
        assert memory.resident_bytes(file.fileno(), 0, (1 << 64) - 1) == 0


def test_what_has_no_pages() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match="mmap"):
            memory.resident_bytes(reader, 0, 1 << 20)
        with pytest.raises(ValueError, match="no file"):
            memory.resident_bytes(reader, 1 << 63, 1 << 63)
    finally:
        os.close(reader)
        os.close(writer)
