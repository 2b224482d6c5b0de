"""Warming stock servers over the wire: what their caches hold then is what a stock client's own load would leave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from interop.proxy import RecordingProxy
from support.awkward import MIB, awkward_tensors
from support.leaks import LeakCheck
from support.shards import write_shards
from support.stock import StockClient, StockServer

import weightwire
from weightwire import fnv1a64
from weightwire.errors import CacheUnavailable
from weightwire.wire import CACHE_THRESHOLD, Command

pytestmark = [pytest.mark.interop]

LARGE = [tensor for tensor in awkward_tensors() if len(tensor.data) > CACHE_THRESHOLD]


@pytest.fixture(autouse=True)
def own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index for each test."""
    monkeypatch.setenv("WEIGHTWIRE_INDEX", str(tmp_path / "index.sqlite3"))


def entries(folder: Path | None) -> dict[str, bytes]:
    """The files of a cache folder."""
    assert folder is not None
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load_by_the_stock_client(client: StockClient) -> None:
    """What llama.cpp does with a model: every tensor into one buffer of weights."""
    client.create([(t.name, t.type_code, t.ne) for t in awkward_tensors()], weights=True)
    for index, tensor in enumerate(awkward_tensors()):
        client.set(index, tensor.data)


def warmed(server: StockServer, model: Path) -> weightwire.client.WarmSummary:
    """Warm one server; raises what went wrong."""
    (outcome,) = weightwire.warm(model, server.endpoint, timeout=60)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.summary is not None
    return outcome.summary


def test_the_same_files_as_a_stock_clients_load(
    stock_protocol, stock_server, stock_client, awkward_gguf, tmp_path, no_leaks: LeakCheck
):
    ours = stock_server(stock_protocol, tmp_path / "ours")
    summary = warmed(ours, awkward_gguf)
    assert (summary.tensors, summary.hits, summary.misses) == (len(LARGE), 0, len(LARGE))
    assert summary.sent == summary.bytes == sum(len(tensor.data) for tensor in LARGE)
    theirs = stock_server(stock_protocol, tmp_path / "theirs")
    client = stock_client(theirs.endpoint, stock_protocol)
    load_by_the_stock_client(client)
    client.get(0, 1)  # answered when all of it has been applied
    client.close()
    assert entries(ours.cache) == entries(theirs.cache)
    assert set(entries(ours.cache)) == {f"{fnv1a64(tensor.data):016x}" for tensor in LARGE}


@pytest.mark.parametrize("read", ["auto", "read"])
def test_a_split_model(stock_server, tmp_path: Path, no_leaks: LeakCheck, read: str) -> None:
    """Tensors of all its files, whichever is given."""
    random = np.random.default_rng(5)
    sizes = (10 * MIB + 1, 100, 11 * MIB, 12 * MIB + 7, 1000)
    tensors = {f"t{number}": random.bytes(size) for number, size in enumerate(sizes)}
    (tmp_path / "model").mkdir()
    files = write_shards(tmp_path / "model", tensors, 2)
    assert len(files) == 3
    server = stock_server(cache=tmp_path / "entries")
    for given, counts in ((1, (0, 3)), (2, (3, 0))):
        (outcome,) = weightwire.warm(files[given], server.endpoint, timeout=60, read=read, index=False)
        assert outcome.summary is not None, outcome.error
        assert (outcome.summary.hits, outcome.summary.misses) == counts
    large = [data for data in tensors.values() if len(data) > CACHE_THRESHOLD]
    assert entries(server.cache) == {f"{fnv1a64(data):016x}": data for data in large}


def test_then_a_stock_client_sends_nothing_over_10_mib(stock_server, stock_client, awkward_gguf, tmp_path):
    server = stock_server(cache=tmp_path / "entries")
    warmed(server, awkward_gguf)
    with RecordingProxy(server.endpoint) as proxy:
        client = stock_client(proxy.endpoint)
        load_by_the_stock_client(client)
        for index, tensor in enumerate(awkward_tensors()):
            assert client.get(index, len(tensor.data)) == tensor.data, tensor.name
        client.close()
        assert max(request.size for request in proxy.of(Command.SET_TENSOR)) <= 10 * MIB + 305
        assert len(proxy.of(Command.SET_TENSOR_HASH)) == len(LARGE)


