"""Entries that are not what their names say, and what becomes of them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cachedir import contents, entries_of, files_in, name_of, write_model
from support.privileges import modes_apply

from weightwire.cache import BadEntry, check, seed, verify_cache
from weightwire.cache.quarantine import list_quarantine
from weightwire.errors import ConfigError
from weightwire.index import HashIndex

DATA = contents(5000, 70_000, 3 << 20, 1234)
FIRST = name_of(DATA["t0"])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "entries"
    path.mkdir()
    for data in DATA.values():
        (path / name_of(data)).write_bytes(data)
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("threads", [0, 1, 4, None])
def test_sound_ones(threads: int | None, directory: Path, no_leaks: object) -> None:
    told: list[tuple[str, int, int]] = []
    report = verify_cache(directory, threads=threads, index=False, progress=lambda *facts: told.append(facts))
    total = sum(map(len, DATA.values()))
    assert (report.directory, report.entries, report.bytes) == (str(directory), 4, total)
    assert (report.bad, report.changing, report.others, report.digests) == ((), (), (), 0)
    assert told[-1][1:] == (total, total)
    assert len(told) == 4


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def shorter(path: Path) -> None:
    os.truncate(path, 4000)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def another(path: Path) -> None:
    path.write_bytes(DATA["t1"])


@pytest.mark.parametrize("bad", ["keep", "quarantine", "remove"])
@pytest.mark.parametrize(
    ("how", "kind"),
    [(flip, "content"), (longer, "content"), (shorter, "content"), (another, "content"), (empty, "truncated")],
)
def test_bad_ones(how: Callable[[Path], None], kind: str, bad: Any, directory: Path) -> None:
    how(directory / FIRST)
    spoiled = (directory / FIRST).read_bytes()
    report = verify_cache(directory, bad=bad, index=False)
    (found,) = report.bad
    assert (found.name, found.kind, found.nbytes) == (FIRST, kind, len(spoiled))
    if kind == "content":
        assert name_of(spoiled) in found.reason
    assert report.entries == 4
    moved = directory / ".weightwire-quarantine" / f"{FIRST}-0"
    assert found.action == {"keep": "none", "quarantine": "quarantined", "remove": "removed"}[bad]
    assert (directory / FIRST).exists() == (bad == "keep")
    assert moved.exists() == (bad == "quarantine")
    if bad == "quarantine":
        assert moved.read_bytes() == spoiled
    rest = {name: data for name, data in entries_of(*DATA.values()).items() if name != FIRST}
    assert {name: (directory / name).read_bytes() for name in rest} == rest
    if bad != "keep":
        assert verify_cache(directory, index=False).bad == ()


def test_what_is_no_file_is_reported_and_left_alone(directory: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"mine")
    (directory / "0123456789abcdef").mkdir()
    (directory / "1123456789abcdef").symlink_to(secret)
    os.mkfifo(directory / "2123456789abcdef")
    (directory / "0123456789ABCDEF").write_bytes(b"x")
    before = sorted(os.listdir(directory))
    for bad in ("keep", "quarantine", "remove"):
        report = verify_cache(directory, bad=bad, index=False)  # type: ignore[arg-type]
        assert [(each.name[0], each.kind, each.action) for each in report.bad] == [
            ("0", "directory", "none"),
            ("1", "symbolic link", "none"),
            ("2", "fifo", "none"),
        ]
        assert report.others == ("0123456789ABCDEF",)
        assert report.entries == 4
    assert sorted(os.listdir(directory)) == before
    assert secret.read_bytes() == b"mine"


@pytest.mark.parametrize("bad", ["keep", "quarantine", "remove"])
def test_one_that_nobody_may_read(bad: Any, directory: Path) -> None:
    entry = next(path for path in sorted(directory.iterdir()) if path.is_file())
    entry.chmod(0)
    with modes_apply():
        report = verify_cache(directory, bad=bad, index=False)
    (found,) = report.bad
    assert (found.name, found.kind, found.is_file) == (entry.name, "unreadable", True)
    assert found.action == {"keep": "none", "quarantine": "quarantined", "remove": "removed"}[bad]
    assert entry.exists() == (bad == "keep")
    assert len(list_quarantine(directory)) == (bad == "quarantine")


@pytest.mark.parametrize("bad", ["keep", "quarantine", "remove"])
@pytest.mark.parametrize(
    ("number", "said"), [(errno.EACCES, "another user's"), (errno.EMFILE, "Too many"), (errno.ENFILE, "Too many")]
)
def test_one_that_others_may_be_able_to_read_is_left_and_said(
    number: int, said: str, bad: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(entry: object) -> int:
        raise OSError(number, os.strerror(number))

    before = sorted(os.listdir(directory))
    monkeypatch.setattr(check, "_open", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    report = verify_cache(directory, bad=bad, index=False)
    assert [each.name for each in report.unchecked] == before
    assert all(each.errno == number and said in each.reason for each in report.unchecked)
    assert (report.bad, report.changing, report.entries, report.bytes) == ((), (), 0, 0)
    assert sorted(os.listdir(directory)) == before


@pytest.mark.parametrize("bad", ["keep", "remove"])
def test_one_that_cannot_be_opened_for_another_reason_is_bad(
    bad: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(entry: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = sorted(os.listdir(directory))
    monkeypatch.setattr(check, "_open", refuse)
    report = verify_cache(directory, bad=bad, index=False)
    assert [(each.name, each.kind, each.action) for each in report.bad] == [
        (name, "unreadable", "none") for name in before
    ]
    assert report.unchecked == ()
    assert sorted(os.listdir(directory)) == before


@pytest.mark.parametrize("threads", [0, 4])
def test_where_too_many_files_are_open_fewer_are_tried(
    threads: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused, again = check._open, set[str](), list[int]()

    def crowded(entry: Any) -> int:
        if entry.path.name not in refused:
            refused.add(entry.path.name)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        again.append(threading.get_ident())
        return real(entry)

    monkeypatch.setattr(check, "_open", crowded)
    flip(directory / FIRST)
    told: list[tuple[str, int, int]] = []
    report = verify_cache(directory, threads=threads, index=False, progress=lambda *facts: told.append(facts))
    assert (report.entries, report.unchecked, [each.name for each in report.bad]) == (4, (), [FIRST])
    assert again == [threading.get_ident()] * 4
    assert [facts[1] for facts in told][-1] == told[-1][2] == sum(map(len, DATA.values()))
    assert len(told) == 4


def test_where_too_many_files_are_open_to_move_one_it_is_tried_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = check.move_aside, list[Path]()

    def crowded(path: Path, is_it: Any) -> Any:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, is_it)

    monkeypatch.setattr(check, "move_aside", crowded)
    flip(directory / FIRST)
    (found,) = verify_cache(directory, bad="quarantine", index=False).bad
    assert (found.action, len(calls)) == ("quarantined", 2)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_what_takes_an_entrys_place_after_the_listing(
    make: Callable[[Path], None], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifo must not be waited for, a link not followed."""
    real = check.list_entries

    def then_replace(*arguments: Any, **options: Any) -> Any:
        listing = real(*arguments, **options)
        (directory / FIRST).unlink()
        make(directory / FIRST)
        return listing

    monkeypatch.setattr(check, "list_entries", then_replace)
    (found,) = verify_cache(directory, bad="remove", index=False).bad
    assert (found.name, found.action) == (FIRST, "none")
    assert found.kind in ("fifo", "symbolic link", "directory")
    assert os.path.lexists(directory / FIRST)


