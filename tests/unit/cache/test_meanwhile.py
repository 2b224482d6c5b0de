"""What other processes do to a cache directory between two looks at it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cachedir import entries_of, files_in, name_of

from weightwire.cache import (
    check,
    inspect,
    list_entries,
    prune,
    prune_cache,
    quarantine,
    seed,
    seeding,
    store,
    verify_cache,
)
from weightwire.cache.copying import StrictCache
from weightwire.cache.directory import make_directory, unmake_directories
from weightwire.cache.quarantine import FOLDER, empty_quarantine, list_quarantine, move_aside
from weightwire.cache.store import TensorCache
from weightwire.errors import CacheDirectoryError

DATA = bytes(range(256)) * 20
NAME = name_of(DATA)


class Once:
    """Have ``then`` done once, ``after`` a function of ``where`` or before it, when its first argument is ``path``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(
        self, where: Any, name: str, path: object, then: Callable[[], object], *, after: bool = True, call: int = 1
    ) -> None:
        real = getattr(where, name)
        calls: list[object] = []

        def hooked(*arguments: Any, **options: Any) -> Any:
            counts = os.fspath(arguments[0]) == os.fspath(path) if path is not None else True  # type: ignore[call-overload]
            if counts:
                calls.append(None)
            now = counts and len(calls) == call
            if now and not after:
                then()
            try:
                return real(*arguments, **options)
            finally:
                if now and after:
                    then()

        self._monkeypatch.setattr(where, name, hooked)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> Once:
    return Once(monkeypatch)


# A directory that others make, and unmake because they could not begin after all.


def test_what_it_lies_in_is_unmade_before_it_is_made(tmp_path: Path, once: Once) -> None:
    other = tmp_path / "above"
    once(os, "mkdir", other / "cache", other.rmdir, after=False, call=2)
    made = make_directory(other / "cache")
    assert (other / "cache").is_dir()
    unmake_directories(made)
    assert os.listdir(tmp_path) == []


def test_one_that_is_there_is_unmade_before_it_is_looked_at(tmp_path: Path, once: Once) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    once(os, "mkdir", directory, directory.rmdir)
    assert make_directory(directory) == [directory]
    assert directory.is_dir()


def test_one_that_never_stays_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any) -> None:
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CacheDirectoryError, match=r"cannot create cache directory .*: File exists") as caught:
        make_directory(tmp_path / "cache")
    assert "not a directory" not in str(caught.value)


MAKES_AND_UNMAKES = """
import sys
from pathlib import Path
from weightwire.cache.directory import make_directory, unmake_directories
print("ready", flush=True)
sys.stdin.readline()
for _ in range(2000):
    unmake_directories(make_directory(Path(sys.argv[1])))
"""


