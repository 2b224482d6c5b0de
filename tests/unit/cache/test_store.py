"""The cache on disk."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from weightwire.cache import store, writing
from weightwire.cache.directory import default_directory, entry_name
from weightwire.cache.quarantine import FOLDER, list_quarantine
from weightwire.cache.store import TensorCache
from weightwire.errors import CacheDirectoryError, ConfigError
from weightwire.hashing import fnv1a64
from weightwire.ranges import FileRange
from weightwire.server import Server

DATA = bytes(range(256)) * 50
HASH = fnv1a64(DATA)


@pytest.fixture
def cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> TensorCache:
    caplog.set_level(logging.DEBUG, "weightwire.cache")
    return TensorCache(tmp_path / "cache")


def read(fd: int | None) -> bytes:
    assert fd is not None
    try:
        return os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)


def save(cache: TensorCache, *chunks: bytes | bytearray | memoryview) -> bool:
    """Write an entry of ``chunks`` under the name of `DATA`. Whether it is there."""
    with cache.writer() as writer:
        for chunk in chunks:
            writer.write(chunk)
        return writer.commit(HASH)


def test_names_are_16_lower_case_digits() -> None:
    assert entry_name(0xABC) == "0000000000000abc"
    assert entry_name((1 << 64) - 1) == "f" * 16
    for wrong in (-1, 1 << 64):
        with pytest.raises(ValueError, match="64-bit"):
            entry_name(wrong)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LLAMA_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/rpc"),
        ({"LLAMA_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/llama.cpp/rpc"),
        ({"HOME": "/home/me"}, "/home/me/.cache/llama.cpp/rpc"),
    ],
)
def test_default_directory_is_the_stock_one(
    environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert default_directory() == Path(expected)


def test_the_directory_is_made(tmp_path: Path) -> None:
    TensorCache(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=str(path)):
            TensorCache(path)
    with pytest.raises(CacheDirectoryError, match="is not a directory") as caught:
        Server(port=0, cache=tmp_path / "file" / "below").start()
    assert (caught.value.errno, caught.value.path) == (errno.ENOTDIR, str(tmp_path / "file" / "below"))


def test_what_is_saved_is_found(cache: TensorCache) -> None:
    assert save(cache, DATA[:100], memoryview(DATA)[100:101], bytearray(DATA[101:]))
    assert cache.path_for(HASH).read_bytes() == DATA
    assert read(cache.lookup(HASH, len(DATA))) == DATA
    assert cache.size_of(HASH) == len(DATA)
    assert cache.holds(HASH, DATA)


def test_an_entry_has_ordinary_permissions_and_nothing_is_left_beside_it(cache: TensorCache) -> None:
    before = os.umask(0o027)
    try:
        save(cache, DATA)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.path_for(HASH).stat().st_mode) == 0o640
    assert os.listdir(cache.directory) == [entry_name(HASH)]


@pytest.mark.parametrize("nbytes", [0, len(DATA) - 1, len(DATA) + 1, 1 << 62])
def test_another_size_is_a_miss(cache: TensorCache, nbytes: int) -> None:
    save(cache, DATA)
    assert cache.lookup(HASH, nbytes) is None


class Hashed(list[int]):
    """The lengths of what a cache has hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        real = store.hash_payloads

        def noted(payloads: Sequence[FileRange], **options: Any) -> list[int]:
            self.extend(payload.nbytes for payload in payloads)
            assert self[-1] <= len(DATA), "more than anybody asked for"
            return real(payloads, **options)

        monkeypatch.setattr(store, "hash_payloads", noted)


