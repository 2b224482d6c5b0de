"""Filling a directory from a model: the right entries, never a wrong one, whatever happens meanwhile."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from support.cachedir import contents, entries_of, files_in, name_of, write_model

import weightwire
from weightwire.cache import seed, seeding
from weightwire.errors import CacheError, ConfigError
from weightwire.index import Hashes, HashIndex, identity_of
from weightwire.model import open_model
from weightwire.ranges import FileRange
from weightwire.wire import CACHE_THRESHOLD

pytestmark = pytest.mark.usefixtures("small_threshold")

MIB = 1 << 20


def expected(tensors: dict[str, bytes]) -> dict[str, bytes]:
    return entries_of(*(data for data in tensors.values() if len(data) > 1000))


@pytest.mark.parametrize("threads", [0, 1, 2, 32, None])
def test_an_entry_for_every_large_tensor_and_no_other(
    threads: int | None, model: Path, directory: Path, tensors: dict[str, bytes], no_leaks: object
) -> None:
    result = seed(model, directory, threads=threads, index=False)
    assert files_in(directory) == expected(tensors)
    assert (result.directory, result.tensors, result.written) == (str(directory), 5, 5)
    assert result.bytes == result.written_bytes == sum(len(data) for data in expected(tensors).values())
    assert (result.present, result.unread, result.duplicates, result.replaced) == (0, 0, 0, 0)
    assert result.seconds > 0


def test_the_threshold_is_that_of_the_protocol(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "CACHE_THRESHOLD", CACHE_THRESHOLD)
    tensors = contents(10 * MIB - 1, 10 * MIB, 10 * MIB + 1)
    seed(write_model(tmp_path / "model.safetensors", tensors), directory, index=False)
    assert files_in(directory) == entries_of(tensors["t2"])


def test_what_our_server_saves_is_the_same(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "CACHE_THRESHOLD", CACHE_THRESHOLD)
    tensors = contents(10 * MIB, 10 * MIB + 1, 12 * MIB)
    model = write_model(tmp_path / "model.safetensors", tensors)
    seed(model, directory, index=False)
    with (
        weightwire.Server(port=0, cache=tmp_path / "saved") as server,
        weightwire.connect(server.endpoints[0]) as connection,
    ):
        connection.push(model)
    assert files_in(directory) == files_in(tmp_path / "saved")


def test_entries_have_ordinary_permissions(model: Path, directory: Path) -> None:
    before = os.umask(0o027)
    try:
        seed(model, directory, index=False)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o640}


def test_arrays_and_an_open_model(model: Path, directory: Path, tensors: dict[str, bytes], tmp_path: Path) -> None:
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in tensors.items() if data}
    seed(arrays, directory, index=False)
    with open_model(model) as opened:
        seed(opened, tmp_path / "other", index=False)
        opened.check_unchanged()  # it is still open
    assert files_in(directory) == files_in(tmp_path / "other") == expected(tensors)


def test_only_what_is_included(model: Path, directory: Path, tensors: dict[str, bytes]) -> None:
    result = seed(model, directory, include="[13]$", index=False)
    assert files_in(directory) == entries_of(tensors["t1"], tensors["t3"])
    assert result.tensors == 2
    assert seed(model, directory, include="t2", index=False).tensors == 0
    with pytest.raises(ConfigError, match="nosuch"):
        seed(model, directory, include="nosuch", index=False)
    with pytest.raises(ConfigError, match="regular expression"):
        seed(model, directory, include="[", index=False)


@pytest.mark.parametrize("threads", [-1, 65, 1.5, True, "2"])
def test_threads_that_cannot_be(threads: Any, model: Path, directory: Path) -> None:
    with pytest.raises(ConfigError, match="threads"):
        seed(model, directory, threads=threads)
    assert not directory.exists()


@pytest.mark.parametrize("known", [False, True], ids=["no index", "index"])
def test_equal_tensors_have_one_entry(known: bool, tmp_path: Path, directory: Path, index: HashIndex) -> None:
    tensors = {**contents(5000), "same": contents(5000)["t0"], "again": contents(5000)["t0"]}
    model = write_model(tmp_path / "model.safetensors", tensors)
    result = seed(model, directory, index=index if known else False)
    assert (result.tensors, result.written, result.duplicates) == (3, 1, 2)
    again = seed(model, directory, index=index if known else False)
    assert (again.written, again.present, again.duplicates) == (0, 1, 2)
    assert files_in(directory) == entries_of(tensors["t0"])


@pytest.mark.parametrize("progress", [5, "x"])
def test_a_progress_that_cannot_be_called(progress: Any, model: Path, directory: Path) -> None:
    with pytest.raises(ConfigError, match="progress"):
        seed(model, directory, progress=progress, index=False)
    assert not directory.exists()


@pytest.mark.parametrize("verify", ["no", None, 1])
def test_a_flag_that_is_none(verify: Any, model: Path, directory: Path) -> None:
    with pytest.raises(ConfigError, match=f"verify: {verify!r} is neither True nor False"):
        seed(model, directory, verify=verify, index=False)
    assert not directory.exists()


@pytest.mark.parametrize("name", ["a\0b", "\ud800", " "])
def test_a_directory_that_no_file_could_be_called(name: str, model: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        seed(model, name, index=False)


def test_progress_is_told_on_this_thread_and_arrives(model: Path, directory: Path) -> None:
    told: list[tuple[str, int, int]] = []
    threads = set()

    def progress(name: str, done: int, total: int) -> None:
        told.append((name, done, total))
        threads.add(threading.current_thread())

    result = seed(model, directory, threads=2, index=False, progress=progress)
    assert threads == {threading.main_thread()}
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1:] == (result.bytes, result.bytes)


# What is there already.


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every payload that is hashed from here on."""
    sizes: list[int] = []
    plain, both = seeding.hash_payloads, seeding.hash_with_digest

    def hash_payloads(payloads: Any, **options: Any) -> Any:
        sizes.extend(payload.nbytes for payload in payloads)
        return plain(payloads, **options)

    def hash_with_digest(payload: Any, *rest: Any, **options: Any) -> Any:
        sizes.append(payload.nbytes)
        return both(payload, *rest, **options)

    monkeypatch.setattr(seeding, "hash_payloads", hash_payloads)
    monkeypatch.setattr(seeding, "hash_with_digest", hash_with_digest)
    return sizes


