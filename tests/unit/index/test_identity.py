"""Which changes to a file show, and when it is too early to say."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.indexing import CONTENT, change, ranges_of, remember

from weightwire.index import FileIdentity, Hashes, HashIndex, hash_with_digest, identity, identity_of, store

SECOND = 10**9


def rewrite_with_the_same_times(path: Path) -> None:
    """Other bytes, as many, in the same file, which then says that it was not modified."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.write(CONTENT[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def cut(path: Path) -> None:
    os.truncate(path, len(CONTENT) - 1)


@pytest.mark.parametrize("how", [rewrite_with_the_same_times, grow, cut])
def test_a_file_changed_in_place_is_not_known(
    how: Callable[[Path], None], index: HashIndex, model: Path, opened: Callable[[Path], int]
) -> None:
    ranges = ranges_of(model, opened(model))
    before = remember(index, ranges)
    assert index.find(ranges) == before
    change(model, lambda: how(model))
    assert index.find(ranges) == [None] * 4
    after = remember(index, ranges)
    assert index.find(ranges) == after
    assert sum(map(len, index.owners().values())) == 4, "the rows of the earlier content are gone"


def test_a_file_replaced_by_rename_is_another(
    index: HashIndex, model: Path, tmp_path: Path, opened: Callable[[Path], int]
) -> None:
    old = ranges_of(model, opened(model))
    hashes = remember(index, old)
    (tmp_path / "new").write_bytes(CONTENT[::-1])
    os.replace(tmp_path / "new", model)
    new = ranges_of(model, opened(model))
    assert index.find(new) == [None] * 4
    # What is still open has the old content, but was unlinked: its time of change says so.
    assert index.find(old) in ([None] * 4, hashes)
    remember(index, new)
    assert sum(map(len, index.owners().values())) == 4, "the path has one file only"


def test_a_copy_is_another_file(index: HashIndex, model: Path, tmp_path: Path, opened: Callable[[Path], int]) -> None:
    remember(index, ranges_of(model, opened(model)))
    copy = tmp_path / "copy.gguf"
    shutil.copy2(model, copy)
    assert index.find(ranges_of(copy, opened(copy))) == [None] * 4


def test_a_file_moved_elsewhere_keeps_what_is_known_unless_the_move_shows(
    index: HashIndex, model: Path, tmp_path: Path, opened: Callable[[Path], int]
) -> None:
    ranges = ranges_of(model, opened(model))
    hashes = remember(index, ranges)
    moved = tmp_path / "moved.gguf"
    before = model.stat().st_ctime_ns
    model.rename(moved)
    found = index.find(ranges_of(moved, opened(moved)))
    assert found == (hashes if moved.stat().st_ctime_ns == before else [None] * 4)


def test_what_changed_between_the_look_and_the_record_is_not_stored(
    index: HashIndex, model: Path, opened: Callable[[Path], int]
) -> None:
    fd = opened(model)
    before = {fd: identity_of(fd)}
    (first, *_) = ranges_of(model, fd)
    hashes = hash_with_digest(first)
    change(model, lambda: rewrite_with_the_same_times(model))
    assert index.record([(first, "t", hashes)], before) == 0
    assert index.find([first]) == [None]


def test_a_file_changed_a_moment_ago_is_not_stored(
    index: HashIndex, model: Path, opened: Callable[[Path], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_RACY_NS", 3600 * SECOND)
    fd = opened(model)
    (first, *_) = ranges_of(model, fd)
    now = identity_of(fd)
    assert not now.settled
    assert index.record([(first, "t", hash_with_digest(first))], {fd: now}) == 0
    # Looked at long after the last change it is settled, whenever the hash is recorded.
    late = now._replace(taken_ns=time.time_ns() + 2 * 3600 * SECOND)
    assert index.record([(first, "t", hash_with_digest(first))], {fd: late}) == 1


@pytest.mark.parametrize(
    ("mtime", "ctime", "settled"),
    [
        (0, 0, True),
        (-3, -3, True),
        (-1, -1, False),
        (-100, -1, False),  # its time of modification was set
        (-1, -100, False),  # a file system without times of change
        (1, -100, False),
        (100, -100, True),  # somebody wrote the future into it: the next write shows
        (100, 100, False),  # a server's clock is ahead: its times say nothing
    ],
)
def test_settled(mtime: int, ctime: int, settled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_RACY_NS", 2 * SECOND)
    now = 10**18
    at = [0 if seconds == 0 else now + seconds * SECOND for seconds in (mtime, ctime)]
    assert FileIdentity(1, 2, 3, *at, now).settled is settled


def test_when_it_was_looked_at_is_no_part_of_it(model: Path, opened: Callable[[Path], int]) -> None:
    one = identity_of(opened(model))
    other = identity_of(opened(model))._replace(taken_ns=5)
    assert one.same(other)
    for field in FileIdentity._fields[:5]:
        assert not one.same(one._replace(**{field: getattr(one, field) + 1}))


def test_a_descriptor_without_an_identity_is_not_stored(
    index: HashIndex, model: Path, opened: Callable[[Path], int]
) -> None:
    (first, *_) = ranges_of(model, opened(model))
    assert index.record([(first, "t", Hashes(1, bytes(32)))], {}) == 0


@pytest.mark.parametrize("seconds", [-40_000_000_000, 10_000_000_000, 15_000_000_000, 40_000_000_000])
def test_a_time_that_is_centuries_away(
    seconds: int, index: HashIndex, model: Path, opened: Callable[[Path], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tmpfs, XFS and others keep it: nanoseconds of more than 64 bits."""
    fd = opened(model)
    far = identity_of(fd)._replace(mtime_ns=seconds * SECOND + 1)
    monkeypatch.setattr(store, "identity_of", lambda fd: far)
    (first, *_) = ranges_of(model, fd)
    hashes = hash_with_digest(first)
    assert index.record([(first, "t", hashes)], {fd: far}) == 1
    assert index.find([first]) == [hashes]
    far = far._replace(mtime_ns=far.mtime_ns + 1)
    assert index.find([first]) == [None]
    assert index.enabled