def run_together(code: str, each: Sequence[Sequence[str]]) -> None:
    """Have a process for each of the arguments run ``code`` when all of them are ready."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in each
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(each), said


def test_processes_that_make_and_unmake_the_same(tmp_path: Path) -> None:
    run_together(MAKES_AND_UNMAKES, [(str(tmp_path / "a" / "b" / "c"),)] * 3)


def test_one_that_its_maker_unmakes_is_made_again_for_the_first_entry(tmp_path: Path) -> None:
    other = TensorCache(tmp_path / "above" / "cache")
    cache = TensorCache(tmp_path / "above" / "cache")
    other.unmake()
    assert os.listdir(tmp_path) == []
    with cache.writer() as writer:
        writer.write(DATA)
        assert writer.commit(int(NAME, 16))
    assert files_in(cache.directory) == entries_of(DATA)


def test_one_that_goes_when_it_has_been_used_stays_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").mkdir()
    cache = TensorCache(tmp_path / "cache")
    cache.writer().abort()
    cache.directory.rmdir()
    with cache.writer() as writer:
        writer.write(DATA)
        assert not writer.commit(int(NAME, 16))
    assert os.listdir(tmp_path) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_one_that_cannot_be_made_again_costs_the_entry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    above = tmp_path / "above"
    other, cache = TensorCache(above / "cache"), TensorCache(above / "cache")
    other.unmake()
    above.symlink_to(tmp_path / "nowhere")
    with cache.writer() as writer:
        assert not writer.commit(int(NAME, 16))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_directory_made_between_two_looks_is_one(tmp_path: Path, once: Once, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "cache"
    once(inspect.os.path, "lexists", directory, directory.mkdir, after=False)
    assert list_entries(directory, index=False).entries == []


# Seeding.


def test_an_entry_stored_between_two_looks_replaces_nothing(
    model: Path, directory: Path, tensors: dict[str, bytes], small_threshold: int, once: Once
) -> None:
    directory.mkdir()
    there = directory / name_of(tensors["t1"])
    once(TensorCache, "size_of", None, lambda: there.write_bytes(tensors["t1"]), after=False)
    result = seed(model, directory, include="^t1$", threads=0, index=False)
    assert (result.written, result.replaced, result.present) == (0, 0, 1)


def test_one_that_is_there_and_cannot_be_had_is_replaced(
    model: Path, directory: Path, tensors: dict[str, bytes], small_threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir()
    there = directory / name_of(tensors["t1"])
    there.write_bytes(bytes(5000))
    monkeypatch.setattr(TensorCache, "lookup", lambda *_: None)
    result = seed(model, directory, include="^t1$", threads=0, index=False)
    assert (result.written, result.replaced, result.present) == (1, 1, 0)
    assert there.read_bytes() == tensors["t1"]


def test_a_file_that_goes_while_the_directory_is_looked_through_has_nothing_written_again(
    model: Path, directory: Path, small_threshold: int, once: Once, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = seed(model, directory, index=False).written
    passing = directory / ".weightwire-aaaaaaaa.tmp"
    real = os.scandir

    @contextlib.contextmanager
    def then_remove(path: Any) -> Iterator[list[os.DirEntry[str]]]:
        with real(path) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        passing.unlink()
        yield entries

    def no_writer(*_: object) -> None:
        raise AssertionError("it is written again")

    monkeypatch.setattr(seeding, "CopyingWriter", no_writer)
    monkeypatch.setattr(seeding, "StrictCache", lambda place: [StrictCache(place), prepare()][0])

    def prepare() -> None:
        passing.write_bytes(b"")
        monkeypatch.setattr(os, "scandir", then_remove)

    assert seed(model, directory, threads=0, index=False).present == written


# Pruning.


def test_what_another_pruning_removed_is_not_counted(directory: Path, once: Once) -> None:
    directory.mkdir()
    (directory / NAME).write_bytes(DATA)
    once(os, "unlink", directory / NAME, (directory / NAME).unlink, after=False)
    result = prune_cache(directory, max_bytes=0, index=False)
    assert (result.removed, result.removed_bytes, result.kept, result.failed) == ((), 0, 0, ())


def test_what_was_being_written_is_no_file_of_a_dead_writer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TensorCache(directory)
    with cache.writer() as writer:
        writer.write(DATA)
        real = prune.list_entries

        def then_commit(*arguments: Any, **options: Any) -> Any:
            listing = real(*arguments, **options)
            assert writer.commit(int(NAME, 16))
            return listing

        monkeypatch.setattr(prune, "list_entries", then_commit)
        result = prune_cache(directory, max_bytes=1 << 40, index=False)
    assert result.temporary == 0
    assert files_in(directory) == entries_of(DATA)


def test_a_directory_that_is_removed_before_it_is_pruned_is_not_made(directory: Path, once: Once) -> None:
    directory.mkdir()
    once(prune, "list_entries", directory, directory.rmdir)
    assert prune_cache(directory, max_bytes=0, index=False).removed == ()
    assert not directory.exists()


# Verifying.


@pytest.mark.parametrize("bad", ["keep", "quarantine", "remove"])
def test_a_good_one_that_replaces_what_could_not_be_opened(
    bad: Any, directory: Path, tmp_path: Path, once: Once
) -> None:
    directory.mkdir()
    (directory / NAME).write_bytes(DATA)

    def make_a_link() -> None:
        (directory / NAME).unlink()
        (directory / NAME).symlink_to(tmp_path)

    def replace() -> None:
        (directory / "new").write_bytes(DATA)
        os.replace(directory / "new", directory / NAME)

    once(check, "list_entries", directory, make_a_link)
    once(os, "open", directory / NAME, replace)
    report = verify_cache(directory, threads=0, bad=bad, index=False)
    assert (report.bad, report.unchecked, report.changing, report.entries) == ((), (), (), 1)
    assert files_in(directory) == entries_of(DATA)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_one_that_is_another_file_at_each_attempt_is_changing(
    number: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir()
    (directory / NAME).write_bytes(DATA)

    def refuse(entry: Any) -> int:
        (directory / "new").write_bytes(DATA)
        os.replace(directory / "new", directory / NAME)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(check, "_open", refuse)
    report = verify_cache(directory, threads=0, bad="remove", index=False)
    assert (report.bad, report.unchecked, report.changing) == ((), (), (NAME,))
    assert files_in(directory) == entries_of(DATA)


def test_one_that_a_server_uses_while_it_is_read_is_read(directory: Path, once: Once) -> None:
    cache = TensorCache(directory)
    (directory / NAME).write_bytes(DATA)
    os.utime(directory / NAME, ns=(1, 1))

    def use() -> None:
        fd = cache.lookup(int(NAME, 16), len(DATA))
        assert fd is not None
        cache.used(fd)
        os.close(fd)

    for call in (1, 2, 3):
        once(check, "hash_with_digest", None, use, call=call)
    report = verify_cache(directory, threads=0, index=False)
    assert (report.entries, report.changing, report.bad) == (1, (), ())


@pytest.mark.parametrize("replaced", [False, True])
def test_one_that_goes_while_it_is_read_is_not_said_to_be_there(replaced: bool, directory: Path, once: Once) -> None:
    directory.mkdir()
    (directory / NAME).write_bytes(DATA)

    def go() -> None:
        (directory / NAME).unlink()
        if replaced:
            (directory / NAME).write_bytes(DATA[:-1])

    once(check, "hash_with_digest", None, go)
    report = verify_cache(directory, threads=0, index=False)
    assert (report.entries, len(report.bad)) == (int(replaced), int(replaced))


# Quarantine.


def anything(status: os.stat_result) -> bool:
    return True


def test_a_quarantine_that_is_emptied_before_the_move_has_the_bad_one_after_it(directory: Path, once: Once) -> None:
    directory.mkdir()
    (directory / NAME).write_bytes(b"bad")
    once(os, "rename", directory / NAME, lambda: empty_quarantine(directory), after=False)
    assert move_aside(directory / NAME, anything) == directory / FOLDER / f"{NAME}-0"
    assert [entry.path.read_bytes() for entry in list_quarantine(directory)] == [b"bad"]
    assert os.listdir(directory) == [FOLDER]


def test_one_that_is_emptied_out_at_once_was_moved(directory: Path, once: Once) -> None:
    cache = TensorCache(directory)
    (directory / NAME).write_bytes(b"bad")
    once(os, "rename", directory / NAME, lambda: empty_quarantine(directory))
    assert cache.quarantine(int(NAME, 16), "it is bad")
    assert cache.quarantined == 1
    assert os.listdir(directory) == []


def test_one_that_another_has_moved_first(directory: Path, once: Once) -> None:
    cache = TensorCache(directory)
    (directory / NAME).write_bytes(b"bad")
    once(os, "rename", directory / NAME, lambda: move_aside(directory / NAME, anything), after=False)
    assert not cache.quarantine(int(NAME, 16), "it is bad")
    assert [entry.path.read_bytes() for entry in list_quarantine(directory)] == [b"bad"]


def test_a_quarantine_that_never_stays_is_an_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir()
    (directory / NAME).write_bytes(b"bad")

    def emptied(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(quarantine.os, "rename", emptied)
    with pytest.raises(FileExistsError, match="does not stay"):
        move_aside(directory / NAME, anything)
    assert (directory / NAME).read_bytes() == b"bad"


def test_a_third_one_leaves_no_good_one_in_quarantine(directory: Path, once: Once) -> None:
    """The bad one was replaced before it was moved, and its place taken again before that was put back."""
    directory.mkdir()
    (directory / NAME).write_bytes(b"second")
    once(os, "link", None, lambda: (directory / NAME).write_bytes(b"third"), after=False)
    answers = iter([True, False])
    assert move_aside(directory / NAME, lambda status: next(answers)) is None
    assert (directory / NAME).read_bytes() == b"third"
    assert list_quarantine(directory) == []


MOVES = """
import sys
from pathlib import Path
from weightwire.cache.quarantine import empty_quarantine, move_aside
print("ready", flush=True)
sys.stdin.readline()
directory = Path(sys.argv[1])
for at in range(600):
    path = directory / f"{at:016x}"
    if sys.argv[2] == "empty":
        empty_quarantine(directory)
    else:
        move_aside(path, lambda status: True)
        assert not path.exists(), path
