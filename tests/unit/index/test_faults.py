"""An index that cannot be read or written costs time, never a push."""

from __future__ import annotations

import fcntl
import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.indexing import garbage, overwritten, ranges_of, remember, said, use

from weightwire.index import HashIndex, database, identity_of, store
from weightwire.ranges import FileRange

Opener = Callable[[Path], int]


def cut(place: Path) -> None:
    os.truncate(place, place.stat().st_size // 2)


def tables_gone(place: Path) -> None:
    with sqlite3.connect(place) as raw:
        raw.execute("DROP TABLE hashes")
    raw.close()


def schema_unreadable(place: Path) -> None:
    """What SQLite says of it is no UTF-8 either."""
    sound = place.read_bytes()
    assert b"hashes (file" in sound
    place.write_bytes(sound.replace(b"hashes (file", b"hashes \xccfile"))


def other_rules(place: Path) -> None:
    with sqlite3.connect(place) as raw:
        raw.execute("DELETE FROM hashes")
        raw.execute("CREATE TRIGGER never BEFORE INSERT ON hashes BEGIN SELECT RAISE(ABORT, 'no'); END")
    raw.close()


@pytest.mark.parametrize("damage", [garbage, cut, overwritten, tables_gone, schema_unreadable, other_rules])
def test_a_damaged_index_is_moved_aside_and_begun_anew(
    damage: Callable[[Path], None], place: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture
) -> None:
    with HashIndex(place) as index:
        hashes = remember(index, ranges)
    damage(place)
    spoiled = place.read_bytes()
    assert use(place, ranges) == (4, hashes)
    (line,) = said(caplog)
    assert str(place) in line
    assert "moved aside" in line
    assert place.with_name("index.sqlite3.damaged").read_bytes() == spoiled
    caplog.clear()
    assert use(place, ranges) == (4, hashes)
    assert not said(caplog)


class Mender:
    """Another process that is moving a damaged index aside: it has the lock, and is through when it is waited for."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place.parent.mkdir()
        garbage(place)
        self._place = place
        self._lock = os.open(place.with_name(place.name + ".lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        monkeypatch.setattr(database.time, "sleep", self.finish)

    def finish(self, seconds: float = 0.0) -> None:
        if self._lock >= 0:
            self._place.rename(self._place.with_name("elsewhere"))
            os.close(self._lock)
            self._lock = -1


def test_one_that_another_process_is_moving_aside_is_waited_for(
    place: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Mender(place, monkeypatch)
    assert use(place, ranges)[0] == 4
    assert not place.with_name("index.sqlite3.damaged").exists(), "it was not this one that moved it"
    assert "hashes are computed instead" not in caplog.text


def test_a_process_that_moves_nothing_aside_is_not_waited_for_long(
    place: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mender = Mender(place, monkeypatch)
    monkeypatch.setattr(database, "_PATIENCE", 0.0)
    assert use(place, ranges) == (0, [None] * 4)
    assert "hashes are computed instead" in caplog.text
    mender.finish()


def test_a_journal_of_the_damaged_one_is_not_played_into_the_new(place: Path, ranges: list[FileRange]) -> None:
    place.parent.mkdir()
    garbage(place)
    journal = place.with_name(place.name + "-journal")
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(600))
    assert use(place, ranges)[0] == 4
    assert not journal.exists()


def test_one_that_is_damaged_while_it_is_used(
    index: HashIndex, place: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture
) -> None:
    hashes = remember(index, ranges)
    overwritten(place)
    assert index.find(ranges) == [None] * 4
    assert remember(index, ranges) == hashes == index.find(ranges)
    assert len(said(caplog)) == 1


def test_an_empty_file_is_an_index_to_be(place: Path, ranges: list[FileRange]) -> None:
    place.parent.mkdir()
    place.touch()
    assert use(place, ranges)[0] == 4


FORMS = {
    # SHA-256 of some tensors.
    1: "CREATE TABLE hashes (file INTEGER, offset INTEGER, fnv1a INTEGER, sha256 BLOB)",
    # Names that were not sealed.
    2: "CREATE TABLE hashes (file INTEGER, offset INTEGER, fnv1a INTEGER, blake3 BLOB, seal BLOB)",
}


@pytest.mark.parametrize("form", FORMS)
def test_an_earlier_form_is_begun_anew(
    form: int, place: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost that is not found out again."""
    place.parent.mkdir()
    with sqlite3.connect(place) as raw:
        raw.execute("CREATE TABLE files (id INTEGER PRIMARY KEY, device INTEGER, path BLOB)")
        raw.execute("CREATE INDEX files_by_path ON files (path)")
        raw.execute(FORMS[form])
        raw.execute("INSERT INTO hashes (file, offset) VALUES (1, 2)")
        raw.execute("PRAGMA application_id = 0x77777869")
        raw.execute(f"PRAGMA user_version = {form}")
    raw.close()
    stored, known = use(place, ranges)
    assert (stored, None in known) == (4, False)
    assert use(place, ranges)[1] == known
    assert not caplog.records
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_a_locked_one_is_waited_for_once_and_not_for_long(
    place: Path,
    ranges: list[FileRange],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HashIndex(place) as index:
        hashes = remember(index, ranges)
    monkeypatch.setattr(store, "_READ_SECONDS", 0.3)
    raw = sqlite3.connect(place, isolation_level=None)
    raw.execute("BEGIN EXCLUSIVE")
    try:
        with HashIndex(place) as index:
            assert index.find(ranges) == [None] * 4
            (line,) = said(caplog)
            assert "locked" in line
            # From now on it is not waited for: these would take hours.
            for _ in range(10_000):
                assert index.find(ranges) == [None] * 4
                assert index.record([(ranges[0], "t", hashes[0])], {ranges[0].fd: identity_of(ranges[0].fd)}) == 0
            assert len(said(caplog)) == 1
            raw.execute("ROLLBACK")
            index._own().rest_until = 0.0  # half a minute later
            assert index.find(ranges) == hashes
    finally:
        raw.close()


def test_a_lock_that_is_given_back_in_time_is_waited_for(place: Path, ranges: list[FileRange]) -> None:
    with HashIndex(place) as index:
        hashes = remember(index, ranges)
    code = """
import sqlite3, sys
raw = sqlite3.connect(sys.argv[1], isolation_level=None)
raw.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "locked\n"
    slept = time.sleep

    def let_go(seconds: float) -> None:
        if holder.poll() is None:
            holder.communicate()
        slept(seconds)

    with pytest.MonkeyPatch.context() as patch, HashIndex(place) as index:
        patch.setattr(store.time, "sleep", let_go)
        assert index.find(ranges) == hashes
    assert holder.wait() == 0


FULL = """
import logging, os, resource, sys
from weightwire.index import HashIndex, Hashes, identity, identity_of
from weightwire.ranges import FileRange
identity._RACY_NS = 0
logging.basicConfig(format="%(levelname)s %(message)s")
fd = os.open(sys.argv[2], os.O_RDONLY)
few = [(FileRange(fd, at, 5, sys.argv[2]), "t", Hashes(at, bytes(32))) for at in range(10)]
many = [(FileRange(fd, at, 6, sys.argv[2]), "t" * 50, Hashes(at, bytes(32))) for at in range(5000)]
with HashIndex(sys.argv[1]) as index:
    if sys.argv[3] == "after":
        assert index.record(few, {fd: identity_of(fd)}) == 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    assert index.record(many, {fd: identity_of(fd)}) == 0
    assert index.record(many, {fd: identity_of(fd)}) == 0
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_full_disk_loses_what_does_not_fit(when: str, place: Path, model: Path, opened: Opener) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(place), str(model), when], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING") == 1
    fd = opened(model)
    with HashIndex(place) as index:
        (first,) = index.find([FileRange(fd, 3, 5, str(model))])
        assert (first is None) == (when == "before")
        remember(index, ranges_of(model, fd))


def as_ordinary_user(work: Callable[[], None]) -> None:
    """Do ``work`` in a child that permissions apply to."""
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            work()
            code = 0
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that every user can go to."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="weightwire-index-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_in_a_directory_that_cannot_be_written_it_is_still_read(public: Path, ranges: list[FileRange]) -> None:
    place = public / "index.sqlite3"
    with HashIndex(place) as index:
        hashes = remember(index, ranges)
    public.chmod(0o555)
    place.chmod(0o444)

    def work() -> None:
        with HashIndex(place) as index:
            assert index.find(ranges) == hashes
            assert index.record([(ranges[0], "t", hashes[0])], {ranges[0].fd: identity_of(ranges[0].fd)}) == 0
        with HashIndex(public / "other.sqlite3") as index:
            assert index.find(ranges) == [None] * 4
        with HashIndex(public / "below" / "other.sqlite3") as index:
            assert index.find(ranges) == [None] * 4
        place_of_damage = public / "damaged.sqlite3"
        with HashIndex(place_of_damage) as index:
            assert index.find(ranges) == [None] * 4

    (public / "damaged.sqlite3").write_bytes(b"damaged" * 1000)
    as_ordinary_user(work)
    assert (public / "damaged.sqlite3").exists()


def test_an_index_that_may_not_be_read(public: Path, ranges: list[FileRange]) -> None:
    place = public / "index.sqlite3"
    with HashIndex(place) as index:
        remember(index, ranges)
    place.chmod(0)
    public.chmod(0o555)

    def work() -> None:
        assert use(place, ranges) == (0, [None] * 4)

    as_ordinary_user(work)
    public.chmod(0o755)


def test_a_python_without_sqlite3(
    place: Path, ranges: list[FileRange], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    assert use(place, ranges) == (0, [None] * 4)
    (line,) = said(caplog)
    assert "sqlite3" in line


def test_too_many_open_files(
    place: Path, ranges: list[FileRange], caplog: pytest.LogCaptureFixture, no_leaks: object
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        assert use(place, ranges) == (0, [None] * 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(said(caplog)) == 1
