"""A real model, Gemma 3 270M: pushed to stock servers and to ours, and loaded by the stock loader from a warm cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from interop.proxy import RecordingProxy
from prepare.realmodel import NBYTES, TENSORS
from support.stock import StockServer, run_script, stock_load

import weightwire
from weightwire import fnv1a64
from weightwire.wire import CACHE_THRESHOLD, Command

pytestmark = [pytest.mark.interop, pytest.mark.model]

Ranges = dict[str, tuple[int, int, int]]


@pytest.fixture(scope="session")
def ranges(stock_lib: Path, gemma_path: Path) -> Ranges:
    """What upstream's own parser finds in the model: name -> (ggml type, offset in the file, bytes)."""
    found: dict[str, Any] = run_script(sys.executable, "stock_gguf.py", stock_lib, gemma_path)
    assert len(found) == TENSORS
    return {name: tuple(entry) for name, entry in found.items()}


def in_file(path: Path, ranges: Ranges, name: str) -> bytes:
    """A tensor's bytes, read where upstream's parser says they are."""
    _, offset, nbytes = ranges[name]
    with open(path, "rb") as file:
        return os.pread(file.fileno(), nbytes, offset)


def check(pushed: Any, path: Path, ranges: Ranges) -> None:
    """Every tensor read back from the server equals the bytes in the file."""
    assert set(pushed) == set(ranges)
    for name, (kind, _, nbytes) in ranges.items():
        assert (pushed[name].type_code, pushed[name].nbytes) == (kind, nbytes)
        assert bytes(pushed[name].read()) == in_file(path, ranges, name), name


def large(ranges: Ranges) -> list[str]:
    """The tensors a stock client asks the cache for."""
    return [name for name, (_, _, nbytes) in ranges.items() if nbytes > CACHE_THRESHOLD]


def test_we_read_it_as_upstream_does(gemma_path, ranges):
    assert gemma_path.stat().st_size == NBYTES
    with weightwire.open_model(gemma_path) as model:
        assert list(model.tensors) == list(ranges)
        for name, tensor in model.tensors.items():
            kind, offset, nbytes = ranges[name]
            assert (tensor.type_code, tensor.nbytes) == (kind, nbytes)
            assert tensor.payload.offset == offset
            assert tensor.view() == in_file(gemma_path, ranges, name)


def test_pushed_to_a_stock_server(stock_protocol, stock_server, gemma_path, ranges):
    server = stock_server(stock_protocol)
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        pushed = connection.push(gemma_path, verify=True)
        assert (pushed.summary.tensors, pushed.summary.verified) == (TENSORS, True)
        check(pushed, gemma_path, ranges)


