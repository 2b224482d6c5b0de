"""How many tensors a thread takes at once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from weightwire.client import hashes
from weightwire.client.hashes import TensorHashes
from weightwire.hashing import cpu_features, fnv1a64
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
