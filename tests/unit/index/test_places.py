"""What lies where the index, or a file of it, belongs: told apart, left alone, and said."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.indexing import CONTENT, garbage, of_another_form, other_database, overwritten, remember, said, use

from weightwire.index import HashIndex, database
from weightwire.ranges import FileRange


@pytest.mark.parametrize(
    "make",
    [
        other_database,
        of_another_form,
        lambda place: place.mkdir(),
        lambda place: os.mkfifo(place),
        lambda place: place.symlink_to("/dev/zero"),
        lambda place: place.symlink_to(place),
        lambda place: place.symlink_to("/nowhere/at/all"),
    ],
    ids=["database", "form", "folder", "fifo", "device", "loop", "dangling"],
)
def test_what_is_something_else_is_left_alone(
    make: Callable[[Path], None], place: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture
) -> None:
    place.parent.mkdir()
    make(place)
    before = os.lstat(place)
    assert use(place, ranges) == (0, [None] * 4)
    after = os.lstat(place)
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert len(said(caplog)) == 1


BESIDE = """
import logging, os, sys
from pathlib import Path
from weightwire.index import HashIndex, Hashes, identity, identity_of
from weightwire.ranges import FileRange
identity._RACY_NS = 0
logging.basicConfig(format="%(levelname)s %(message)s")
place, name, kind, link = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
fd = os.open(sys.executable, os.O_RDONLY)
one = FileRange(fd, 0, 5, "")
entry = [(one, "t", Hashes(1, bytes(32)))]
make = {
    "fifo": os.mkfifo,
    "folder": os.mkdir,
    "loop": lambda path: os.symlink(path, path),
    "file": lambda path: Path(path).touch(),
}[kind]
make(f"{place}{name}")
with HashIndex(link) as index:
    assert index.record(entry, {fd: identity_of(fd)}) == (kind == "file")
    assert index.find([one]) == [Hashes(1, bytes(32)) if kind == "file" else None]
    assert index.enabled == (kind == "file")
"""


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "file"])
@pytest.mark.parametrize("name", ["-journal", "-wal", "-shm", ".lock"])
@pytest.mark.parametrize("there", ["sound", "damaged", "linked"])
def test_nothing_blocks_that_lies_where_a_file_beside_it_belongs(
    there: str, name: str, kind: str, place: Path, ranges: list[FileRange]
) -> None:
    """In a process of its own: what SQLite waits for in a FIFO no signal ends."""
    with HashIndex(place) as index:
        remember(index, ranges)
    link = place
    if there == "linked" and name != ".lock":  # SQLite's lie beside the file, the lock beside the name that is used
        link = place.with_name("other.sqlite3")
        link.symlink_to(place)
    if there == "damaged":
        garbage(place)
    done = subprocess.run(
        [sys.executable, "-c", BESIDE, str(place), name, kind, str(link)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    if kind != "file":
        (line,) = done.stderr.splitlines()
        assert f"'index.sqlite3{name}' beside it is not a regular file" in line
        assert os.path.lexists(f"{place}{name}")


def test_a_lock_that_becomes_a_fifo_is_not_waited_for(
    place: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is opened, after it was looked at."""
    looked = database.connect

    def connect(path: Path) -> sqlite3.Connection:
        try:
            return looked(path)
        finally:
            os.mkfifo(f"{place}.lock")

    monkeypatch.setattr(database, "connect", connect)
    place.parent.mkdir()
    garbage(place)
    assert use(place, ranges) == (0, [None] * 4)
    (line,) = said(caplog)
    assert "cannot be moved aside: not a regular file" in line


