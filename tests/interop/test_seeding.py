"""A directory filled offline is the one a stock server would have filled, and a stock load finds all in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from interop.proxy import RecordingProxy
from support.awkward import MIB
from support.cachedir import contents, entries_of, files_in
from support.shards import write_shards
from support.stock import stock_load

import weightwire
from weightwire.cache import list_entries, seed, verify_cache
from weightwire.index import HashIndex
from weightwire.wire import CACHE_THRESHOLD, Command

pytestmark = [pytest.mark.interop]

EDGES = contents(10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 100, 11 * MIB + 7)


@pytest.fixture(scope="session")
def edge_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors at the size from which entries are made, one byte to either side."""
    path = tmp_path_factory.mktemp("edges") / "edges.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, data in EDGES.items():
        writer.add_tensor(name, np.frombuffer(data, np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def seeded(model: Path, directory: Path, *options: str) -> dict[str, Any]:
    """What the command line did, in a process of its own."""
    command = [sys.executable, "-P", "-m", "weightwire", "seed", model, "--cache", directory, "--json", *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_stock_server_saves_what_we_seed(stock_protocol, stock_server, stock_client, edge_gguf, tmp_path):
    """The stock client's tensors, saved by the stock server, against the same seeded without either."""
    server = stock_server(stock_protocol, tmp_path / "saved")
    with weightwire.open_model(edge_gguf) as model:
        tensors = [(name, tensor.type_code, tensor.ne) for name, tensor in model.tensors.items()]
        places = [(tensor.payload.offset, tensor.nbytes) for tensor in model.tensors.values()]
    client = stock_client(server.endpoint, stock_protocol)
    assert client.create(tensors, weights=True) == [nbytes for _, nbytes in places]
    for index, (offset, nbytes) in enumerate(places):
        client.set_from(index, edge_gguf, offset, nbytes)
    assert len(client.get(0, 1)) == 1  # answered after everything before it
    assert seeded(edge_gguf, tmp_path / "seeded")["written"] == 2
    saved = files_in(tmp_path / "saved")
    assert saved == files_in(tmp_path / "seeded") == entries_of(EDGES["t2"], EDGES["t4"])


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_split_model_is_seeded_whole_whichever_file_is_given(stock_server, tmp_path: Path, given: int) -> None:
    """And a stock server has all of it."""
    files = write_shards(tmp_path, EDGES, 2)
    assert len(files) == 3
    assert seeded(files[given], tmp_path / "seeded")["written"] == 2
    assert files_in(tmp_path / "seeded") == entries_of(EDGES["t2"], EDGES["t4"])
    server = stock_server(cache=tmp_path / "seeded")
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        summary = connection.push(files[given], cache="always", index=False, verify=True).summary
    assert (summary.tensors, summary.hits, summary.misses, summary.verified) == (5, 2, 0, True)


def test_a_stock_server_fills_tensors_from_what_we_seeded(stock_protocol, stock_server, edge_gguf, tmp_path):
    seeded(edge_gguf, tmp_path / "entries")
    server = stock_server(stock_protocol, tmp_path / "entries")
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        pushed = connection.push(edge_gguf, cache="always", verify=True)
        assert (pushed.summary.hits, pushed.summary.misses) == (2, 0)
        for name, data in EDGES.items():
            assert bytes(pushed[name].read()) == data


@pytest.mark.model
@pytest.mark.timeout(300)  # the stock loader generates twice
def test_after_seeding_the_stock_load_sends_no_large_tensor(stock_server, gemma_path, tmp_path):
    """The real model: identical directories, and nothing over 10 MiB on the wire."""
    server = stock_server(cache=tmp_path / "saved")
    with RecordingProxy(server.endpoint) as proxy:
        cold = stock_load(gemma_path, proxy.endpoint)
    sent = [request.tensor.nbytes for request in proxy.of(Command.SET_TENSOR) if request.size > CACHE_THRESHOLD]
    assert sent
    saved = files_in(tmp_path / "saved")
    assert sorted(map(len, saved.values())) == sorted(sent)

    report = seeded(gemma_path, tmp_path / "seeded")
    assert (report["written"], report["tensors"]) == (len(saved), len(sent))
    assert files_in(tmp_path / "seeded") == saved

    server = stock_server(cache=tmp_path / "seeded")
    with RecordingProxy(server.endpoint) as proxy:
        warm = stock_load(gemma_path, proxy.endpoint)
    assert len(proxy.of(Command.SET_TENSOR_HASH)) == len(sent)
    assert all(request.size <= CACHE_THRESHOLD for request in proxy.of(Command.SET_TENSOR))
    assert warm["tokens"] == cold["tokens"]
    assert files_in(tmp_path / "seeded") == saved


@pytest.mark.model
def test_the_tools_know_a_directory_that_a_stock_server_filled(stock_server, gemma_path, tmp_path):
    directory = tmp_path / "entries"
    server = stock_server(cache=directory)
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        connection.push(gemma_path, cache="always")
    server.stop()
    with HashIndex(tmp_path / "index.sqlite3") as index:
        # The model is old enough to be remembered at once, and every entry is there.
        result = seed(gemma_path, directory, index=index)
        assert (result.written, result.present) == (0, result.tensors)
        with weightwire.open_model(gemma_path) as model:
            large = {name for name, tensor in model.tensors.items() if tensor.nbytes > CACHE_THRESHOLD}
        entries = list_entries(directory, index=index).entries
        assert {owner.tensor for entry in entries for owner in entry.owners} == large
        assert {owner.path for entry in entries for owner in entry.owners} == {str(gemma_path)}
        report = verify_cache(directory, index=index)
        assert (report.entries, report.digests, report.bad) == (len(entries), len(entries), ())
        path = entries[0].path
        os.truncate(path, entries[0].nbytes // 2)
        (bad,) = verify_cache(directory, index=index, bad="quarantine").bad
        assert (bad.name, bad.kind, bad.action) == (path.name, "truncated", "quarantined")
        assert seed(gemma_path, directory, index=index).written == 1
        assert verify_cache(directory, index=index).bad == ()