def test_a_huge_entry_is_not_read_whole(cache: TensorCache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.path_for(HASH)
    path.write_bytes(b"something else")
    os.truncate(path, 1 << 40)
    hashed = Hashed(monkeypatch)
    cache.look_into(HASH, len(DATA))
    cache.look_into(HASH, len(DATA))
    assert hashed == [len(DATA)], "as much as the tensor has, and only once"
    assert path.exists(), "nothing shows that it is bad"
    assert save(cache, DATA)
    assert path.read_bytes() == DATA


def test_the_tensor_with_something_behind_it_is_bad(
    cache: TensorCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache.path_for(HASH)
    path.write_bytes(DATA)
    os.truncate(path, 1 << 40)
    hashed = Hashed(monkeypatch)
    cache.look_into(HASH, len(DATA) - 1)  # somebody asks for another tensor by this one's hash
    assert path.exists()
    cache.look_into(HASH, len(DATA))
    assert hashed == [len(DATA) - 1, len(DATA)]
    assert not path.exists()
    assert f"it has {1 << 40} bytes, where the tensor has {len(DATA)}" in caplog.text


def test_what_is_not_there_is_a_miss_without_a_word(cache: TensorCache, caplog: pytest.LogCaptureFixture) -> None:
    assert cache.lookup(1, 5) is None
    assert cache.size_of(1) is None
    assert not cache.holds(1, b"12345")
    assert not caplog.records


def test_a_link_is_not_followed_and_a_save_replaces_it(
    cache: TensorCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(DATA)
    cache.path_for(HASH).symlink_to(foreign)
    assert cache.lookup(HASH, len(DATA)) is None
    assert "symbolic link" in caplog.text
    assert cache.size_of(HASH) is None
    other = b"x" * len(DATA)
    assert save(cache, other)
    assert not cache.path_for(HASH).is_symlink()
    assert cache.path_for(HASH).read_bytes() == other
    assert foreign.read_bytes() == DATA


def test_a_directory_is_left_alone(cache: TensorCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.path_for(HASH).mkdir()
    assert cache.lookup(HASH, cache.path_for(HASH).stat().st_size) is None
    assert "not a regular file" in caplog.text
    assert not save(cache, DATA)
    assert not cache.quarantine(HASH, "test")
    assert os.listdir(cache.directory) == [entry_name(HASH)]


def test_a_fifo_is_not_waited_for(cache: TensorCache) -> None:
    os.mkfifo(cache.path_for(HASH))
    assert cache.lookup(HASH, 0) is None
    assert (cache.directory / FOLDER / f"{entry_name(HASH)}-0").is_fifo()


def test_what_is_quarantined_is_kept_aside_and_it_says_why(
    cache: TensorCache, caplog: pytest.LogCaptureFixture
) -> None:
    save(cache, DATA)
    assert cache.quarantine(HASH, "for a reason")
    assert not cache.path_for(HASH).exists()
    assert "for a reason" in caplog.text
    (there,) = list_quarantine(cache.directory)
    assert there.path == cache.directory / FOLDER / f"{entry_name(HASH)}-0"
    assert (there.content_hash, there.nbytes) == (HASH, len(DATA))
    assert there.path.read_bytes() == DATA
    assert not cache.quarantine(HASH, "again")


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"y" + data[1:]])
def test_holds_compares_every_byte(cache: TensorCache, change: object) -> None:
    cache.path_for(HASH).write_bytes(change(DATA))  # type: ignore[operator]
    assert not cache.holds(HASH, DATA)


def test_a_writer_that_is_left_leaves_nothing(cache: TensorCache) -> None:
    with cache.writer() as writer:
        writer.write(DATA)
        assert len(os.listdir(cache.directory)) == 1
    assert os.listdir(cache.directory) == []
    assert not writer.commit(HASH)


def test_a_writer_whose_user_fails_leaves_nothing(cache: TensorCache) -> None:
    with pytest.raises(RuntimeError, match="gone"), cache.writer() as writer:
        writer.write(DATA)
        raise RuntimeError("gone")
    assert os.listdir(cache.directory) == []


def test_a_save_replaces_a_bad_entry_in_one_step(cache: TensorCache) -> None:
    cache.path_for(HASH).write_bytes(b"half")
    fd = cache.lookup(HASH, 4)
    save(cache, DATA)
    assert read(fd) == b"half"  # who has the old file open keeps it whole
    assert cache.path_for(HASH).read_bytes() == DATA


def test_a_full_disk_is_reported_once(
    cache: TensorCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert not save(cache, DATA)
        assert not save(cache, DATA)
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
    assert "No space left on device" in caplog.records[0].getMessage()
    assert os.listdir(cache.directory) == []
    assert save(cache, DATA)  # and it recovers
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert not save(cache, DATA)
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "WARNING"]


def test_a_directory_that_has_vanished_loses_only_the_entry(
    cache: TensorCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.directory.rmdir()
    assert not save(cache, DATA)
    assert cache.lookup(HASH, len(DATA)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("directory", ["", "  ", "a\0b", b"bytes", 5, None])
def test_what_names_no_directory(directory: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cache directory"):
        TensorCache(directory)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


KILLED_WRITER = """
import os, signal, sys
from weightwire.cache import store, writing
from weightwire.cache.store import TensorCache
writer = TensorCache(sys.argv[1]).writer()
writer.write(b"half")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed(cache: TensorCache, caplog: pytest.LogCaptureFixture) -> None:
    subprocess.run([sys.executable, "-c", KILLED_WRITER, str(cache.directory)], timeout=60)
    (left,) = os.listdir(cache.directory)
    again = TensorCache(cache.directory)
    assert os.listdir(cache.directory) == []
    assert left in caplog.text
    assert save(again, DATA)


def test_what_is_being_written_is_left_alone(cache: TensorCache) -> None:
    with cache.writer() as writer:
        writer.write(DATA)
        TensorCache(cache.directory)
        assert writer.commit(HASH)
    assert cache.holds(HASH, DATA)


def test_files_of_others_are_left_alone(cache: TensorCache, tmp_path: Path) -> None:
    save(cache, DATA)
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    for name in (".tmp", ".abcdefgh.tmp", ".weightwire-short.tmp", "x.weightwire-abcdefgh.tmp", "0123456789abcdef.tmp"):
        (cache.directory / name).write_bytes(b"")
    (cache.directory / ".weightwire-aaaaaaaa.tmp").symlink_to(outside)
    (cache.directory / ".weightwire-bbbbbbbb.tmp").mkdir()
    os.mkfifo(cache.directory / ".weightwire-cccccccc.tmp")
    before = sorted(os.listdir(cache.directory))
    TensorCache(cache.directory)
    assert sorted(os.listdir(cache.directory)) == before
    assert outside.read_bytes() == b"mine"


def test_a_temporary_file_that_was_swept_before_it_was_locked_is_made_anew(
    cache: TensorCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = writing.fcntl.flock
    swept: list[str] = []

    def sweep_first(fd: int, how: int) -> None:
        if not swept:
            (name,) = os.listdir(cache.directory)
            swept.append(name)
            (cache.directory / name).unlink()
        lock(fd, how)

    monkeypatch.setattr(writing.fcntl, "flock", sweep_first)
    assert save(cache, DATA)
    assert os.listdir(cache.directory) == [entry_name(HASH)]
    assert swept


def test_an_entry_is_whole_and_synced_before_it_has_its_name(
    cache: TensorCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def record(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: object, **options: object) -> object:
            calls.append(name)
            assert not cache.path_for(HASH).exists()
            return real(*arguments, **options)

        monkeypatch.setattr(store.os, name, call)

    for name in ("write", "fchmod", "fsync", "replace"):
        record(name)
    with cache.writer() as writer:
        writer.write(DATA[:100])
        writer.write(DATA[100:])
        assert writer.commit(HASH)
    assert calls == ["write", "write", "fchmod", "fsync", "replace"]
    assert cache.path_for(HASH).read_bytes() == DATA
