"""What another process does to the index between two looks at it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from support.indexing import garbage, ranges_of, remember, said, use

from weightwire.index import HashIndex, database
from weightwire.ranges import FileRange

Opener = Callable[[Path], int]


def statements(monkeypatch: pytest.MonkeyPatch, at: int, meanwhile: Callable[[], object]) -> Callable[[], int]:
    """Have ``meanwhile`` done right before the statement ``at`` of the connection made next. How many there were."""
    plainly = sqlite3.connect
    count = 0

    class Watched(sqlite3.Connection):
        def execute(self, *args: object) -> sqlite3.Cursor:
            nonlocal count
            if count == at:
                monkeypatch.setattr(sqlite3, "connect", plainly)
                meanwhile()
            count += 1
            return super().execute(*args)  # type: ignore[arg-type]

    def connect(*args: object, **options: object) -> sqlite3.Connection:
        return plainly(*args, **options, factory=Watched)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(sqlite3, "connect", connect)
    return lambda: count


def nothing(place: Path) -> None:
    place.parent.mkdir()


def an_empty_file(place: Path) -> None:
    nothing(place)
    place.touch()


def an_earlier_form(place: Path) -> None:
    nothing(place)
    with sqlite3.connect(place) as raw:
        raw.execute("CREATE TABLE files (id INTEGER PRIMARY KEY, device INTEGER, path BLOB)")
        raw.execute("PRAGMA application_id = 0x77777869")
        raw.execute("PRAGMA user_version = 1")
    raw.close()


@pytest.mark.parametrize("before", [nothing, an_empty_file, an_earlier_form])
def test_another_process_makes_it(
    before: Callable[[Path], None],
    tmp_path: Path,
    ranges: list[FileRange],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever comes first, neither takes the other's index for a database of something else."""

    def make() -> None:
        with contextlib.suppress(sqlite3.OperationalError):  # locked: this one is first, then
            database.connect(place).close()

    for at in range(100):
        place = tmp_path / str(at) / "index.sqlite3"
        before(place)
        count = statements(monkeypatch, at, make)
        assert use(place, ranges)[0] == 4, at
        if count() <= at:
            break
    assert 10 < at < 99
    assert not said(caplog)


@pytest.mark.parametrize("name", ["index.sqlite3", "index"])
def test_another_process_has_begun_anew_what_was_damaged(
    name: str,
    tmp_path: Path,
    ranges: list[FileRange],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its new file is empty at first, as no index of that name could be."""
    place = tmp_path / name
    with HashIndex(place) as index:
        remember(index, ranges)
    with open(place, "r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 20_000)
    looked = database.connect

    def connect(path: Path) -> sqlite3.Connection:
        try:
            return looked(path)
        finally:
            monkeypatch.setattr(database, "connect", looked)
            os.rename(place, f"{place}.damaged")
            place.touch()

    monkeypatch.setattr(database, "connect", connect)
    assert use(place, ranges)[0] == 4
    (line,) = said(caplog)
    assert "moved aside and begun anew" in line
    with HashIndex(place) as index:
        assert None not in index.find(ranges)


def test_one_in_use_is_moved_aside_by_another_process(
    index: HashIndex,
    place: Path,
    ranges: list[FileRange],
    model: Path,
    opened: Opener,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What met the damage is not always what has the file open."""
    remember(index, ranges)
    os.rename(place, f"{place}.damaged")
    others = ranges_of(model, opened(model), 6)
    with HashIndex(place) as other:
        remember(other, others[4:])
        hashes = remember(index, ranges)
        assert other.find(others[:4]) == hashes
    assert None not in index.find(others)
    assert not said(caplog)


def test_one_in_use_is_deleted(
    index: HashIndex, place: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture
) -> None:
    remember(index, ranges)
    place.unlink()
    hashes = remember(index, ranges)
    with HashIndex(place) as other:
        assert other.find(ranges) == hashes
    assert not said(caplog)


def test_one_in_use_is_replaced_by_what_is_none(
    index: HashIndex, place: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture
) -> None:
    remember(index, ranges)
    place.unlink()
    place.with_name("index.sqlite3.lock").mkdir()
    garbage(place)
    with pytest.raises(AssertionError):
        remember(index, ranges)
    (line,) = said(caplog)
    assert "hashes are computed instead" in line