def test_with_the_index_nothing_is_read_again(
    model: Path, directory: Path, index: HashIndex, tensors: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed(model, directory, index=index)
    owners = {f"{value:016x}": [o.tensor for o in found] for value, found in index.owners().items()}
    assert owners == {name_of(data): [name] for name, data in tensors.items() if len(data) > 1000}
    sizes = reads_of(monkeypatch)
    result = seed(model, directory, index=index)
    assert (result.written, result.present, result.unread) == (0, 5, 5)
    assert sizes == []
    # What has gone since is made again, of which only the copy is read.
    (directory / name_of(tensors["t3"])).unlink()
    result = seed(model, directory, index=index)
    assert (result.written, result.present) == (1, 4)
    assert sizes == [len(tensors["t3"])]
    assert files_in(directory) == expected(tensors)


def test_without_it_the_model_is_read_and_nothing_is_written(
    model: Path, directory: Path, tensors: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed(model, directory, index=False)
    sizes = reads_of(monkeypatch)
    monkeypatch.setattr(seeding, "CopyingWriter", None)
    result = seed(model, directory, index=False)
    assert (result.written, result.present, result.unread) == (0, 5, 5)
    assert sorted(sizes) == sorted(len(data) for data in expected(tensors).values())


def test_an_entry_that_is_there_counts_as_used(model: Path, directory: Path) -> None:
    seed(model, directory, index=False)
    paths = list(directory.iterdir())
    for path in paths:
        os.utime(path, (1000, 1000))
    seed(model, directory, index=False)
    assert all(path.stat().st_atime > 1_000_000 for path in paths)
    assert {path.stat().st_mtime for path in paths} == {1000}


@pytest.mark.parametrize("known", [False, True], ids=["no index", "index"])
def test_verify_reads_entries_and_replaces_damaged_ones(
    known: bool,
    model: Path,
    directory: Path,
    tensors: dict[str, bytes],
    index: HashIndex,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use = index if known else False
    seed(model, directory, index=use)
    bad = directory / name_of(tensors["t1"])
    bad.write_bytes(bytes(5000))
    assert seed(model, directory, index=use).written == 0, "the size is right, and nobody looked"
    result = seed(model, directory, index=use, verify=True)
    assert (result.written, result.replaced, result.present, result.unread) == (1, 1, 4, 0)
    assert files_in(directory) == expected(tensors)
    assert bad.name in caplog.text


@pytest.mark.parametrize("nbytes", [0, 4999, 5001])
def test_an_entry_of_another_size_is_replaced(
    nbytes: int, model: Path, directory: Path, tensors: dict[str, bytes]
) -> None:
    directory.mkdir()
    (directory / name_of(tensors["t1"])).write_bytes(bytes(nbytes))
    result = seed(model, directory, index=False)
    assert (result.written, result.replaced) == (5, 1)
    assert files_in(directory) == expected(tensors)


def test_a_link_in_an_entrys_place_is_not_followed(
    model: Path, directory: Path, tensors: dict[str, bytes], tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(tensors["t1"])
    directory.mkdir()
    (directory / name_of(tensors["t1"])).symlink_to(foreign)
    foreign_before = foreign.stat().st_mtime_ns
    seed(model, directory, index=False)
    assert not (directory / name_of(tensors["t1"])).is_symlink()
    assert (directory / name_of(tensors["t1"])).read_bytes() == tensors["t1"]
    assert foreign.stat().st_mtime_ns == foreign_before


# What goes wrong.


@pytest.mark.parametrize("threads", [0, 2])
def test_a_directory_in_an_entrys_place_costs_this_entry_alone(
    threads: int, model: Path, directory: Path, tensors: dict[str, bytes]
) -> None:
    names = [name_of(tensors["t1"]), name_of(tensors["t3"])]
    directory.mkdir()
    (directory / name_of(tensors["t0"])).write_bytes(tensors["t0"])
    for count in (1, 2):
        (directory / names[count - 1]).unlink(missing_ok=True)
        (directory / names[count - 1]).mkdir()
        with pytest.raises(CacheError, match=r"t1|t3") as caught:
            seed(model, directory, threads=threads, index=False)
        assert caught.value.errno == errno.EISDIR
        assert "weightwire cache verify" in caught.value.hint
        told = "3 of 5 entries were stored, 1 was there before, 1 could not be"
        if count == 2:
            told = "0 of 5 entries were stored, 3 were there before, 2 could not be"
        assert told in caught.value.detail
        assert sorted(os.listdir(directory)) == sorted(expected(tensors))
        stored = {name: data for name, data in expected(tensors).items() if name not in names[:count]}
        assert {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()} == stored


def test_a_file_where_the_directory_should_be(model: Path, directory: Path) -> None:
    directory.write_bytes(b"")
    for place in (directory, directory / "below"):
        with pytest.raises(ConfigError, match=str(place)):
            seed(model, place, index=False)


def test_an_index_that_is_wrong_about_the_model_makes_no_wrong_entry(
    model: Path, directory: Path, tensors: dict[str, bytes], index: HashIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a write through a mapping, which file systems note later."""
    seed(model, directory, index=index)
    known = index.find
    wrong = {len(tensors["t1"]): 12345}

    def lie(ranges: Any) -> Any:
        found = known(ranges)
        return [
            hashes._replace(fnv1a=wrong[each.nbytes]) if hashes and each.nbytes in wrong else hashes
            for each, hashes in zip(ranges, found, strict=True)
        ]

    monkeypatch.setattr(index, "find", lie)
    result = seed(model, directory, index=index)
    assert files_in(directory) == expected(tensors)
    assert (result.written, result.present) == (0, 5)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, StopIteration])
def test_what_the_caller_raises_ends_it_and_leaves_no_part_of_a_file(
    threads: int, error: type[BaseException], tmp_path: Path, directory: Path, no_leaks: object
) -> None:
    tensors = contents(*[3 * MIB] * 12)
    model = write_model(tmp_path / "model.safetensors", tensors)

    def progress(name: str, done: int, total: int) -> None:
        if done:
            raise error

    with pytest.raises(error):
        seed(model, directory, threads=threads, index=False, progress=progress)
    assert files_in(directory).items() <= entries_of(*tensors.values()).items()


def test_a_worker_that_fails_ends_it(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: object
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(seeding, "hash_with_digest", fail)
    with pytest.raises(MemoryError):
        seed(model, directory, threads=2, index=False)
    assert files_in(directory) == {}


TWO = """
import sys
from weightwire.cache import seed, seeding
seeding.CACHE_THRESHOLD = 1000
print("ready", flush=True)
sys.stdin.readline()
seed(sys.argv[1], sys.argv[2], threads=2)
"""


def test_processes_that_seed_the_same(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = contents(*[MIB + at for at in range(8)], 1001, 1001)
    model = write_model(tmp_path / "model.safetensors", tensors)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(model), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"WEIGHTWIRE_INDEX": str(tmp_path / "index.sqlite3")},
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    said = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert files_in(directory) == entries_of(*tensors.values())


def test_the_default_directory_is_the_stock_servers(
    model: Path, tmp_path: Path, tensors: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    seed(model, index=False)
    assert files_in(tmp_path / "llama" / "rpc") == expected(tensors)


def refuse(number: int) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_what_the_kernel_refuses_is_read_and_written(
    model: Path, directory: Path, tensors: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
        monkeypatch.setattr(os, "copy_file_range", refuse(number))
        seed(model, directory, index=False)
        assert files_in(directory) == expected(tensors)
        for path in directory.iterdir():
            path.unlink()


def test_a_kernel_that_copies_nothing_and_one_that_stops_halfway(
    model: Path, directory: Path, tensors: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, calls = os.copy_file_range, []
    monkeypatch.setattr(os, "copy_file_range", lambda *arguments: 0)
    seed(model, directory, index=False)
    assert files_in(directory) == expected(tensors)

    def halfway(source: int, target: int, count: int, *offsets: int) -> int:
        calls.append(count)
        if len(calls) % 2 == 0:
            raise OSError(errno.EXDEV, "different now")
        return copy(source, target, min(count, 700), *offsets)

    for path in directory.iterdir():
        path.unlink()
    monkeypatch.setattr(os, "copy_file_range", halfway)
    seed(model, directory, threads=0, index=False)
    assert files_in(directory) == expected(tensors)


def test_nothing_is_logged_when_all_is_well(model: Path, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "weightwire")
    seed(model, directory, index=False)
    assert not caplog.records


def test_a_tensor_is_looked_for_among_entries_of_its_size_that_are_nobody_elses(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    equal = {f"t{at}": bytes([at]) * 5000 for at in range(6)}
    first = write_model(tmp_path / "first.safetensors", {"t0": equal["t0"]})
    model = write_model(tmp_path / "equal.safetensors", equal)
    seed(first, directory, threads=0, index=False)
    sizes = reads_of(monkeypatch)
    result = seed(model, directory, threads=0, index=False)
    assert (result.written, result.present) == (5, 1)
    assert sizes == [5000] * 6
    assert files_in(directory) == expected(equal)


def test_the_index_learns_both_hashes(
    model: Path, directory: Path, index: HashIndex, tensors: dict[str, bytes]
) -> None:
    """Whether an entry was written, or was there and had to be read."""
    large = {name: data for name, data in tensors.items() if len(data) > 1000}
    expected = {name: Hashes(weightwire.fnv1a64(data), blake3(data).digest()) for name, data in large.items()}
    for _ in ("written", "there"):
        seed(model, directory, index=index)
        with weightwire.open_model(model) as opened:
            ranges = {name: opened.tensors[name].payload for name in large}
            found = index.find([each for each in ranges.values() if isinstance(each, FileRange)])
        assert dict(zip(ranges, found, strict=True)) == expected
        assert index.path is not None
        index.close()
        index.path.unlink()


def test_what_the_index_said_wrongly_of_a_content_is_put_right(
    model: Path, directory: Path, index: HashIndex, tensors: dict[str, bytes]
) -> None:
    """The FNV-1a 64 was right, and its BLAKE3 not: as if another content of the same hash had been there before."""
    with weightwire.open_model(model) as opened:
        payload = opened.tensors["t3"].payload
        assert isinstance(payload, FileRange)
        wrong = Hashes(weightwire.fnv1a64(tensors["t3"]), bytes(32))
        assert index.record([(payload, "t3", wrong)], {payload.fd: identity_of(payload.fd)}) == 1
        seed(model, directory, index=index)
        assert index.find([payload]) == [wrong._replace(blake3=blake3(tensors["t3"]).digest())]
