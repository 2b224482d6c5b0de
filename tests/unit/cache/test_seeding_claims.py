"""Which of several equal tensors makes the entry, where what was thought of one of them turns out to be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cachedir import entries_of, files_in, write_model
from support.leaks import eventually

from weightwire.cache import seed, seeding
from weightwire.cache.copying import CopyingWriter
from weightwire.errors import CacheError
from weightwire.hashing import fnv1a64
from weightwire.index import Hashes, HashIndex, identity_of
from weightwire.model import open_model
from weightwire.ranges import FileRange

pytestmark = pytest.mark.usefixtures("small_threshold")

FIRST, OTHER, LAST = b"a" * 5000, b"b" * 5000, b"c" * 5000


@pytest.fixture
def model(tmp_path: Path, index: HashIndex) -> Path:
    """Four tensors, two of them equal; the index says of the first what is right of those two."""
    path = write_model(tmp_path / "model.safetensors", {"t0": FIRST, "t1": OTHER, "t2": OTHER, "t3": LAST})
    with open_model(path) as opened:
        said = {"t0": OTHER, "t1": OTHER, "t2": OTHER, "t3": LAST}
        rows, identities = [], {}
        for name, tensor in opened.tensors.items():
            assert isinstance(tensor.payload, FileRange)
            rows.append((tensor.payload, name, Hashes(fnv1a64(said[name]), bytes(32))))
            identities[tensor.payload.fd] = identity_of(tensor.payload.fd)
        assert index.record(rows, identities) == 4
    return path


@pytest.mark.parametrize("threads", [0, 2])
def test_an_index_that_is_wrong_about_one_tensor_costs_no_other_its_entry(
    threads: int, model: Path, directory: Path, index: HashIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    _first_is_last(threads, monkeypatch)
    told: list[int] = []
    result = seed(model, directory, threads=threads, index=index, progress=lambda name, done, total: told.append(done))
    assert files_in(directory) == entries_of(FIRST, OTHER, LAST)
    assert (result.written, result.present, result.duplicates) == (3, 0, 1)
    assert told == sorted(told)
    assert told[-1] == 20_000
    again = seed(model, directory, threads=0, index=index)
    assert (again.written, again.present, again.unread, again.duplicates) == (0, 3, 3, 1), "the index knows better now"


@pytest.mark.parametrize("threads", [0, 2])
def test_one_that_cannot_be_stored_then_is_said_by_its_own_name(
    threads: int, model: Path, directory: Path, index: HashIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    _first_is_last(threads, monkeypatch)
    commit = CopyingWriter.commit

    def full(self: CopyingWriter, content_hash: int) -> None:
        if content_hash == fnv1a64(OTHER):
            raise OSError(28, "No space left on device")
        commit(self, content_hash)

    monkeypatch.setattr(CopyingWriter, "commit", full)
    with pytest.raises(CacheError, match=r"the entry for 't[12]' .* No space left"):
        seed(model, directory, threads=threads, index=index)


def _first_is_last(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first tensor copied once both others have been met, where another thread can meet them."""
    work: list[Any] = []
    make, fill = seeding._Seeding.__init__, CopyingWriter.fill

    def making(self: Any, *given: Any) -> None:
        work.append(self)
        make(self, *given)

    def filling(self: CopyingWriter, payload: FileRange, *more: Any) -> int:
        if threads and payload == work[0]._tensors[0].payload:
            assert eventually(lambda: work[0]._counts["duplicates"] == 2)
        return fill(self, payload, *more)

    monkeypatch.setattr(seeding._Seeding, "__init__", making)
    monkeypatch.setattr(CopyingWriter, "fill", filling)
