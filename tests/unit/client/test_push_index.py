"""A push with the index of hashes: what it spares, what it learns, and what it must not believe."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from support import raw_gguf
from support.leaks import LeakCheck
from support.scripted import ScriptedServer, StandIn

from weightwire import connect, fnv1a64, open_model
from weightwire._native import _fnv1a
from weightwire.client import PushSummary, hashes, hashpool
from weightwire.errors import ConfigError, IntegrityError, ModelError
from weightwire.index import Hashes, HashIndex, identity_of
from weightwire.model import Model
from weightwire.ranges import FileRange

MIB = 1 << 20
LARGE = 11 * MIB

pytestmark = pytest.mark.usefixtures("always_settled")


def content(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(LARGE)


def write(path: Path, *seeds: int) -> Path:
    """A GGUF file of a large tensor for each seed, and a small one."""
    tensors = [raw_gguf.tensor(f"t{at}", (LARGE,), 24, at * LARGE) for at in range(len(seeds))]
    tensors.append(raw_gguf.tensor("small", (32,), 24, len(seeds) * LARGE))
    path.write_bytes(raw_gguf.build(tensors=tensors) + b"".join(map(content, seeds)) + bytes(range(32)))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", 1, 2, 3)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return tmp_path / "index.sqlite3"


def cache_of(*seeds: int) -> dict[int, bytes]:
    return {fnv1a64(content(seed)): content(seed) for seed in seeds}


def push(model: Any, server: StandIn | None = None, **options: Any) -> PushSummary:
    server = server or StandIn(flags=1)
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=30) as connection:
        return connection.push(model, **options).summary


def hashes_of(seed: int) -> Hashes:
    return Hashes(fnv1a64(content(seed)), blake3(content(seed)).digest())


def found_in(index: Path, model: Path) -> list[Hashes | None]:
    """What the index has of the tensors of the model."""
    with open_model(model) as opened, HashIndex(index) as known:
        return known.find([t.payload for t in opened.tensors.values() if isinstance(t.payload, FileRange)])


def rows(index: Path) -> dict[int, list[str]]:
    with HashIndex(index) as opened:
        return {value: [owner.tensor for owner in owners] for value, owners in opened.owners().items()}


def bytes_read() -> int:
    """What this process has read from files by system calls; sockets do not count (proc_pid_io(5))."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("threads", [0, 2])
def test_a_warm_push_reads_no_tensor(probe: bool, threads: int, model: Path, index: Path, no_leaks: LeakCheck) -> None:
    cache = cache_of(1, 2, 3)
    before = bytes_read()
    first = push(model, StandIn(flags=1, cache=cache), index=index, threads=threads, probe=probe)
    assert (first.hits, first.hashes_known) == (3, 0)
    assert bytes_read() - before > 3 * LARGE, "or the figure would prove nothing"
    before = bytes_read()
    second = push(model, StandIn(flags=1, cache=cache), index=index, threads=threads, probe=probe)
    assert (second.hits, second.hashes_known) == (3, 3)
    assert bytes_read() - before < MIB


def test_it_learns_what_was_pushed(model: Path, index: Path) -> None:
    assert push(model, index=index).misses == 3
    assert rows(index) == {fnv1a64(content(seed)): [f"t{seed - 1}"] for seed in (1, 2, 3)}
    assert found_in(index, model) == [*(hashes_of(seed) for seed in (1, 2, 3)), None]


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": 2}, {"read": "read"}, {"drop_behind": True}], ids=str)
def test_both_hashes_are_learned_however_it_is_read(options: dict[str, Any], model: Path, index: Path) -> None:
    """Of what the server had, and of what was sent."""
    summary = push(model, StandIn(flags=1, cache=cache_of(1)), index=index, **options)
    assert (summary.hits, summary.misses) == (1, 2)
    assert found_in(index, model) == [*(hashes_of(seed) for seed in (1, 2, 3)), None]


@pytest.fixture(params=["the best", "plain"])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """How tensors are hashed: where the CPU has no vectors, several are together."""
    chosen = _fnv1a.chosen()
    if request.param == "plain":
        _fnv1a.choose("plain")
    yield request.param
    _fnv1a.choose(chosen)


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("threads", [0, 1, 2])
def test_no_tensor_that_the_server_has_is_read_twice(threads: int, model: Path, index: Path) -> None:
    before = bytes_read()
    summary = push(model, StandIn(flags=1, cache=cache_of(1, 2, 3)), index=index, threads=threads)
    assert summary.hits == 3
    assert 3 * LARGE < bytes_read() - before < 3 * LARGE + MIB


def test_a_part_is_learned_and_the_rest_added(model: Path, index: Path) -> None:
    push(model, index=index, include="t1")
    summary = push(model, index=index)
    assert (summary.hashes_known, summary.threads > 0) == (1, True)
    assert len(rows(index)) == 3


def test_a_changed_file_is_hashed_anew(model: Path, index: Path) -> None:
    push(model, index=index)
    write(model, 1, 9, 3)
    server = StandIn(flags=1, cache=cache_of(1, 2, 3))
    summary = push(model, server, index=index, verify=True)
    assert (summary.hashes_known, summary.hits, summary.misses, summary.corrupt_hits) == (0, 2, 1, 0)
    assert sorted(rows(index)) == sorted(fnv1a64(content(seed)) for seed in (1, 9, 3))
    assert push(model, index=index).hashes_known == 3


