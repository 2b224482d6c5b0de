"""Files to index, ways to change them so that it shows, and what may lie where an index belongs."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

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


def use(place: Path, ranges: list[FileRange]) -> tuple[int, list[Hashes | None]]:
    """Open, look up, record and look up again: how many were stored, and what is known afterwards."""
    with HashIndex(place) as index:
        index.find(ranges)
        identities = {each.fd: identity_of(each.fd) for each in ranges}
        stored = index.record([(each, "t", hash_with_digest(each)) for each in ranges], identities)
        index.owners()
        return stored, index.find(ranges)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def garbage(place: Path) -> None:
    place.write_bytes(os.urandom(20_000))


def overwritten(place: Path) -> None:
    with open(place, "r+b") as file:
        file.seek(24)
        file.write(b"\xee" * 4)  # as a writer does, so that who has it open reads it again
        file.seek(100)
        file.write(b"\xff" * (place.stat().st_size - 100))


def other_database(place: Path) -> None:
    with sqlite3.connect(place) as raw:
        raw.execute("CREATE TABLE mine (a)")
    raw.close()


def of_another_form(place: Path) -> None:
    with HashIndex(place) as index:
        index.owners()
    with sqlite3.connect(place) as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