def test_one_that_goes_meanwhile_is_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = check.list_entries

    def then_remove(*arguments: Any, **options: Any) -> Any:
        listing = real(*arguments, **options)
        (directory / FIRST).unlink()
        return listing

    monkeypatch.setattr(check, "list_entries", then_remove)
    report = verify_cache(directory, index=False)
    assert (report.entries, report.bad, report.changing) == (3, (), ())


def test_one_that_is_written_to_meanwhile_is_read_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stock server fills one: what was read of a half says nothing."""
    real = check.hash_with_digest
    whole = DATA["t0"]
    (directory / FIRST).write_bytes(whole[:100])
    calls: list[int] = []

    def then_finish(content: Any, *rest: Any, **options: Any) -> Any:
        hashes = real(content, *rest, **options)
        if content.path.endswith(FIRST):
            calls.append(content.nbytes)
            (directory / FIRST).write_bytes(whole)
        return hashes

    monkeypatch.setattr(check, "hash_with_digest", then_finish)
    report = verify_cache(directory, threads=0, bad="remove", index=False)
    assert report.bad == ()
    assert calls[:2] == [100, 5000]
    assert (directory / FIRST).read_bytes() == whole


def test_one_that_does_not_stop_changing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = check.hash_with_digest

    def then_grow(content: Any, *rest: Any, **options: Any) -> Any:
        hashes = real(content, *rest, **options)
        if content.path.endswith(FIRST):
            with open(directory / FIRST, "ab") as file:
                file.write(b"more")
        return hashes

    monkeypatch.setattr(check, "hash_with_digest", then_grow)
    report = verify_cache(directory, bad="remove", index=False)
    assert (report.bad, report.changing, report.entries) == ((), (FIRST,), 3)
    assert (directory / FIRST).exists()


@pytest.mark.parametrize("bad", ["quarantine", "remove"])
def test_a_good_one_that_takes_its_place_is_kept(bad: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(directory / FIRST)
    real = check._act

    def replaced_first(*arguments: Any) -> BadEntry:
        (directory / "new").write_bytes(DATA["t0"])
        os.replace(directory / "new", directory / FIRST)
        return real(*arguments)

    monkeypatch.setattr(check, "_act", replaced_first)
    (found,) = verify_cache(directory, bad=bad, index=False).bad
    assert found.action == "none"
    assert (directory / FIRST).read_bytes() == DATA["t0"]


def test_one_that_cannot_be_moved(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(directory / FIRST)

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    (found,) = verify_cache(directory, bad="remove", index=False).bad
    assert found.action == "failed"
    assert "Permission denied" in found.reason


def test_being_checked_is_no_use_of_an_entry(directory: Path) -> None:
    for path in directory.iterdir():
        os.utime(path, (1000, 2000))  # such that the file system would note the next access
    verify_cache(directory, index=False)
    assert {path.stat().st_atime for path in directory.iterdir()} == {1000}


# With the index.


@pytest.mark.usefixtures("small_threshold")
def test_the_index_knows_more(tmp_path: Path, index: HashIndex) -> None:
    directory = tmp_path / "seeded"
    seed(write_model(tmp_path / "model.safetensors", DATA), directory, index=index)
    assert verify_cache(directory, index=index).digests == 4
    os.truncate(directory / FIRST, 100)
    (found,) = verify_cache(directory, index=index).bad
    assert found.kind == "truncated"
    assert "100 bytes of the 5000 of 't0'" in found.reason


@pytest.mark.usefixtures("small_threshold")
def test_a_collision(tmp_path: Path, index: HashIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "seeded"
    seed(write_model(tmp_path / "model.safetensors", DATA), directory, index=index)
    # No two contents with one FNV-1a are at hand: the index says that the tensor's BLAKE3 was another.
    owners = {
        value: [owner._replace(blake3=bytes(32)) if owner.tensor == "t0" else owner for owner in found]
        for value, found in index.owners().items()
    }
    monkeypatch.setattr(index, "owners", lambda: owners)
    (found,) = verify_cache(directory, index=index, bad="quarantine").bad
    assert (found.name, found.kind, found.action) == (FIRST, "collision", "quarantined")
    assert "BLAKE3" in found.reason
    assert FIRST not in os.listdir(directory)


def test_what_cannot_be_meant(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bad"):
        verify_cache(directory, bad="burn")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="threads"):
        verify_cache(directory, threads=-1)
    with pytest.raises(ConfigError, match="progress"):
        verify_cache(directory, progress=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not exist"):
        verify_cache(tmp_path / "none")


@pytest.mark.parametrize("raised", [KeyboardInterrupt, StopIteration])
def test_an_interrupt_ends_it(raised: type[BaseException], directory: Path, no_leaks: object) -> None:
    def interrupt(*_: object) -> None:
        raise raised

    for threads in (0, 2):
        with pytest.raises(raised):
            verify_cache(directory, threads=threads, index=False, progress=interrupt)
    assert files_in(directory) == entries_of(*DATA.values())
