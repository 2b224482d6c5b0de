"""Each kind of bad cache entry, against our server and the stock one, pushed to by our client and the stock one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from interop.proxy import RecordingProxy
from prepare import peers
from support.awkward import I8, MIB
from support.bad_entries import BAD_ENTRIES, foreign
from support.leaks import LeakCheck, eventually
from support.privileges import modes_apply, plain_modes
from support.raw_client import RawClient
from support.stock import StockServer

import weightwire
from weightwire import fnv1a64
from weightwire.errors import PeerClosed
from weightwire.wire import Command

pytestmark = [pytest.mark.interop]

_RANDOM = np.random.default_rng(4)
#: The first has a bad entry, the second a good one, the third is too small to have any.
TENSORS = {"bad": _RANDOM.bytes(11 * MIB + 3), "good": _RANDOM.bytes(10 * MIB + 1), "small": _RANDOM.bytes(1000)}
SPECIFICATIONS = [(name, I8, (len(data),)) for name, data in TENSORS.items()]
BAD, GOOD = (f"{fnv1a64(TENSORS[name]):016x}" for name in ("bad", "good"))
#: What a stock server takes for a hit, and what ends its process.
HITS_OF_STOCK = ["empty", "truncated", "one byte short", "flipped", "symlink"]
KILLS_STOCK = ["oversized", "unreadable", "directory"]


@pytest.fixture(params=BAD_ENTRIES)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of bad entry."""
    name: str = request.param
    return name


@pytest.fixture
def folder(tmp_path: Path, kind: str) -> Path:
    """A cache with one bad entry and a good one."""
    folder = tmp_path / "entries"
    folder.mkdir()
    BAD_ENTRIES[kind](folder / BAD, TENSORS["bad"])
    (folder / GOOD).write_bytes(TENSORS["good"])
    return folder


@pytest.fixture
def server(folder: Path, caplog: pytest.LogCaptureFixture) -> Iterator[weightwire.Server]:
    """Our server on that cache; for it, modes hold."""
    caplog.set_level(logging.INFO, logger="weightwire")
    with modes_apply(), weightwire.Server("127.0.0.1", 0, cache=folder) as running:
        yield running


def push_with_ours(endpoint: str) -> int:
    """Push with our client; the number of hits."""
    with weightwire.connect(endpoint, timeout=60) as connection:
        arrays = {name: np.frombuffer(data, np.uint8) for name, data in TENSORS.items()}
        pushed = connection.push(arrays, cache="auto")
        for name, data in TENSORS.items():
            assert bytes(pushed[name].read()) == data, name
        assert pushed.summary.hits + pushed.summary.misses == 2
        return pushed.summary.hits


def push_with_stock(endpoint: str, stock_client: Callable[[str], object]) -> int:
    """Push with the stock client; the number of hits: the questions that no bytes followed."""
    with RecordingProxy(endpoint) as proxy:
        client = stock_client(proxy.endpoint)
        client.create(SPECIFICATIONS, weights=True)
        for index, data in enumerate(TENSORS.values()):
            client.set(index, data)
        for index, data in enumerate(TENSORS.values()):
            assert client.get(index, len(data)) == data
        client.close()
        asked, sent = proxy.of(Command.SET_TENSOR_HASH), proxy.of(Command.SET_TENSOR)
    assert len(asked) == 2
    return len(asked) - sum(request.size > 10 * MIB for request in sent)


def quarantined(folder: Path) -> list[Path]:
    """What was moved out of the way of the bad entry's name."""
    found = list((folder / ".weightwire-quarantine").glob("*"))
    assert all(re.fullmatch(rf"{BAD}-[0-9]+", path.name) for path in found), found
    return found


