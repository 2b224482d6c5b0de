"""A cache directory that is full, or may not be written: ours and the stock server take everything all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prepare import peers
from support.awkward import MIB
from support.cachedir import name_of
from support.disks import disk_of
from support.leaks import LeakCheck, eventually
from support.privileges import plain_modes
from support.stock import StockServer

import weightwire
from weightwire.client.result import PushSummary
from weightwire.errors import CacheUnavailable

pytestmark = [pytest.mark.interop, pytest.mark.timeout(180)]

_RANDOM = np.random.default_rng(11)
TENSORS = {f"t{number}": _RANDOM.integers(0, 256, 11 * MIB + number, np.uint8) for number in range(5)}


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A directory with room for one entry and a part of another."""
    with disk_of(tmp_path / "disk", 16) as place:
        yield place


def push(endpoint: str) -> PushSummary:
    """Push all of it, asking the cache, and see that every byte is there."""
    with weightwire.connect(endpoint, timeout=60) as connection:
        summary = connection.push(TENSORS, cache="always", index=False, verify=True).summary
    assert summary.verified
    return summary


def good_entries(folder: Path) -> int:
    """How many of the entries are whole."""
    return sum(path.name == name_of(path.read_bytes()) for path in folder.iterdir() if path.is_file())


def test_our_server_serves_everything_and_keeps_what_fits(full: Path, no_leaks: LeakCheck) -> None:
    with weightwire.Server(port=0, cache=full) as server:
        assert push(server.endpoints[0]).hits == 0
        assert eventually(lambda: server.stats().cache_pending == 0)
        stats = server.stats()
        assert (stats.cache_saved, stats.cache_save_failures) == (1, 4)
        assert push(server.endpoints[0]).hits == 1
        assert good_entries(full) == 1
        (outcome,) = weightwire.warm(TENSORS, server.endpoints[0], timeout=60, index=False)
        assert isinstance(outcome.error, CacheUnavailable)
    assert [path.name for path in full.iterdir() if ".tmp" in path.name] == []


def test_what_a_stock_server_could_not_write_whole_is_sent_again(full: Path, stock_server) -> None:
    server = stock_server(cache=full)
    assert push(server.endpoint).hits == 0
    assert good_entries(full) == 1
    again = push(server.endpoint)
    assert again.hits == 1
    assert again.corrupt_hits >= 1
    assert again.sent >= 4 * 11 * MIB, "all but the one that is whole"
    (outcome,) = weightwire.warm(TENSORS, server.endpoint, timeout=60, index=False)
    assert isinstance(outcome.error, CacheUnavailable)
    assert server.alive
    server.stop()


@pytest.fixture
def read_only(stock_lib: Path, tmp_path: Path) -> Iterator[StockServer]:
    """A stock server, for which modes hold, whose cache directory has none for writing."""
    folder = tmp_path / "entries"
    folder.mkdir(0o555)
    server = StockServer(stock_lib, peers.FULL_PROTOCOL, tmp_path / "server.log", folder, place=plain_modes())
    yield server
    server.stop()


def test_a_stock_server_that_may_not_write(read_only: StockServer) -> None:
    server = read_only
    for _ in range(2):
        summary = push(server.endpoint)
        assert (summary.hits, summary.misses, summary.corrupt_hits) == (0, 5, 0)
    (outcome,) = weightwire.warm(TENSORS, server.endpoint, timeout=60, index=False)
    assert isinstance(outcome.error, CacheUnavailable)
    assert server.cache is not None
    assert list(server.cache.iterdir()) == []
    assert server.alive
