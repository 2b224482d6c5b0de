"""Loading through the server's cache, weightwire's pair beside the stock pair: no cache, a cold one, a warm one,
and a warm one with the index of hashes.

On loopback and between two network namespaces shaped to 2.5 Gbit/s. Both pairs keep their caches on the same file
system, and ask for every tensor over 10 MiB. The stock client hashes each before it sends it; the stock server hashes
and writes each on the thread that receives, and does not wait for the disk.

What is aimed at, as ratios of medians of the same run and not asserted: with a cold cache 3 times the stock pair, with
a warm one 5 times, warm with the index of hashes 10 times; two threads hash many tensors 1.7 times as fast as one on
two cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.cached import CachedPeer, State, cached_rounds, file_system, push_options
from harness.models import file_ranges, full_cache
from harness.network import LOOPBACK, Network
from harness.pushing import PushingPeer
from harness.rounds import Rounds, record, split
from harness.socket_pair import SocketPairPeer
from harness.stock_pair import StockPeer
from pytest_benchmark.fixture import BenchmarkFixture

import weightwire
from weightwire.client.hashes import TensorHashes, is_cached
from weightwire.hashing import hash_payloads


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["loopback", "shaped"])
def network(request: pytest.FixtureRequest, cache_model: Path) -> Network:
    """Where the pairs are: loopback in every shape, the shaped network in one of them unless all are asked for."""
    if request.param == "loopback":
        return LOOPBACK
    if cache_model.stem != "blocks" and not request.config.getoption("--every-shape"):
        pytest.skip("the shaped network has this shape with --every-shape only")
    shaped: Network = request.getfixturevalue("shaped")
    return shaped


@pytest.mark.bench
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
def test_cache(
    benchmark: BenchmarkFixture,
    state: State,
    network: Network,
    cache_model: Path,
    stock_library: Path,
    stack: ExitStack,
    tmp_path: Path,
    rounds: int,
) -> None:
    expected = full_cache(cache_model)
    directories = {name: tmp_path / name for name in ("weightwire", "stock", "index")}
    for directory in directories.values():
        directory.mkdir()
    cached = state is not State.NONE
    ours = PushingPeer(
        cache_model,
        network=network,
        cache=directories["weightwire"] if cached else None,
        options=push_options(state, directories["index"]),
    )
    stack.callback(ours.close)
    stock = StockPeer(
        stock_library,
        cache_model,
        file_ranges(cache_model),
        network=network,
        cache=directories["stock"] if cached else None,
    )
    stack.callback(stock.close)
    bare = SocketPairPeer(cache_model, populate=False, network=network)
    stack.callback(bare.close)
    subject = CachedPeer(ours, {directories["weightwire"]: expected}, state, directories["index"])
    others = [CachedPeer(stock, {directories["stock"]: expected}, state)]
    if not cached:
        # The most that this network does, the same in every state.
        others.append(CachedPeer(bare, {}, State.NONE))
    nbytes = bare.nbytes

    def warmed_up() -> None:
        for kept in (ours.profiles, ours.processor, stock.processor):
            kept.clear()

    taken = cached_rounds(benchmark, subject, others, nbytes, rounds, warmed_up)

    record(
        benchmark,
        taken,
        subject.name,
        state=state.value,
        network=network.name,
        file_system=file_system(tmp_path),
        entries=len(expected),
        bytes_in_entries=sum(expected.values()),
        split_seconds=split(ours.profiles),
        # Of both ends. What else the machine does changes this less than it does the span.
        processor_seconds={pair.name: statistics.median(pair.processor) for pair in (ours, stock)},
        entries_in_place_after_seconds=subject.late,
    )
    hits = len(expected) if state.warm else 0
    misses = len(expected) if state is State.COLD else 0
    known = len(expected) if state is State.INDEX else 0
    assert len(ours.profiles) == rounds
    assert {(profile["hits"], profile["misses"], profile["hashes_known"]) for profile in ours.profiles} == {
        (hits, misses, known)
    }


@pytest.mark.bench
@pytest.mark.timeout(300)
def test_two_threads_hash(benchmark: BenchmarkFixture, cache_model: Path, rounds: int) -> None:
    """What the client hashes of a model, by one thread and by two."""
    if cache_model.stem != "blocks":
        pytest.skip("many tensors are wanted")
    hashed: dict[str, list[int]] = {}
    with weightwire.open_model(cache_model) as model:
        tensors = [tensor for tensor in model.tensors.values() if is_cached(tensor)]
        taken = Rounds(sum(tensor.nbytes for tensor in tensors))

        def run(name: str, threads: int) -> None:
            hashes = TensorHashes(tensors, threads=threads, in_flight=taken.nbytes)
            feed = hashes.feed(tensors)
            started = time.perf_counter()
            try:
                hashes.start()
                hashed[name] = [feed.get(number, lambda: None) for number in range(len(tensors))]
            finally:
                hashes.close()
            taken.add(name, time.perf_counter() - started)

        benchmark.pedantic(run, args=("two threads", 2), setup=lambda: run("one thread", 1), rounds=rounds)
        assert hashed["one thread"] == hashed["two threads"] == hash_payloads([tensor.payload for tensor in tensors])
    record(benchmark, taken, "two threads")