@pytest.mark.parametrize("client", ["ours", "stock"])
def test_our_server_says_no_and_gets_the_good_bytes(
    no_leaks: LeakCheck,
    kind: str,
    folder: Path,
    server: weightwire.Server,
    client: str,
    stock_client: Callable[[str], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = f"127.0.0.1:{server.port}"

    def push() -> int:
        return push_with_ours(endpoint) if client == "ours" else push_with_stock(endpoint, stock_client)

    entry = folder / BAD
    assert push() == 1
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(BAD in warning for warning in warnings), warnings
    assert not any(GOOD in warning for warning in warnings), warnings
    assert (folder / GOOD).read_bytes() == TENSORS["good"]
    if kind == "directory":
        assert quarantined(folder) == []
        # Whoever made it may want it; nothing is lost but the entry.
        assert (entry / "kept").read_bytes() == b"kept"
        assert push() == 1
        return
    (kept,) = quarantined(folder)
    if kind == "symlink":
        assert kept.readlink() == foreign(entry)
    else:
        same = folder.parent / BAD
        BAD_ENTRIES[kind](same, TENSORS["bad"])
        for path in (kept, same):
            path.chmod(0o600)
        assert kept.read_bytes() == same.read_bytes()
    # The entry may be written after the client has its answer.
    assert eventually(lambda: entry.is_file() and not entry.is_symlink() and entry.read_bytes() == TENSORS["bad"])
    if kind == "symlink":
        assert foreign(entry).read_bytes() == bytes(len(TENSORS["bad"]))
    assert push() == 2


def test_our_server_never_shows_a_bad_entry(
    no_leaks: LeakCheck, folder: Path, server: weightwire.Server, kind: str
) -> None:
    """Between the question and the bytes, the tensor is not there: neither by its name, nor by what it holds."""
    with RawClient(server.port) as client:
        tensor = client.place("bad", len(TENSORS["bad"]), client.allocate(12 * MIB))
        assert not client.set_from_cache(tensor, fnv1a64(TENSORS["bad"]))
        assert "bad" not in server.tensors
        client.set(tensor, TENSORS["bad"], flag=1)
        assert client.get(tensor) == TENSORS["bad"]
        assert bytes(server.tensors["bad"].view()) == TENSORS["bad"]


@pytest.fixture
def stock(folder: Path, stock_lib: Path, tmp_path: Path) -> Iterator[StockServer]:
    """A stock server on that cache, for which modes hold."""
    server = StockServer(stock_lib, peers.FULL_PROTOCOL, tmp_path / "server.log", folder, place=plain_modes())
    yield server
    server.stop()


@pytest.mark.parametrize("kind", HITS_OF_STOCK, indirect=True)
def test_a_stock_server_takes_it_for_a_hit(stock: StockServer) -> None:
    """What our client has to expect of it (docs/protocol.md, section 9)."""
    with RawClient(int(stock.endpoint.rpartition(":")[2])) as client:
        tensor = client.place("bad", len(TENSORS["bad"]), client.allocate(12 * MIB))
        assert client.set_from_cache(tensor, fnv1a64(TENSORS["bad"]))
        assert client.get(tensor) != TENSORS["bad"]
    assert stock.alive


@pytest.mark.parametrize("kind", KILLS_STOCK, indirect=True)
def test_a_stock_server_dies_of_it_and_our_client_says_where(no_leaks: LeakCheck, stock: StockServer) -> None:
    with weightwire.connect(stock.endpoint, timeout=60) as connection:
        with pytest.raises(PeerClosed) as caught:
            connection.push({name: np.frombuffer(data, np.uint8) for name, data in TENSORS.items()}, cache="always")
        assert caught.value.tensor == "bad"
    assert stock.process.wait(60) != 0
    stock.stop()


#: Of what a stock server takes for a hit, what shows at the ends of the tensor (the link leads to zeros).
SHOWS_AT_THE_ENDS = ["empty", "truncated", "one byte short", "symlink"]


def push_to_stock(server: StockServer, **options: object) -> tuple[weightwire.PushResult, dict[str, bytes]]:
    """Push with our client, which asks for the cache; what the server has afterwards."""
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        arrays = {name: np.frombuffer(data, np.uint8) for name, data in TENSORS.items()}
        pushed = connection.push(arrays, cache="always", index=False, **options)
        return pushed, {name: bytes(pushed[name].read()) for name in TENSORS}


def check_it_was_sent(pushed: weightwire.PushResult, there: dict[str, bytes]) -> None:
    """The bad hit was counted, and the tensor sent."""
    assert there == TENSORS
    summary = pushed.summary
    assert (summary.hits, summary.misses, summary.corrupt_hits) == (1, 0, 1)
    assert summary.sent == len(TENSORS["bad"]) + len(TENSORS["small"])


@pytest.mark.parametrize("kind", SHOWS_AT_THE_ENDS, indirect=True)
def test_a_bad_hit_that_shows_at_the_ends_is_sent(no_leaks: LeakCheck, stock: StockServer, folder: Path) -> None:
    check_it_was_sent(*push_to_stock(stock))
    assert stock.alive


@pytest.mark.parametrize("kind", HITS_OF_STOCK, indirect=True)
def test_nobody_notices_a_bad_hit_without_looking(stock: StockServer) -> None:
    """The other tests are worth something only if this is so."""
    pushed, there = push_to_stock(stock, probe=False)
    assert (pushed.summary.hits, pushed.summary.corrupt_hits) == (2, 0)
    assert there["bad"] != TENSORS["bad"]


@pytest.mark.parametrize("probe", [None, False], ids=["probe", "no probe"])
@pytest.mark.parametrize("kind", HITS_OF_STOCK, indirect=True)
def test_verify_sends_any_bad_hit(no_leaks: LeakCheck, stock: StockServer, probe: bool | None) -> None:
    pushed, there = push_to_stock(stock, probe=probe, verify=True)
    check_it_was_sent(pushed, there)
    assert pushed.summary.verified
    # The entry has been written anew meanwhile: nothing is left to find.
    again, there = push_to_stock(stock, verify=True)
    assert there == TENSORS
    assert (again.summary.hits, again.summary.corrupt_hits) == (2, 0)
