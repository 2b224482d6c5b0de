"""What the index remembers, and for how long."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.indexing import CONTENT, ranges_of, remember

from weightwire.errors import ConfigError
from weightwire.index import Hashes, HashIndex, Owner, default_index_path, identity_of, store
from weightwire.ranges import FileRange

DAY = 86_400
Opener = Callable[[Path], int]


def test_what_was_recorded_is_found_by_others_too(index: HashIndex, place: Path, model: Path, opened: Opener) -> None:
    ranges = ranges_of(model, opened(model))
    hashes = remember(index, ranges)
    assert index.find(ranges) == hashes
    unknown = FileRange(ranges[0].fd, ranges[0].offset, ranges[0].nbytes + 1, str(model))
    again = ranges_of(model, opened(model))
    with HashIndex(place) as other:
        assert other.find([again[2], unknown, again[0], again[2]]) == [hashes[2], None, hashes[0], hashes[2]]
    assert index.find([]) == []


def test_files_side_by_side(index: HashIndex, tmp_path: Path, opened: Opener) -> None:
    paths = [tmp_path / f"model-{each}.gguf" for each in range(3)]
    for each, path in enumerate(paths):
        path.write_bytes(bytes([each]) + CONTENT)
    ranges = [ranges_of(path, opened(path)) for path in paths]
    hashes = [remember(index, of_file) for of_file in ranges]
    mixed = [of_file[at] for at in range(4) for of_file in ranges]
    assert index.find(mixed) == [of_file[at] for at in range(4) for of_file in hashes]


def test_whose_an_entry_is(index: HashIndex, model: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    fd = opened(model)
    large = (1 << 64) - 2
    names = ["plain", "a\udc80b\n", "日本"]
    entries = [
        (FileRange(fd, at, 10 + at, "model.gguf"), name, Hashes(large, bytes([at]) * 32))
        for at, name in enumerate(names)
    ]
    assert index.record(entries, {fd: identity_of(fd)}) == 3
    assert index.owners() == {
        large: [Owner(str(model), name, 10 + at, bytes([at]) * 32) for at, name in enumerate(names)]
    }
    assert index.find([entries[0][0]]) == [Hashes(large, bytes(32))]


def test_a_path_that_is_no_text(index: HashIndex, tmp_path: Path, opened: Opener) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf"))
    path.write_bytes(CONTENT)
    remember(index, ranges_of(path, opened(path)))
    assert {owner.path for owners in index.owners().values() for owner in owners} == {str(path)}


def test_a_closed_descriptor_is_not_known(index: HashIndex, model: Path, opened: Opener) -> None:
    fd = os.dup(opened(model))
    ranges = ranges_of(model, fd)
    hashes = remember(index, ranges)
    identities = {fd: identity_of(fd)}
    os.close(fd)
    assert index.find(ranges) == [None] * 4
    assert index.record([(ranges[0], "t", hashes[0])], identities) == 0


def test_a_flipped_bit_is_not_believed(index: HashIndex, place: Path, model: Path, opened: Opener) -> None:
    ranges = ranges_of(model, opened(model))
    hashes = remember(index, ranges)
    with sqlite3.connect(place) as raw:
        raw.execute("UPDATE hashes SET fnv1a = fnv1a + 1 WHERE offset = ?", (ranges[0].offset,))
        raw.execute("UPDATE hashes SET blake3 = zeroblob(32) WHERE offset = ?", (ranges[1].offset,))
        raw.execute("UPDATE hashes SET blake3 = 5 WHERE offset = ?", (ranges[2].offset,))
    raw.close()
    assert index.find(ranges) == [None, None, None, hashes[3]]
    assert list(index.owners()) == [hashes[3].fnv1a]
    assert remember(index, ranges) == hashes == index.find(ranges)


def test_what_is_given_out_is_what_was_recorded(
    index: HashIndex, place: Path, model: Path, tmp_path: Path, opened: Opener
) -> None:
    """Whichever bit flips in a table: of its columns' values, their types and lengths, and of how rows are found."""
    # A path is among what is stored: as many bits of one at least, wherever the temporary files are.
    other = tmp_path / f"{'other':_<{max(5, 105 - len(str(tmp_path)))}}.gguf"
    other.write_bytes(CONTENT)
    ranges = [each for path in (model, other) for each in ranges_of(path, opened(path), 2)]
    hashes = remember(index, ranges)
    owners = {name: set(of) for name, of in index.owners().items()}
    index.close()
    sound = place.read_bytes()
    with sqlite3.connect(place) as raw:
        (size,) = raw.execute("PRAGMA page_size").fetchone()
        roots = [row[0] for row in raw.execute("SELECT rootpage FROM sqlite_master WHERE type = 'table'")]
    raw.close()
    flipped = known = 0
    for start in ((root - 1) * size for root in roots):
        page = sound[start : start + size]
        # The head of the page with its pointers, a gap of zeros, and the rows up to its end.
        head = page.index(bytes(64))
        used = [*range(head), *range(size - len(page[head:].lstrip(b"\0")), size)]
        for at in used:
            for bit in range(8):
                spoiled = bytearray(sound)
                spoiled[start + at] ^= 1 << bit
                place.write_bytes(spoiled)
                with HashIndex(place) as each:
                    found, whose = each.find(ranges), each.owners()
                assert all(got in (None, said) for got, said in zip(found, hashes, strict=True)), (at, bit)
                assert all(set(of) <= owners.get(name, set()) for name, of in whose.items()), (at, bit)
                flipped += 1
                known += sum(got is not None for got in found)
    assert flipped > 4000
    assert known > 2 * flipped, "the rows beside the flipped bit are believed"


