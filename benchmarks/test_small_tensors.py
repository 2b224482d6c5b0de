"""A model of 20,000 tensors of 4 KiB: what a tensor costs beyond its bytes, client and server together.

Beside the stock pair, and a bare socket pair, which sends the same bytes in one piece.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from harness.models import file_ranges
from harness.rounds import Peer, Rounds, record, side_by_side, split
from harness.socket_pair import SocketPairPeer
from harness.stock_pair import StockPeer
from harness.weightwire_pair import WeightwirePeer
from pytest_benchmark.fixture import BenchmarkFixture
from safetensors.numpy import save_file

TENSORS = 20_000
ROUNDS = 9


@pytest.fixture(scope="module")
def many_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.safetensors"
    block = np.arange(1024, dtype=np.float32)
    save_file({f"layers.{index}.weight": block + index for index in range(TENSORS)}, path)
    return path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.bench
@pytest.mark.timeout(300)
def test_push_small_tensors(
    benchmark: BenchmarkFixture, many_small: Path, stock_library: Path, stack: ExitStack
) -> None:
    subject = WeightwirePeer(many_small)
    stack.callback(subject.close)
    others: list[Peer] = []
    for peer in (
        StockPeer(stock_library, many_small, file_ranges(many_small)),
        SocketPairPeer(many_small, populate=False),
    ):
        stack.callback(peer.close)
        others.append(peer)
    taken = Rounds(subject.nbytes)
    for peer in (subject, *others):
        peer.round()
    subject.profiles.clear()

    side_by_side(benchmark, subject, others, ROUNDS, run=lambda peer: taken.add(peer.name, peer.round()))
    spans = [profile.span_ns for profile in subject.profiles]
    record(
        benchmark,
        taken,
        subject.name,
        tensors=TENSORS,
        microseconds_per_tensor=statistics.median(spans) / TENSORS / 1000,
        split_seconds=split([profile.as_dict() for profile in subject.profiles]),
    )
    assert len(spans) == ROUNDS