def test_the_command_line_pushes_it_to_a_stock_server(stock_server, gemma_path, ranges, tmp_path):
    server = stock_server(cache=tmp_path / "entries")
    command = [sys.executable, "-P", "-m", "weightwire", "push", gemma_path, server.endpoint, "--cache", "always"]
    for hits in (0, len(large(ranges))):
        done = subprocess.run(
            [*command, "--verify", "--json"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["endpoint"], found["protocol"]) == (server.endpoint, "7.0.0")
        assert found["transport"]["kind"] == "tcp"
        assert (found["tensors"], found["hits"], found["misses"]) == (TENSORS, hits, len(large(ranges)) - hits)
        assert found["bytes"] == sum(nbytes for _, _, nbytes in ranges.values())
        saved = sum(ranges[name][2] for name in large(ranges)) if hits else 0
        assert found["sent"] == found["bytes"] - saved
        assert found["seconds"] > 0
        assert found["gib_per_s"] > 0


def test_pushed_to_our_server(gemma_path, ranges):
    with (
        weightwire.Server("127.0.0.1", 0) as server,
        weightwire.connect(f"127.0.0.1:{server.port}") as connection,
    ):
        pushed = connection.push(gemma_path, verify=True)
        assert pushed.summary.sent == sum(nbytes for _, _, nbytes in ranges.values())
        check(pushed, gemma_path, ranges)
        assert set(server.tensors) == set(ranges)
        for name, (kind, _, _) in ranges.items():
            assert server.tensors[name].type_code == kind
            assert server.tensors[name].view() == in_file(gemma_path, ranges, name)


def test_the_stock_client_pushes_it_to_our_server(stock_client, gemma_path, ranges):
    with weightwire.open_model(gemma_path) as model:
        tensors = [(name, tensor.type_code, tensor.ne) for name, tensor in model.tensors.items()]
    with weightwire.Server("127.0.0.1", 0) as server:
        client = stock_client(f"127.0.0.1:{server.port}")
        assert client.create(tensors, weights=True) == [nbytes for _, _, nbytes in ranges.values()]
        for index, (_, offset, nbytes) in enumerate(ranges.values()):
            client.set_from(index, gemma_path, offset, nbytes)
        for index, (name, (_, _, nbytes)) in enumerate(ranges.items()):
            expected = in_file(gemma_path, ranges, name)
            assert client.get(index, nbytes) == expected
            assert server.tensors[name].view() == expected


@pytest.fixture(scope="session")
def cold(tmp_path_factory: pytest.TempPathFactory, stock_lib: Path, gemma_path: Path, ranges: Ranges) -> Any:
    """What the stock loader sends and generates when the stock server's cache is empty."""
    folder = tmp_path_factory.mktemp("cold")
    server = StockServer(stock_lib, "7.0.0", folder / "log", folder / "entries")
    try:
        with RecordingProxy(server.endpoint) as proxy:
            result = stock_load(gemma_path, proxy.endpoint)
    finally:
        server.stop()
    assert len(result["tokens"]) == 8
    whole = [request for request in proxy.of(Command.SET_TENSOR) if request.size > CACHE_THRESHOLD]
    assert sorted(request.tensor.nbytes for request in whole if request.tensor) == sorted(
        ranges[name][2] for name in large(ranges)
    )
    return result["tokens"], proxy.sent


def check_warm(proxy: RecordingProxy, result: Any, cold: Any, ranges: Ranges, gemma_path: Path) -> None:
    """The loader asked for every large tensor, sent none of them, and generates what it does after a cold load."""
    asked = proxy.of(Command.SET_TENSOR_HASH)
    assert len(asked) == len(large(ranges)) > 0
    assert all(request.size <= CACHE_THRESHOLD for request in proxy.of(Command.SET_TENSOR))
    tokens, sent_cold = cold
    saved = sum(ranges[name][2] for name in large(ranges))
    assert proxy.sent < sent_cold - 0.99 * saved
    assert result["tokens"] == tokens


def test_the_stock_client_loads_from_a_cache_we_warmed(stock_server, gemma_path, ranges, cold, tmp_path):
    server = stock_server(cache=tmp_path / "entries")
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        assert connection.push(gemma_path, cache="always", verify=True).summary.misses == len(large(ranges))
    names = {f"{fnv1a64(in_file(gemma_path, ranges, name)):016x}" for name in large(ranges)}
    assert {path.name for path in (tmp_path / "entries").iterdir()} == names
    with RecordingProxy(server.endpoint) as proxy:
        result = stock_load(gemma_path, proxy.endpoint)
    check_warm(proxy, result, cold, ranges, gemma_path)


def test_the_stock_server_uses_a_cache_folder_our_server_filled(stock_server, gemma_path, ranges, cold, tmp_path):
    with (
        weightwire.Server("127.0.0.1", 0, cache=tmp_path / "entries") as ours,
        weightwire.connect(f"127.0.0.1:{ours.port}") as connection,
    ):
        assert connection.server_has_cache is True
        connection.push(gemma_path)
    server = stock_server(cache=tmp_path / "entries")
    with RecordingProxy(server.endpoint) as proxy:
        result = stock_load(gemma_path, proxy.endpoint)
    check_warm(proxy, result, cold, ranges, gemma_path)


def test_our_server_uses_a_cache_folder_the_stock_server_filled(stock_server, gemma_path, ranges, tmp_path):
    server = stock_server(cache=tmp_path / "entries")
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        connection.push(gemma_path, cache="always")
    with (
        weightwire.Server("127.0.0.1", 0, cache=tmp_path / "entries") as ours,
        weightwire.connect(f"127.0.0.1:{ours.port}") as connection,
    ):
        pushed = connection.push(gemma_path)
        assert (pushed.summary.hits, pushed.summary.misses) == (len(large(ranges)), 0)
        check(pushed, gemma_path, ranges)
