"""A model split over two servers, weightwire's client and servers beside the stock ones: no cache, a cold one, a warm
one, and a warm one with the index of hashes.

On loopback, and between a network namespace for the client and one for each server, joined by links of their own that
are shaped to 2.5 Gbit/s. The first half of a model's layers is for one server, the second for the other, as llama.cpp
splits a model. Its load sets the tensors of one device after the other on one thread, and so does the stock client
here, once it has a buffer on both; weightwire's pushes to both at once. Two bare socket pairs at once say what the
links carry.

Before the rounds that count every byte on the servers is compared with the file, whoever sent it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.cached import CachedPeer, State, cached_rounds, file_system, push_options
from harness.fanout import FanOutPeer
from harness.models import Share, by_layers, first_blocks, write_random
from harness.network import LOOPBACK, Network
from harness.rounds import record, split
from harness.socket_pair import SocketPairsPeer
from harness.stock_pair import StockPeers
from pytest_benchmark.fixture import BenchmarkFixture

SERVERS = ("first server", "second server")
BLOCKS = 6


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Six whole blocks of a 27B model, 1.41 GiB."""
    path = tmp_path_factory.mktemp("split") / "blocks.safetensors"
    write_random(path, dict(first_blocks(BLOCKS)))
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def shares(blocks: Path) -> list[Share]:
    return by_layers(blocks, len(SERVERS))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["loopback", "shaped"])
def networks(request: pytest.FixtureRequest) -> tuple[Network, ...]:
    """Where each server is."""
    if request.param == "loopback":
        return (LOOPBACK,) * len(SERVERS)
    shaped: tuple[Network, ...] = request.getfixturevalue("shaped_to_two")
    return shaped


@pytest.mark.bench
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
def test_split(
    benchmark: BenchmarkFixture,
    state: State,
    networks: tuple[Network, ...],
    blocks: Path,
    shares: list[Share],
    stock_library: Path,
    stack: ExitStack,
    tmp_path: Path,
    rounds: int,
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    caches = {who: [tmp_path / who / server for server in SERVERS] for who in ("weightwire", "stock")}
    for directory in (*caches["weightwire"], *caches["stock"]):
        directory.mkdir(parents=True)
    cached = state is not State.NONE
    ours = FanOutPeer(
        blocks,
        shares,
        networks=networks,
        caches=caches["weightwire"] if cached else None,
        options=push_options(state, index),
    )
    stack.callback(ours.close)
    stock = StockPeers(
        stock_library,
        blocks,
        [share.ranges for share in shares],
        networks=networks,
        caches=caches["stock"] if cached else None,
    )
    stack.callback(stock.close)

    def full(who: str) -> dict[Path, dict[str, int]]:
        return {directory: share.cache for directory, share in zip(caches[who], shares, strict=True)}

    subject = CachedPeer(ours, full("weightwire"), state, index)
    others = [CachedPeer(stock, full("stock"), state)]
    if not cached:
        # The most that these links do, the same in every state. Which bytes of the file go is all the same to it.
        parts, at = [], 0
        for share in shares:
            parts.append((at, share.nbytes))
            at += share.nbytes
        bare = SocketPairsPeer(blocks, parts, networks=networks)
        stack.callback(bare.close)
        others.append(CachedPeer(bare, {}, State.NONE))
    nbytes = sum(share.nbytes for share in shares)
    ours.check = stock.check = True

    def warmed_up() -> None:
        ours.check = stock.check = False
        for kept in (ours.profiles, ours.processor, stock.processor):
            kept.clear()

    taken = cached_rounds(benchmark, subject, others, nbytes, rounds, warmed_up)

    record(
        benchmark,
        taken,
        subject.name,
        state=state.value,
        network=networks[0].name,
        file_system=file_system(tmp_path),
        layers={server: share.layers for server, share in zip(SERVERS, shares, strict=True)},
        bytes_by_server={server: share.nbytes for server, share in zip(SERVERS, shares, strict=True)},
        entries=sum(len(share.cache) for share in shares),
        bytes_in_entries=sum(sum(share.cache.values()) for share in shares),
        split_seconds_by_server={
            server: split([profiles[number] for profiles in ours.profiles]) for number, server in enumerate(SERVERS)
        },
        # Of all ends. What else the machine does changes this less than it does the span.
        processor_seconds={peer.name: statistics.median(peer.processor) for peer in (ours, stock)},
        entries_in_place_after_seconds=subject.late,
    )
    assert len(ours.profiles) == rounds
    for number, share in enumerate(shares):
        hits = len(share.cache) if state.warm else 0
        misses = len(share.cache) if state is State.COLD else 0
        known = len(share.cache) if state is State.INDEX else 0
        found = {
            (profiles[number]["hits"], profiles[number]["misses"], profiles[number]["hashes_known"])
            for profiles in ours.profiles
        }
        assert found == {(hits, misses, known)}
        sent = {profiles[number]["set_tensor_bytes"] for profiles in ours.profiles}
        assert sent == {share.nbytes - (sum(share.cache.values()) if state.warm else 0)}
