"""Files to index, and ways to change them so that it shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weightwire.index import Hashes, HashIndex, hash_with_digest, identity_of
from weightwire.ranges import FileRange

CONTENT = bytes(range(256)) * 400


def ranges_of(path: Path, fd: int, count: int = 4) -> list[FileRange]:
    """``count`` ranges of different sizes."""
    return [FileRange(fd, 100 * each, 1000 + each, str(path)) for each in range(count)]


def remember(index: HashIndex, ranges: list[FileRange]) -> list[Hashes]:
    """Hash and record, as a push does."""
    identities = {each.fd: identity_of(each.fd) for each in ranges}
    hashes = [hash_with_digest(each) for each in ranges]
    entries = [(each, f"t{at}", found) for at, (each, found) in enumerate(zip(ranges, hashes, strict=True))]
    assert index.record(entries, identities) == len(ranges)
    return hashes


def change(path: Path, how: Callable[[], object]) -> None:
    """Do ``how`` until the file's time of change differs from before: time stamps are only so fine."""
    before = path.stat().st_ctime_ns
    how()
    while path.stat().st_ctime_ns == before:
        how()
