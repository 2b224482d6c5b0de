"""`bench` against stock servers: they live through it, keep nothing, and give the memory back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.awkward import MIB

import weightwire
from weightwire.client import bench

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]


@pytest.mark.parametrize("protocol", ["2.0.0", "5.0.0", "7.0.0"])
def test_stock_server(stock_server: Callable, tmp_path: Path, protocol: str) -> None:
    server = stock_server(protocol, cache=tmp_path / "cache")
    for _ in range(2):
        with weightwire.connect(server.endpoint) as connection:
            assert connection.protocol.startswith(protocol)
            result = bench(connection, nbytes=72 * MIB, rounds=2)
            # It is still in step, and has freed the memory.
            connection.allocate(result.bytes).free()
        assert server.alive
        assert result.rounds == 2
        large = result.uploads["large"]
        assert (large.bytes, result.uploads["small"].tensors) == (72 * MIB, 72 * 256)
        assert large.largest == (64 * MIB if protocol == "7.0.0" else 10 * MIB)
        assert result.questions is None
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_what_such_a_server_would_have_kept(stock_server: Callable, tmp_path: Path) -> None:
    """That the cache was empty above says something."""
    server = stock_server("5.0.0", cache=tmp_path / "cache")
    with weightwire.connect(server.endpoint) as connection:
        connection.push({"large": bytes(10 * MIB + 1)}, cache="never")
    assert [path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [10 * MIB + 1]


@pytest.mark.parametrize("protocol", ["2.0.0", "7.0.0"])
def test_on_the_command_line(stock_server: Callable, protocol: str) -> None:
    server = stock_server(protocol)
    done = subprocess.run(
        [sys.executable, "-m", "weightwire", "bench", server.endpoint, "--size", "8MiB", "--rounds", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["cache"] is None
    assert set(value["uploads"]) == {"mix", "large", "small"}
    assert server.alive
