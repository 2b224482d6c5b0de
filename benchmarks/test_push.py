"""Pushing 1 GiB over loopback without a cache, beside a bare socket pair, the stock pair and, where installed, gloo and
iperf3.

Every round runs each peer once, in an order that changes; what is kept are medians of the rounds and of their ratios:
``extra_info`` in the JSON, and printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.gloo import GlooPeer
from harness.iperf import IperfPeer
from harness.models import file_ranges
from harness.rounds import Rounds, record, settle, side_by_side, split, start
from harness.socket_pair import SocketPairPeer
from harness.stock_pair import StockPeer
from harness.weightwire_pair import WeightwirePeer
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.bench
@pytest.mark.timeout(900)
def test_push_uncached(
    benchmark: BenchmarkFixture, model_of_1gib: Path, stock_library: Path, stack: ExitStack, rounds: int
) -> None:
    path = model_of_1gib
    subject = WeightwirePeer(path)
    stack.callback(subject.close)
    others, absent = start(
        stack,
        {
            "socket pair": lambda: SocketPairPeer(path, populate=False),
            "socket pair, populated ahead": lambda: SocketPairPeer(path, populate=True),
            "stock pair": lambda: StockPeer(stock_library, path, file_ranges(path)),
            "gloo": lambda: GlooPeer(path),
            "iperf3": lambda: IperfPeer(subject.nbytes),
        },
    )
    taken = Rounds(subject.nbytes)
    for peer in (subject, *others):  # warm-up: page cache, allocators, the congestion window
        peer.round()
    subject.profiles.clear()
    side_by_side(
        benchmark,
        subject,
        others,
        rounds,
        before=lambda _: settle(subject.nbytes),
        run=lambda peer: taken.add(peer.name, peer.round()),
    )
    splits = split([profile.as_dict() for profile in subject.profiles])
    record(benchmark, taken, subject.name, absent=absent, split_seconds=splits)
    assert min(len(took) for took in taken.seconds.values()) == rounds
