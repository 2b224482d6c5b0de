"""Pushing 1 GiB over loopback without a cache, beside a bare socket pair and the stock pair.

Every round runs each peer once, in turn; what is kept are medians of the rounds and of their ratios: ``extra_info`` in
the JSON, and printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.models import file_ranges
from harness.rounds import Peer, Rounds, settle
from harness.socket_pair import SocketPairPeer
from harness.stock_pair import StockPeer
from harness.weightwire_pair import WeightwirePeer
from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 9


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.bench
@pytest.mark.timeout(900)
def test_push_uncached(benchmark: BenchmarkFixture, model_of_1gib: Path, stock_library: Path, stack: ExitStack) -> None:
    path = model_of_1gib
    subject = WeightwirePeer(path)
    others: list[Peer] = [
        SocketPairPeer(path, populate=False),
        SocketPairPeer(path, populate=True),
        StockPeer(stock_library, path, file_ranges(path)),
    ]
    for peer in (subject, *others):
        stack.callback(peer.close)
    rounds = Rounds(subject.nbytes)

    for peer in (subject, *others):  # warm-up: page cache, allocators, the congestion window
        peer.round()

    def run_the_others() -> None:
        for peer in others:
            settle(subject.nbytes)
            rounds.add(peer.name, peer.round())
        settle(subject.nbytes)

    def push() -> None:
        rounds.add(subject.name, subject.round())

    benchmark.pedantic(push, setup=run_the_others, rounds=ROUNDS)
    summary = rounds.summary(subject.name)
    benchmark.extra_info.update(summary)
    print(json.dumps(summary, indent=2))
    assert min(len(took) for took in rounds.seconds.values()) == ROUNDS
