"""How many tensors a thread takes at once, and what becomes of doubts about the index."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from weightwire.client import hashes
from weightwire.client.hashes import TensorHashes
from weightwire.hashing import cpu_features, fnv1a64
from weightwire.index import Hashes, HashIndex, identity, identity_of
from weightwire.model import open_model


@pytest.mark.parametrize(("many", "group"), [("interleaved", 4), ("avx2", 1)])
def test_tensors_are_grouped_where_there_are_no_vectors(many: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    features = dataclasses.replace(cpu_features(), many=many)
    monkeypatch.setattr(hashes, "cpu_features", lambda: features)
    data = [np.full((10 << 20) + 1, at, np.uint8) for at in range(5)]
    with open_model({f"w{at}": array for at, array in enumerate(data)}) as model:
        tensors = list(model.tensors.values())
        found = TensorHashes(tensors, threads=0, in_flight=1 << 30)
        feed = found.feed(tensors)
        feed.get(0, lambda: None)
        assert [found.pool.hash_of(at) is not None for at in range(5)] == [at < group for at in range(5)]
        assert [feed.get(at, lambda: None) for at in range(5)] == [fnv1a64(array) for array in data]
        found.close()


def test_a_doubt_that_comes_while_another_is_looked_into_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another target, whose server fills a tensor meanwhile."""
    monkeypatch.setattr(identity, "_RACY_NS", 0)
    data = {name: np.full((10 << 20) + 1, at, np.uint8) for at, name in enumerate("abc")}
    save_file(data, tmp_path / "model.safetensors")
    with HashIndex(tmp_path / "index") as index, open_model(tmp_path / "model.safetensors") as model:
        tensors = list(model.tensors.values())
        ranges: list[Any] = [tensor.payload for tensor in tensors]
        index.record(
            [(each, tensor.name, Hashes(12345, bytes(32))) for each, tensor in zip(ranges, tensors, strict=True)],
            {each.fd: identity_of(each.fd) for each in ranges},
        )
        found = TensorHashes(tensors, threads=0, in_flight=1 << 30, index=index)
        assert found.known == 3
        hash_it = hashes.hash_with_digest

        def meanwhile(payload: Any) -> Hashes:
            if payload == model.tensors["a"].payload:
                found.doubt("b")
            return hash_it(payload)

        monkeypatch.setattr(hashes, "hash_with_digest", meanwhile)
        found.doubt("a")
        assert found.recheck() == 2
        assert found.recheck() == 0
        right = [fnv1a64(data["a"]), fnv1a64(data["b"]), 12345]
        assert [each and each.fnv1a for each in index.find([model.tensors[name].payload for name in "abc"])] == right
        found.close()