def test_a_warm_server_is_sent_nothing(stock_protocol, stock_server, awkward_gguf, tmp_path):
    server = stock_server(stock_protocol, tmp_path / "entries")
    warmed(server, awkward_gguf)
    before = entries(server.cache)
    with RecordingProxy(server.endpoint) as proxy:
        (outcome,) = weightwire.warm(awkward_gguf, proxy.endpoint, timeout=60)
        assert outcome.summary is not None, outcome.error
        assert (outcome.summary.hits, outcome.summary.misses, outcome.summary.sent) == (len(LARGE), 0, 0)
        assert len(proxy.of(Command.ALLOC_BUFFER)) == 1
        assert sum(request.size for request in proxy.of(Command.SET_TENSOR)) < 1000 * len(LARGE)
    assert entries(server.cache) == before


def test_entries_cut_short_are_sent_anew(stock_protocol, stock_server, awkward_gguf, tmp_path):
    server = stock_server(stock_protocol, tmp_path / "entries")
    warmed(server, awkward_gguf)
    before = entries(server.cache)
    assert server.cache is not None
    for (name, data), length in zip(sorted(before.items()), (0, 100, 1 << 20), strict=False):
        (server.cache / name).write_bytes(data[:length])
    name, data = sorted(before.items())[3]
    (server.cache / name).write_bytes(data[:-1])
    summary = warmed(server, awkward_gguf)
    assert (summary.corrupt_hits, summary.hits) == (4, len(LARGE) - 4)
    assert entries(server.cache) == before


def test_it_is_free_for_others_at_once_and_has_its_memory_back(stock_protocol, stock_server, awkward_gguf, tmp_path):
    server = stock_server(stock_protocol, tmp_path / "entries")
    warmed(server, awkward_gguf)
    with weightwire.connect(server.endpoint, timeout=60) as connection:  # a stock server has one client at a time
        connection.allocate(1024).free()
    assert server.alive


def test_a_server_without_a_cache_is_sent_one_tensor(stock_protocol, stock_server, awkward_gguf):
    server = stock_server(stock_protocol)
    with RecordingProxy(server.endpoint) as proxy:
        (outcome,) = weightwire.warm(awkward_gguf, proxy.endpoint, timeout=60)
        assert isinstance(outcome.error, CacheUnavailable)
        assert "keeps no tensor cache" in str(outcome.error)
        assert sum(request.size > MIB for request in proxy.of(Command.SET_TENSOR)) == 1
    assert server.alive


def test_a_cache_that_cannot_be_written_is_noticed(stock_server, awkward_gguf, tmp_path):
    server = stock_server(cache=tmp_path / "entries")
    assert server.cache is not None
    server.cache.rmdir()
    (outcome,) = weightwire.warm(awkward_gguf, server.endpoint, timeout=60)
    assert isinstance(outcome.error, CacheUnavailable)


def test_tensors_of_equal_bytes_are_sent_once(stock_server, tmp_path):
    server = stock_server(cache=tmp_path / "entries")
    data = np.arange(3 << 20, dtype=np.float32)
    (outcome,) = weightwire.warm({"one": data, "other": data.copy(), "third": data + 1}, server.endpoint, timeout=60)
    assert outcome.summary is not None, outcome.error
    assert (outcome.summary.misses, outcome.summary.hits) == (2, 1)
    assert set(entries(server.cache)) == {f"{fnv1a64(data):016x}", f"{fnv1a64(data + 1):016x}"}


@pytest.mark.model
def test_the_real_model_as_the_stock_loader_leaves_it(stock_server, stock_client, gemma_path, tmp_path):
    ours, theirs = stock_server(cache=tmp_path / "ours"), stock_server(cache=tmp_path / "theirs")
    warmed(ours, gemma_path)
    with weightwire.open_model(gemma_path) as model:
        client = stock_client(theirs.endpoint)
        client.create([(name, t.type_code, t.ne) for name, t in model.tensors.items()], weights=True)
        for index, tensor in enumerate(model.tensors.values()):
            client.set_from(index, gemma_path, tensor.payload.offset, tensor.nbytes)
        client.get(0, 1)
        client.close()
    assert entries(ours.cache) == entries(theirs.cache)
    assert entries(ours.cache)