"""


def test_processes_that_move_the_same_while_others_empty_the_quarantine(directory: Path) -> None:
    directory.mkdir()
    for at in range(600):
        (directory / f"{at:016x}").write_bytes(b"bad")
    run_together(MOVES, [(str(directory), what) for what in ("move", "move", "empty")])
    empty_quarantine(directory)
    assert os.listdir(directory) == []


# Looking an entry up, and storing one.


def test_a_good_one_that_replaces_a_link_is_not_quarantined(directory: Path, tmp_path: Path, once: Once) -> None:
    cache = TensorCache(directory)
    (directory / NAME).symlink_to(tmp_path)

    def replace() -> None:
        with cache.writer() as writer:
            writer.write(DATA)
            assert writer.commit(int(NAME, 16))

    once(os, "open", directory / NAME, replace)
    fd = cache.lookup(int(NAME, 16), len(DATA))
    assert fd is not None
    os.close(fd)
    assert (files_in(directory), cache.quarantined) == (entries_of(DATA), 0)


@pytest.mark.parametrize("call", [1, 2])
def test_a_link_that_goes_is_a_miss(call: int, directory: Path, tmp_path: Path, once: Once) -> None:
    cache = TensorCache(directory)
    (directory / NAME).symlink_to(tmp_path)
    once(os, "open", directory / NAME, (directory / NAME).unlink, call=call)
    assert cache.lookup(int(NAME, 16), len(DATA)) is None
    assert (os.listdir(directory), cache.quarantined) == ([], 0)


def test_a_good_one_that_replaces_a_link_at_the_last_moment_stays(directory: Path, tmp_path: Path, once: Once) -> None:
    cache = TensorCache(directory)
    (directory / NAME).symlink_to(tmp_path)

    def replace() -> None:
        (directory / "new").write_bytes(DATA)
        os.replace(directory / "new", directory / NAME)

    once(os, "open", directory / NAME, replace, call=2)
    assert cache.lookup(int(NAME, 16), len(DATA)) is None
    assert (files_in(directory), cache.quarantined) == (entries_of(DATA), 0)


def test_one_that_is_given_up_while_it_is_put_in_place_is_no_news(
    directory: Path, once: Once, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "weightwire.cache")
    cache = TensorCache(directory)
    wanted = [True]
    with cache.writer() as writer:
        writer.write(DATA)

        def give_up() -> None:
            wanted.clear()
            writer.unlink()

        once(os, "replace", None, give_up, after=False)
        assert not writer.commit(int(NAME, 16), lambda: bool(wanted))
    assert (os.listdir(directory), caplog.records) == ([], [])


def test_half_of_what_a_stock_server_writes_says_nothing(directory: Path, once: Once) -> None:
    cache = TensorCache(directory)
    (directory / NAME).write_bytes(DATA[:100])
    once(store, "hash_payloads", None, lambda: (directory / NAME).write_bytes(DATA))
    cache.look_into(int(NAME, 16), len(DATA))
    assert (files_in(directory), cache.quarantined) == (entries_of(DATA), 0)
    fd = cache.lookup(int(NAME, 16), len(DATA))
    assert fd is not None
    os.close(fd)