@pytest.mark.parametrize("way", ["False", "off", "never", "no cache"])
def test_when_it_is_left_alone(way: str, model: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_INDEX", "off" if way == "off" else str(index))
    options = {"False": {"index": False}, "never": {"cache": "never"}}.get(way, {})
    push(model, StandIn(flags=0 if way == "no cache" else 1), **options)
    assert not index.exists()


def test_the_users_own_is_the_default(model: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_INDEX", str(index))
    push(model)
    assert len(rows(index)) == 3
    monkeypatch.setenv("WEIGHTWIRE_INDEX", "off")
    with HashIndex(index) as mine:
        assert push(model, index=mine).hashes_known == 3
        assert mine.find([]) == [], "and it is still open"


def test_arrays_have_no_identity(index: Path) -> None:
    summary = push({"w": np.frombuffer(content(1), np.uint8)}, index=index)
    assert (summary.misses, summary.hashes_known) == (1, 0)
    assert rows(index) == {}


def test_an_index_that_is_none(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="index"):
        push(model, index=5)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert push(model, index=folder).misses == 3, "what the disk does is no reason to fail"


class Stop(Exception):
    """What a callback raises."""


def test_a_push_that_fails_teaches_nothing(model: Path, index: Path, no_leaks: LeakCheck) -> None:
    def stop(*_: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        push(model, index=index, progress=stop)
    assert rows(index) == {}


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("how", ["touched", "rewritten", "cut"])
def test_a_model_rewritten_while_it_is_pushed(
    how: str, threads: int, model: Path, index: Path, no_leaks: LeakCheck
) -> None:
    """An error, not a mix; nothing of it is remembered."""
    done = threading.Event()

    def change(name: str, at: int, total: int) -> None:
        if done.is_set():
            return
        done.set()
        if how == "touched":
            os.utime(model, (1, 1))
        elif how == "rewritten":
            with model.open("r+b") as file:
                file.seek(2 * LARGE)
                file.write(content(8))
        else:
            os.truncate(model, 2 * LARGE)

    server = StandIn(flags=1, cache=cache_of(1))
    with pytest.raises(ModelError, match=r"modified|shorter|written"):
        push(model, server, index=index, threads=threads, progress=change)
    assert done.is_set()
    assert rows(index) == {}


def test_a_model_changed_while_the_index_is_finished(
    model: Path, index: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    record = hashes.TensorHashes.record

    def change(found: hashes.TensorHashes, model_: Model) -> int:
        os.utime(model, (1, 1))
        return record(found, model_)

    monkeypatch.setattr(hashes.TensorHashes, "record", change)
    with pytest.raises(ModelError, match="modified"):
        push(model, index=index)
    assert rows(index) == {}


@pytest.mark.parametrize(
    "options", [{"verify": True, "probe": False}, {"probe": True}, {"verify": True, "probe": True}]
)
def test_a_wrong_row_is_found_and_put_right(
    options: dict[str, bool], model: Path, index: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server has what the row names, and it is another tensor's content."""
    push(model, index=index)
    with open_model(model) as opened, HashIndex(index) as known:
        payload = opened.tensors["t1"].payload
        assert isinstance(payload, FileRange)
        wrong = Hashes(fnv1a64(content(5)), bytes(32))
        assert known.record([(payload, "t1", wrong)], {payload.fd: identity_of(payload.fd)}) == 1
    server = StandIn(flags=1, cache=cache_of(1, 2, 3, 5))
    with caplog.at_level(logging.WARNING):
        summary = push(model, server, index=index, **options)
    assert (summary.hashes_known, summary.hits, summary.corrupt_hits) == (3, 2, 1)
    said = [record.getMessage() for record in caplog.records if str(index) in record.getMessage()]
    assert len(said) == 1
    assert f"{fnv1a64(content(5)):016x}" in said[0]
    assert sorted(rows(index)) == sorted(fnv1a64(content(seed)) for seed in (1, 2, 3))
    summary = push(model, StandIn(flags=1, cache=cache_of(1, 2, 3, 5)), index=index, **options)
    assert (summary.hashes_known, summary.hits, summary.corrupt_hits) == (3, 3, 0)


def test_a_wrong_row_is_put_right_even_if_the_push_fails(model: Path, index: Path) -> None:
    push(model, index=index)
    with open_model(model) as opened, HashIndex(index) as known:
        payload = opened.tensors["t0"].payload
        assert isinstance(payload, FileRange)
        known.record([(payload, "t0", Hashes(fnv1a64(content(5)), bytes(32)))], {payload.fd: identity_of(payload.fd)})

    class Spoiling(StandIn):
        def _store(self, tensor: bytes, offset: int, data: bytes) -> None:
            super()._store(tensor, offset, b"\1" + data[1:] if len(data) == LARGE else data)

    with pytest.raises(IntegrityError):
        push(model, Spoiling(flags=1, cache=cache_of(1, 2, 3, 5)), index=index, verify=True, probe=True)
    assert sorted(rows(index)) == sorted(fnv1a64(content(seed)) for seed in (1, 2, 3))


def test_a_damaged_entry_of_the_server_says_nothing_against_the_index(
    model: Path, index: Path, caplog: pytest.LogCaptureFixture
) -> None:
    push(model, index=index)
    cache = cache_of(1, 2, 3)
    cache[fnv1a64(content(2))] = bytes(LARGE)
    summary = push(model, StandIn(flags=1, cache=cache), index=index, probe=True)
    assert (summary.hits, summary.corrupt_hits) == (2, 1)
    assert str(index) not in caplog.text
    assert len(rows(index)) == 3


def test_a_file_that_was_written_just_now_is_not_recorded(
    model: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another write within the coarseness of time stamps would not show. Nor is it digested in vain."""
    from weightwire.index import identity

    monkeypatch.setattr(identity, "_RACY_NS", 10**15)

    def never(*_: object) -> None:
        raise AssertionError("digested")

    monkeypatch.setattr(hashpool, "hash_with_digest", never)
    monkeypatch.setattr(hashes, "hash_with_digest", never)
    assert push(model, index=index).misses == 3
    assert rows(index) == {}