@pytest.mark.parametrize("table", ["files", "hashes"])
@pytest.mark.parametrize("value", ["NULL", "5", "2.5", "'text'", "x'ff'", "CAST(x'ff' AS TEXT)", "-1", "1e300"])
def test_a_column_of_another_kind_is_not_believed(
    table: str, value: str, place: Path, model: Path, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    ranges = ranges_of(model, opened(model), 1)
    with HashIndex(place) as index:
        hashes = remember(index, ranges)
        owners = index.owners()
    sound = place.read_bytes()
    with sqlite3.connect(place) as raw:
        columns = [row[1] for row in raw.execute(f"PRAGMA table_info({table})")]
    raw.close()
    for column in set(columns) - {"id", "file", "offset", "nbytes"}:
        place.write_bytes(sound)
        with sqlite3.connect(place, isolation_level=None) as raw:
            raw.execute("PRAGMA writable_schema = ON")
            raw.execute("UPDATE sqlite_master SET sql = replace(replace(sql, ' NOT NULL', ''), ' INTEGER,', ' BLOB,')")
        raw.close()
        with sqlite3.connect(place, isolation_level=None) as raw:
            raw.execute(f"UPDATE {table} SET {column} = {value}")
        raw.close()
        with HashIndex(place) as index:
            if column == "seen":
                assert (index.find(ranges), index.owners()) == (hashes, owners)
            else:
                assert (index.find(ranges), index.owners()) == ([None], {}), column
            assert remember(index, ranges) == hashes == index.find(ranges)
            assert index.owners() == owners
    assert not caplog.records


def test_a_file_that_has_another_name_now(index: HashIndex, model: Path, tmp_path: Path, opened: Opener) -> None:
    ranges = ranges_of(model, opened(model), 2)
    remember(index, ranges)
    link = tmp_path / "link.gguf"
    link.hardlink_to(model)
    again = ranges_of(link, opened(link), 2)
    hashes = remember(index, again[:1])
    remember(index, again)
    assert index.find(again)[:1] == hashes
    assert {owner.path for of in index.owners().values() for owner in of} == {str(link)}


# Bounds.


def age(place: Path, days: float, path: Path) -> None:
    with sqlite3.connect(place) as raw:
        then = int(time.time() - days * DAY)
        assert raw.execute("UPDATE files SET seen = ? WHERE path = ?", (then, os.fsencode(path))).rowcount == 1
    raw.close()


def test_files_not_seen_for_long_are_dropped(index: HashIndex, place: Path, tmp_path: Path, opened: Opener) -> None:
    paths = [tmp_path / name for name in ("old", "used", "new")]
    ranges = []
    for path in paths:
        path.write_bytes(CONTENT)
        ranges.append(ranges_of(path, opened(path)))
    for each in ranges[:2]:
        remember(index, each)
        age(place, 181, paths[ranges.index(each)])
    assert None not in index.find(ranges[1])  # which is a use
    remember(index, ranges[2])
    assert [index.find(each)[0] is None for each in ranges] == [True, False, False]


def test_too_many_rows_drop_the_files_longest_not_seen(
    index: HashIndex, place: Path, tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MOST_ROWS", 10)
    paths = [tmp_path / str(each) for each in range(4)]
    ranges = []
    for each, path in enumerate(paths):
        path.write_bytes(CONTENT)
        ranges.append(ranges_of(path, opened(path)))
        if each == 2:
            age(place, 1, paths[0])  # the first is older than the second by now
        remember(index, ranges[-1])
    with sqlite3.connect(place) as raw:
        assert raw.execute("SELECT count(*) FROM hashes").fetchone() == (8,)
    raw.close()
    assert [index.find(each)[0] is None for each in ranges] == [True, True, False, False]


# Several at once.

WORKER = """
import os, sys
from pathlib import Path
from weightwire.index import HashIndex, Hashes, identity, identity_of, store
from weightwire.ranges import FileRange
identity._RACY_NS = 0
store._READ_SECONDS = store._WRITE_SECONDS = 90.0
place, folder, number = sys.argv[1:]
path = Path(folder, f"model-{number}")
path.write_bytes(bytes(1000))
shared = os.open(Path(folder, "shared"), os.O_RDONLY)
with HashIndex(place) as index:
    fd = os.open(path, os.O_RDONLY)
    for start in range(0, 200, 20):
        entries = [(FileRange(fd, at, 5, str(path)), "t", Hashes(at + 1, bytes(32))) for at in range(start, start + 20)]
        assert index.record(entries, {fd: identity_of(fd)}) == 20
        one = FileRange(shared, start, 5, "shared")
        assert index.record([(one, "s", Hashes(start, bytes(32)))], {shared: identity_of(shared)}) == 1
        assert index.find([one, entries[0][0]]) == [Hashes(start, bytes(32)), Hashes(start + 1, bytes(32))]
"""


@pytest.mark.parametrize("there", [False, True], ids=["none yet", "damaged"])
def test_many_processes(place: Path, tmp_path: Path, there: bool) -> None:
    (tmp_path / "shared").write_bytes(CONTENT)
    if there:
        place.parent.mkdir()
        place.write_bytes(b"damaged" * 1000)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(place), str(tmp_path), str(number)], stderr=subprocess.PIPE, text=True
        )
        for number in range(8)
    ]
    said = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, said
    with HashIndex(place) as index:
        owners = [owner for found in index.owners().values() for owner in found]
    assert len(owners) == 8 * 200 + 10
    kept = [name for name in os.listdir(place.parent) if "damaged" in name]
    assert len(kept) == there
    with sqlite3.connect(place) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    raw.close()