@pytest.mark.parametrize("name", [":memory:", "file::memory:", "file:index?mode=memory", "file:index.sqlite3"])
def test_every_name_is_that_of_a_file(
    name: str, tmp_path: Path, ranges: list[FileRange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHTWIRE_INDEX", name)
    with HashIndex() as index:
        hashes = remember(index, ranges)
    with HashIndex() as index:
        assert index.find(ranges) == hashes
        assert index.path == tmp_path / name
    assert (tmp_path / name).is_file()


def test_a_relative_name_means_one_file_wherever_the_program_goes(
    tmp_path: Path, ranges: list[FileRange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with HashIndex("index") as index:
        hashes = remember(index, ranges)
        index.close()
        (tmp_path / "below").mkdir()
        monkeypatch.chdir(tmp_path / "below")
        assert index.find(ranges) == hashes
    assert not (tmp_path / "below" / "index").exists()


def test_a_program_whose_directory_is_gone(
    tmp_path: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert use(Path("index"), ranges) == (0, [None] * 4)
    assert len(said(caplog)) == 1


def no_room(place: Path) -> None:
    """One in which nothing can be made, not even by root."""
    place.parent.rmdir()
    place.parent.symlink_to("/proc/self/fdinfo")


def no_parent(place: Path) -> None:
    place.parent.rmdir()
    place.parent.symlink_to("/proc/self/status/nothing")


@pytest.mark.parametrize(
    ("make", "said_of_it"),
    [
        (no_room, "it cannot be made: unable to open database file"),
        (no_parent, "it cannot be used: its directory cannot be made: "),
        (lambda place: place.symlink_to("/nowhere/at/all"), "it cannot be made: unable to open database file"),
        (lambda place: place.symlink_to(place), "it cannot be used: it cannot be looked at: Too many levels"),
        (lambda place: place.write_bytes(b"GGUF" * 100), "it cannot be used: it is no index of hashes"),
        (other_database, "it cannot be used: it is a database of something else"),
        (of_another_form, "it cannot be used: it has the form 99 of another weightwire"),
    ],
    ids=["room", "parent", "dangling", "loop", "model", "database", "form"],
)
@pytest.mark.parametrize("given", [True, False], ids=["argument", "variable"])
def test_what_was_tried_is_said_and_what_to_do(
    given: bool,
    make: Callable[[Path], None],
    said_of_it: str,
    tmp_path: Path,
    ranges: list[FileRange],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "cache" / "index"
    place.parent.mkdir()
    make(place)
    monkeypatch.setenv("WEIGHTWIRE_INDEX", str(place))
    with HashIndex(place if given else None) as index:
        assert index.find(ranges) == [None] * 4
    (line,) = said(caplog)
    assert line.startswith(f"index {place}: {said_of_it}")
    assert ("WEIGHTWIRE_INDEX" in line, "--no-index" in line, "index=False" in line) == (not given, not given, given)


def test_a_full_disk_when_it_is_made(tmp_path: Path, model: Path) -> None:
    code = """
import logging, os, resource, sys
from weightwire.index import HashIndex
logging.basicConfig(format="%(levelname)s %(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
with HashIndex(sys.argv[1]) as index:
    assert index.owners() == {}
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "index")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "it cannot be made: " in line


def test_a_file_that_was_named_by_mistake_is_left_alone(
    model: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture
) -> None:
    beside = sorted(model.parent.iterdir())
    assert use(model, ranges) == (0, [None] * 4)
    assert model.read_bytes() == CONTENT
    assert sorted(model.parent.iterdir()) == beside
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("name", ["other.db", "other.sqlite3"])
def test_a_damaged_database_of_something_else_is_left_alone(
    tmp_path: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    place = tmp_path / "others" / name
    place.parent.mkdir()
    other_database(place)
    overwritten(place)
    spoiled = place.read_bytes()
    assert use(place, ranges) == (0, [None] * 4)
    assert place.read_bytes() == spoiled
    assert list(place.parent.iterdir()) == [place]
    assert len(said(caplog)) == 1


def test_a_parent_that_is_a_file(model: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture) -> None:
    assert use(model / "index.sqlite3", ranges) == (0, [None] * 4)
    assert len(said(caplog)) == 1


def test_one_that_a_later_weightwire_makes_its_own_meanwhile_is_left_to_it(
    tmp_path: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture
) -> None:
    """Tables that are not ours any more are no damage there: it would lose what it knows, and this one's as well."""
    place = tmp_path / "index" / "index.sqlite3"
    with HashIndex(place) as index:
        remember(index, ranges)
        with sqlite3.connect(place) as raw:
            raw.execute("DROP TABLE hashes")
            raw.execute("CREATE TABLE hashes (file INTEGER, other INTEGER)")
            raw.execute("PRAGMA user_version = 99")
        raw.close()
        assert index.find(ranges) == [None] * 4
        assert not index.enabled
    assert list(place.parent.iterdir()) == [place]
    (line,) = said(caplog)
    assert "form 99" in line
