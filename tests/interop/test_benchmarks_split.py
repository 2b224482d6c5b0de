"""The benchmark of a model on two servers, with a small model: who gets what, and that it arrives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.cached import CachedPeer, State, entries
from harness.fanout import FanOutPeer
from harness.models import by_layers, file_ranges, first_blocks, full_cache, write_random
from harness.network import LOOPBACK, RATE, Network
from harness.rounds import alternate
from harness.socket_pair import SocketPairsPeer
from harness.stock_pair import StockPeers
from support.awkward import MIB
from support.leaks import LeakCheck

pytestmark = [pytest.mark.interop]

SIZES = {
    "blk.0.large": 11 * MIB,
    "blk.0.small": 4096,
    "blk.1.at the limit": 10 * MIB,
    "blk.2.larger": 12 * MIB + 1,
    "blk.3.largest": 13 * MIB,
    "blk.3.small": 100,
}
FIRST, SECOND = 21 * MIB + 4096, 25 * MIB + 101


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "layers.safetensors"
    write_random(path, SIZES)
    return path


@pytest.fixture
def shaped(shape: Callable[[int], tuple[Network, ...]]) -> tuple[Network, ...]:
    return shape(2)


@pytest.fixture(params=["loopback", "shaped"])
def networks(request: pytest.FixtureRequest) -> tuple[Network, ...]:
    return (LOOPBACK,) * 2 if request.param == "loopback" else request.getfixturevalue("shaped")


def test_each_tensor_is_for_one_server(model: Path) -> None:
    first, second = by_layers(model, 2)
    assert (first.layers, second.layers) == ("0-1", "2-3")
    assert (first.nbytes, second.nbytes) == (FIRST, SECOND)
    assert first.ranges + second.ranges == file_ranges(model)
    assert [sorted(share.cache.values()) for share in (first, second)] == [[11 * MIB], [12 * MIB + 1, 13 * MIB]]
    assert first.cache | second.cache == full_cache(model)
    assert [share.layers for share in by_layers(model, 3)] == ["0-0", "1-1", "2-3"]
    assert [share.nbytes for share in by_layers(model, 1)] == [FIRST + SECOND]


def test_a_tensor_for_no_server_is_no_split(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    write_random(path, {"blk.0.weight": 16, "blk.1.weight": 16, "output.weight": 16})
    with pytest.raises(ValueError, match=r"other\.safetensors: there is a tensor of no layer"):
        by_layers(path, 2)


def test_blocks_are_whole_and_about_equal() -> None:
    sizes = dict(first_blocks(6))
    halves = [sum(size for name, size in sizes.items() if name.split(".")[1] in half) for half in ("012", "345")]
    assert sum(halves) == sum(sizes.values())
    assert max(halves) < 1.05 * min(halves)
    assert {name.split(".")[1] for name in sizes if name.endswith("ffn_down.weight")} == set("012345")


def test_without_a_cache(
    no_leaks: LeakCheck, model: Path, stock_lib: Path, networks: tuple[Network, ...], stack: ExitStack
) -> None:
    shares = by_layers(model, 2)
    ours = FanOutPeer(model, shares, networks=networks, options={"cache": "never"})
    stack.callback(ours.close)
    stock = StockPeers(stock_lib, model, [share.ranges for share in shares], networks=networks)
    stack.callback(stock.close)
    parts = [(0, FIRST), (FIRST, SECOND)]
    bare = SocketPairsPeer(model, parts, networks=networks)
    stack.callback(bare.close)
    assert bare.nbytes == stock.nbytes == FIRST + SECOND
    ours.check = stock.check = True
    peers = [ours, stock, bare]
    taken = alternate(peers, bare.nbytes, rounds=2, warmup=1)
    assert {name: len(took) for name, took in taken.seconds.items()} == {peer.name: 2 for peer in peers}
    assert min(min(took) for took in taken.seconds.values()) > 0
    for profiles in ours.profiles:
        assert [profile["set_tensor_bytes"] for profile in profiles] == [FIRST, SECOND]
    assert len(ours.processor) == len(stock.processor) == 3
    stack.close()


@pytest.mark.parametrize("state", [State.COLD, State.WARM, State.INDEX])
def test_with_caches(
    no_leaks: LeakCheck,
    model: Path,
    stock_lib: Path,
    networks: tuple[Network, ...],
    stack: ExitStack,
    tmp_path: Path,
    state: State,
) -> None:
    shares = by_layers(model, 2)
    caches = {who: [tmp_path / f"{who}-{number}" for number in range(2)] for who in ("weightwire", "stock")}
    index = tmp_path / "index"
    for directory in (index, *caches["weightwire"], *caches["stock"]):
        directory.mkdir()
    used = str(index / "index.sqlite3")
    options = {"cache": "auto", "index": used}
    ours = FanOutPeer(model, shares, networks=networks, caches=caches["weightwire"], options=options)
    stack.callback(ours.close)
    ranges = [share.ranges for share in shares]
    stock = StockPeers(stock_lib, model, ranges, networks=networks, caches=caches["stock"])
    stack.callback(stock.close)
    ours.check = stock.check = True
    for pair, who in ((ours, "weightwire"), (stock, "stock")):
        full = {directory: share.cache for directory, share in zip(caches[who], shares, strict=True)}
        peer = CachedPeer(pair, full, state, index if pair is ours else None)
        for _ in range(2):
            peer.prepare()
            for directory, expected in full.items():
                assert entries(directory) == ({} if state is State.COLD else expected)
            assert peer.round() > 0
            peer.finish()
            assert {directory: entries(directory) for directory in full} == full
        assert len(peer.late) == (2 if state is State.COLD else 0)
    for profiles in ours.profiles[-2:]:
        for profile, tensors in zip(profiles, (1, 2), strict=True):
            hits, misses = (0, tensors) if state is State.COLD else (tensors, 0)
            assert (profile["hits"], profile["misses"]) == (hits, misses)
            assert profile["hashes_known"] == (tensors if state is State.INDEX else 0)
    stack.close()


def test_bytes_that_a_stock_server_has_otherwise_are_noticed(
    no_leaks: LeakCheck, model: Path, stock_lib: Path, stack: ExitStack, tmp_path: Path
) -> None:
    """It trusts the name of an entry."""
    shares = by_layers(model, 2)
    caches = [tmp_path / "first", tmp_path / "second"]
    ranges = [share.ranges for share in shares]
    stock = StockPeers(stock_lib, model, ranges, networks=[LOOPBACK] * 2, caches=caches)
    stack.callback(stock.close)
    (entry, size), *_ = shares[1].cache.items()
    (caches[1] / entry).write_bytes(bytes(size))
    stock.round()
    stock.check = True
    with pytest.raises(RuntimeError, match=f"the tensor of {size} bytes at [0-9]+ of the file is another"):
        stock.round()
    stack.close()


def test_each_link_is_as_fast_as_it_says_and_no_faster(
    no_leaks: LeakCheck, model: Path, shaped: tuple[Network, ...], stack: ExitStack
) -> None:
    """A token bucket lets nothing through early; how late it is depends on the machine."""
    first, second = shaped
    assert first.at_client == second.at_client
    assert len({first.at_server, second.at_server, first.at_client}) == 3
    assert len({network.host for network in shaped} | {network.client for network in shaped}) == 4
    peer = SocketPairsPeer(model, [(0, FIRST)] * 2, networks=shaped)
    stack.callback(peer.close)
    assert FIRST * 8 / peer.round() < 1.1 * RATE
    stack.close()
