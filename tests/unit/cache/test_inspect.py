"""What is in a directory, told without opening any of it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from support.cachedir import contents, name_of, write_model

from weightwire.cache import cache_status, list_entries, seed
from weightwire.errors import CacheError, ConfigError
from weightwire.index import HashIndex

DATA = contents(5000, 6000, 7000)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "entries"
    path.mkdir()
    for at, data in enumerate(DATA.values()):
        entry = path / name_of(data)
        entry.write_bytes(data)
        os.utime(entry, (10_000 - at, 5_000))
    return path


def clutter(directory: Path) -> None:
    """Things that are no entries."""
    (directory / "0123456789abcdef").mkdir()
    (directory / "1123456789abcdef").symlink_to("/etc/passwd")
    os.mkfifo(directory / "2123456789abcdef")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(directory / "3123456789abcdef"))
    for name in ("0123456789ABCDEF", "0123456789abcde", "0123456789abcdef0", "notes.txt", ".weightwire-short.tmp"):
        (directory / name).write_bytes(b"x")
    (directory / ".weightwire-aaaaaaaa.tmp").write_bytes(b"half")
    (directory / ".weightwire-quarantine").mkdir()
    (directory / ".weightwire-quarantine" / "0123456789abcdef-0").write_bytes(b"bad")


def test_least_recently_used_first(directory: Path) -> None:
    entries = list_entries(directory, index=False).entries
    assert [entry.path.name for entry in entries] == [name_of(data) for data in reversed(DATA.values())]
    assert [entry.nbytes for entry in entries] == [7000, 6000, 5000]
    assert [entry.last_used_ns for entry in entries] == [at * 10**9 for at in (9998, 9999, 10_000)]
    assert [entry.content_hash for entry in entries] == [int(entry.path.name, 16) for entry in entries]


def test_a_write_is_a_use(directory: Path) -> None:
    first = directory / name_of(DATA["t0"])
    os.utime(first, (1, 20_000))
    assert list_entries(directory, index=False).entries[-1].path == first


def test_what_is_no_entry(directory: Path) -> None:
    clutter(directory)
    listing = list_entries(directory, index=False)
    assert len(listing.entries) == 3
    assert listing.misplaced == {
        "0123456789abcdef": "directory",
        "1123456789abcdef": "symbolic link",
        "2123456789abcdef": "fifo",
        "3123456789abcdef": "socket",
    }
    assert listing.temporary == {".weightwire-aaaaaaaa.tmp": 4}
    assert listing.others == sorted(
        ["0123456789ABCDEF", "0123456789abcde", "0123456789abcdef0", "notes.txt", ".weightwire-short.tmp"]
    )


@pytest.mark.usefixtures("small_threshold")
def test_whose_they_are(tmp_path: Path, index: HashIndex) -> None:
    model = write_model(tmp_path / "model.safetensors", DATA | {"same": DATA["t0"]})
    seed(model, tmp_path / "seeded", index=index)
    (tmp_path / "seeded" / name_of(b"strange")).write_bytes(b"strange")
    (tmp_path / "seeded" / name_of(DATA["t1"])).write_bytes(b"cut")
    owners = {
        entry.path.name: [(owner.path, owner.tensor) for owner in entry.owners]
        for entry in list_entries(tmp_path / "seeded", index=index).entries
    }
    both = owners.pop(name_of(DATA["t0"]))
    assert sorted(both) == [(str(model), "same"), (str(model), "t0")]
    assert owners == {name_of(DATA["t2"]): [(str(model), "t2")], name_of(DATA["t1"]): [], name_of(b"strange"): []}


def test_in_numbers(directory: Path) -> None:
    clutter(directory)
    status = cache_status(directory)
    room = os.statvfs(directory)
    assert (status.directory, status.entries, status.bytes) == (str(directory), 3, 18_000)
    assert (status.oldest_ns, status.newest_ns) == (9998 * 10**9, 10_000 * 10**9)
    assert (status.temporary, status.temporary_bytes) == (1, 4)
    assert (status.quarantined, status.quarantined_bytes) == (1, 3)
    assert (status.misplaced, status.others) == (4, 5)
    assert status.total_bytes == room.f_blocks * room.f_frsize
    assert 0 < status.free_bytes <= status.total_bytes


def test_an_empty_one(tmp_path: Path) -> None:
    assert list_entries(tmp_path, index=False).entries == []
    status = cache_status(tmp_path)
    assert (status.entries, status.bytes, status.oldest_ns, status.newest_ns) == (0, 0, None, None)


def test_nothing_is_made_and_nothing_removed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        list_entries(tmp_path / "none", index=False)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="not a directory"):
        cache_status(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]
    (tmp_path / ".weightwire-aaaaaaaa.tmp").write_bytes(b"half")
    list_entries(tmp_path, index=False)
    assert len(os.listdir(tmp_path)) == 2


def test_the_default_is_the_stock_servers(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    with pytest.raises(ConfigError, match="stock server"):
        list_entries(index=False)
    (tmp_path / "llama").mkdir()
    directory.rename(tmp_path / "llama" / "rpc")
    assert len(list_entries(index=False).entries) == 3


def test_one_that_cannot_be_listed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CacheError, match="Permission denied") as caught:
        list_entries(directory, index=False)
    assert (caught.value.path, caught.value.errno) == (str(directory), 13)


def test_an_entry_that_goes_meanwhile(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    class Gone:
        def __init__(self, path: Path) -> None:
            self._found = real(path)

        def __enter__(self) -> list[os.DirEntry[str]]:
            with self._found as found:
                entries = list(found)
            os.unlink(entries[0].path)
            return entries

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Gone)
    assert len(list_entries(directory, index=False).entries) == 2


def test_an_index_that_is_none(directory: Path) -> None:
    with pytest.raises(ConfigError, match="index"):
        list_entries(directory, index=5)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_threshold")
def test_an_index_by_its_path(tmp_path: Path, index: HashIndex) -> None:
    assert index.path is not None
    seed(write_model(tmp_path / "model.safetensors", DATA), tmp_path / "seeded", index=str(index.path))
    for chosen in (index, index.path, str(index.path)):
        assert all(entry.owners for entry in list_entries(tmp_path / "seeded", index=chosen).entries)
    for none in (False, None, True):  # the user's is off in the tests
        assert not any(entry.owners for entry in list_entries(tmp_path / "seeded", index=none).entries)