def test_many_threads(index: HashIndex, tmp_path: Path, opened: Opener) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            path = tmp_path / str(number)
            path.write_bytes(CONTENT)
            ranges = ranges_of(path, opened(path), 20)
            hashes = remember(index, ranges)
            for _ in range(10):
                assert index.find(ranges) == hashes
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_after_a_fork_both_go_on(index: HashIndex, model: Path, tmp_path: Path, opened: Opener) -> None:
    ranges = ranges_of(model, opened(model))
    hashes = remember(index, ranges)
    other = tmp_path / "other"
    other.write_bytes(CONTENT)
    theirs = ranges_of(other, opened(other))
    with index._own().lock:  # as if another thread were at work
        child = os.fork()
        if not child:
            code = 1
            try:
                assert index.find(ranges) == hashes
                remember(index, theirs)
                index.close()
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert None not in index.find(theirs)
    assert remember(index, ranges) == hashes


def test_after_a_fork_its_threads_begin_at_once(
    index: HashIndex, ranges: list[FileRange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that finds another making the child's lock is not to wait for the parent's, which nobody gives back."""
    hashes = remember(index, ranges)
    make = threading.RLock
    found: list[object] = []

    def made_by_two() -> object:
        monkeypatch.setattr(store.threading, "RLock", make)
        other = threading.Thread(target=lambda: found.append(index.find(ranges)), daemon=True)
        other.start()
        other.join(30)
        return make()

    with index._own().lock:
        child = os.fork()
        if not child:
            code = 1
            try:
                monkeypatch.setattr(store.threading, "RLock", made_by_two)
                assert index.find(ranges) == hashes
                assert found == [hashes]
                assert len(index._states) == 2
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert index.find(ranges) == hashes


def test_closing_gives_everything_back(place: Path, model: Path, no_leaks: object) -> None:
    with open(model, "rb") as file:
        index = HashIndex(place)
        remember(index, ranges_of(model, file.fileno()))
        index.close()
        index.close()


def test_an_interrupt_in_a_transaction_takes_it_back(
    index: HashIndex, place: Path, model: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = ranges_of(model, opened(model))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_bound", interrupt)
        with pytest.raises(KeyboardInterrupt):
            remember(index, ranges)
    with HashIndex(place) as other:
        assert other.find(ranges) == [None] * 4
        remember(other, ranges)
    assert None not in index.find(ranges)


# Where it is.


def test_where_the_users_index_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEIGHTWIRE_INDEX", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert default_index_path() == Path("/home/me/.cache/weightwire/index.sqlite3")
    for unset in ("", "rel"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_index_path() == Path("/home/me/.cache/weightwire/index.sqlite3")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_index_path() == Path("/x/weightwire/index.sqlite3")
    monkeypatch.setenv("WEIGHTWIRE_INDEX", "/i/mine.sqlite3")
    assert default_index_path() == Path("/i/mine.sqlite3")
    assert HashIndex().path == Path("/i/mine.sqlite3")
    for wrong in ("", " "):
        monkeypatch.setenv("WEIGHTWIRE_INDEX", wrong)
        with pytest.raises(ConfigError, match="WEIGHTWIRE_INDEX"):
            default_index_path()


def test_off_is_empty_and_says_nothing(
    model: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_INDEX", "Off")
    ranges = ranges_of(model, opened(model))
    with HashIndex() as index:
        assert not index.enabled
        assert index.record([(ranges[0], "t", Hashes(1, bytes(32)))], {ranges[0].fd: identity_of(ranges[0].fd)}) == 0
        assert index.find(ranges) == [None] * 4
        assert index.owners() == {}
    assert not caplog.records


def test_nothing_is_opened_before_it_is_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HashIndex(place).close()
    assert not place.parent.exists()


# Every row has a digest.


def test_hashes_without_a_digest_are_not_remembered(index: HashIndex, model: Path, opened: Opener) -> None:
    ranges = ranges_of(model, opened(model))
    identities = {ranges[0].fd: identity_of(ranges[0].fd)}
    known = remember(index, ranges[:2])
    bare = [
        (each, "t", Hashes(5, digest)) for each, digest in zip(ranges[:3], (b"", bytes(31), bytes(33)), strict=True)
    ]
    assert index.record([*bare, (ranges[3], "t3", Hashes(7, bytes(32)))], identities) == 1
    assert index.find(ranges) == [*known, None, Hashes(7, bytes(32))], "nor do they take one away"


def test_a_row_is_sealed_with_its_digest(index: HashIndex, place: Path, model: Path, opened: Opener) -> None:
    ranges = ranges_of(model, opened(model))
    remember(index, ranges[:1])
    with sqlite3.connect(place) as raw:
        raw.execute("UPDATE hashes SET blake3 = x'' WHERE offset = ?", (ranges[0].offset,))
    raw.close()
    assert index.find(ranges[:1]) == [None]
