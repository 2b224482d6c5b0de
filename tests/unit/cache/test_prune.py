"""Least recently used first, nothing but entries, and never what somebody is using."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.cachedir import contents, name_of
from support.leaks import eventually

import weightwire
from weightwire.cache import TensorCache, prune, prune_cache
from weightwire.errors import ConfigError

DAY = 86_400
DATA = list(contents(1000, 2000, 3000, 4000).values())
NAMES = [name_of(data) for data in DATA]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Four entries; each was used a day after the one before, the last of them yesterday."""
    path = tmp_path / "entries"
    path.mkdir()
    for at, (name, data) in enumerate(zip(NAMES, DATA, strict=True)):
        (path / name).write_bytes(data)
        used = time.time() - (4 - at) * DAY
        os.utime(path / name, (used, used - 100 * DAY))
    return path


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"max_bytes": 10_000}, 4),
        ({"max_bytes": 9_999}, 3),
        ({"max_bytes": 7_000}, 2),
        ({"max_bytes": 6_999}, 1),
        ({"max_bytes": 1}, 0),
        ({"max_bytes": 0}, 0),
        ({"max_age": 10 * DAY}, 4),
        ({"max_age": 1e300}, 4),
        ({"max_age": 10**400}, 4),
        ({"max_age": float("inf")}, 4),
        ({"max_age": float("inf"), "max_bytes": float("inf")}, 4),
        ({"max_age": 2.5 * DAY}, 2),
        ({"max_age": 0}, 0),
        ({"max_age": 3.5 * DAY, "max_bytes": 4000}, 1),
        ({"max_age": 2.5 * DAY, "max_bytes": 9_000}, 2),
    ],
)
def test_what_remains(options: dict[str, Any], left: int, directory: Path) -> None:
    tried = prune_cache(directory, dry_run=True, index=False, **options)
    assert sorted(os.listdir(directory)) == sorted(NAMES)
    result = prune_cache(directory, index=False, **options)
    assert sorted(os.listdir(directory)) == sorted(NAMES[4 - left :])
    assert [entry.path.name for entry in result.removed] == NAMES[: 4 - left]
    assert result.removed == tried.removed
    assert (tried.dry_run, result.dry_run) == (True, False)
    assert (result.kept, result.kept_bytes) == (left, sum(map(len, DATA[4 - left :])))
    assert result.removed_bytes == 10_000 - result.kept_bytes
    assert (tried.kept, tried.kept_bytes, tried.removed_bytes) == (
        result.kept,
        result.kept_bytes,
        result.removed_bytes,
    )


def test_nothing_but_entries(directory: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    (directory / "0123456789abcdef").mkdir()
    (directory / "1123456789abcdef").symlink_to(outside)
    os.mkfifo(directory / "2123456789abcdef")
    for name in ("0123456789ABCDEF", "0123456789abcdef0", "notes.txt", "model.gguf"):
        (directory / name).write_bytes(b"x")
    before = set(os.listdir(directory))
    prune_cache(directory, max_bytes=0, max_age=0, quarantine=True, index=False)
    assert set(os.listdir(directory)) == before - set(NAMES)
    assert outside.read_bytes() == b"mine"


def test_temporary_files_of_the_dead_go_and_others_stay(directory: Path) -> None:
    dead, alive = directory / ".weightwire-aaaaaaaa.tmp", directory / ".weightwire-bbbbbbbb.tmp"
    dead.write_bytes(b"half")
    with open(alive, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert prune_cache(directory, max_bytes=1 << 40, dry_run=True, index=False).temporary == 0
        assert dead.exists()
        assert prune_cache(directory, max_bytes=1 << 40, index=False).temporary == 1
    assert not dead.exists()
    assert alive.exists()


def test_the_quarantine(directory: Path) -> None:
    folder = directory / ".weightwire-quarantine"
    folder.mkdir()
    (folder / f"{NAMES[0]}-0").write_bytes(b"bad")
    (folder / f"{NAMES[0]}-1").write_bytes(b"worse")
    assert prune_cache(directory, max_bytes=1 << 40, index=False).quarantined == 0
    tried = prune_cache(directory, quarantine=True, dry_run=True, index=False)
    assert (tried.quarantined, tried.quarantined_bytes) == (2, 8)
    assert len(os.listdir(folder)) == 2
    result = prune_cache(directory, quarantine=True, index=False)
    assert (result.quarantined, result.quarantined_bytes, result.removed) == (2, 8, ())
    assert sorted(os.listdir(directory)) == sorted(NAMES)


def test_one_that_is_used_meanwhile_is_spared(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = prune.list_entries

    def then_use(*arguments: Any, **options: Any) -> Any:
        listing = real(*arguments, **options)
        os.utime(directory / NAMES[1])
        (directory / NAMES[2]).unlink()
        return listing

    monkeypatch.setattr(prune, "list_entries", then_use)
    result = prune_cache(directory, max_bytes=0, index=False)
    assert os.listdir(directory) == [NAMES[1]]
    assert (result.kept, result.kept_bytes, result.failed) == (1, 2000, ())


def test_one_that_cannot_be_removed_does_not_keep_the_others(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.unlink

    def refuse(path: Any, **options: Any) -> None:
        if str(path).endswith(NAMES[1]):
            raise PermissionError(1, "Operation not permitted")
        real(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    result = prune_cache(directory, max_bytes=0, index=False)
    assert result.failed == ((NAMES[1], "Operation not permitted"),)
    assert os.listdir(directory) == [NAMES[1]]


def test_who_has_an_entry_open_reads_on(directory: Path) -> None:
    cache = TensorCache(directory)
    fd = cache.lookup(int(NAMES[3], 16), len(DATA[3]))
    assert fd is not None
    prune_cache(directory, max_bytes=0, index=False)
    assert os.pread(fd, 1 << 20, 0) == DATA[3]
    os.close(fd)
    assert cache.lookup(int(NAMES[3], 16), len(DATA[3])) is None


def test_beside_a_running_server(tmp_path: Path) -> None:
    import numpy as np

    data = contents(11 << 20)["t0"]
    model = {"large": np.frombuffer(data, np.uint8)}
    entries = tmp_path / "entries"
    entry = entries / name_of(data)
    with (
        weightwire.Server(port=0, cache=entries) as server,
        weightwire.connect(server.endpoints[0]) as connection,
    ):
        for hits in (0, 1):
            assert connection.push(model, cache="always").summary.hits == hits
            assert eventually(entry.exists)
        prune_cache(entries, max_bytes=0, index=False)
        assert not entry.exists()
        assert connection.push(model, cache="always", verify=True).summary.hits == 0
        assert eventually(entry.exists)
        assert entry.read_bytes() == data


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"max_bytes": -1}, {"max_age": -0.5}, {"max_age": float("nan")}, {"max_bytes": "5"}, {"max_bytes": True}),
        *({"quarantine": "no"}, {"max_bytes": 0, "quarantine": None}, {"max_bytes": 0, "dry_run": 5}),
    ],
)
def test_what_cannot_be_meant(options: dict[str, Any], directory: Path) -> None:
    with pytest.raises(ConfigError):
        prune_cache(directory, **options)
    assert sorted(os.listdir(directory)) == sorted(NAMES)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        prune_cache(tmp_path / "none", max_bytes=0)
    assert not (tmp_path / "none").exists()
