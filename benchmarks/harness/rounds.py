"""Alternate the peers round by round and reduce what they took to medians and ratios."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from weightwire.transport.memory import HostRegion, available_memory

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


_P = TypeVar("_P")

_LOADS = 3


class PeerAbsent(Exception):
    """There is no such peer here; the text says why."""


class Peer(Protocol):
    """One way of moving the work's bytes. ``round()`` moves them once and returns the seconds it took."""

    name: str

    def round(self) -> float: ...

    def close(self) -> None: ...


@dataclass
class Rounds:
    """Seconds of every round of every peer, taken in turn."""

    nbytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        """Median seconds of a peer's rounds."""
        return statistics.median(self.seconds[name])

    def ratios(self, name: str, against: str) -> list[float]:
        """How many times as fast as ``against`` ``name`` was, in each round."""
        pairs = zip(self.seconds[against], self.seconds[name], strict=True)
        return [other / own for other, own in pairs]

    def ratio(self, name: str, against: str) -> float:
        """How many times as fast as ``against`` is ``name``: the median over rounds run side by side."""
        return statistics.median(self.ratios(name, against))

    def summary(self, subject: str) -> Mapping[str, object]:
        """What a benchmark keeps: medians, spread, GiB/s (where bytes are moved) and the subject's ratio to every peer.

        A ratio above 1 says that the subject is faster. compare.py and report.py read these names.
        """
        others = [name for name in self.seconds if name != subject]
        speed = {name: self.nbytes / 2**30 / self.median(name) for name in self.seconds} if self.nbytes else {}
        return {
            "subject": subject,
            "bytes": self.nbytes,
            "rounds": len(next(iter(self.seconds.values()))),
            "median_seconds": {name: self.median(name) for name in self.seconds},
            "quartiles_seconds": {name: quartiles(took) for name, took in self.seconds.items()},
            "min_max_seconds": {name: [min(took), max(took)] for name, took in self.seconds.items()},
            "gib_per_s": speed,
            "times_as_fast_as": {name: self.ratio(subject, name) for name in others},
            "quartiles_times_as_fast_as": {name: quartiles(self.ratios(subject, name)) for name in others},
        }


def quartiles(values: Sequence[float]) -> list[float]:
    """Between what the middle half of ``values`` lies; twice the value where there is one."""
    if len(values) == 1:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def split(profiles: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Median seconds of each stage of `LoadProfile`, the whole span included, over the profiles of several rounds."""
    stages = [name for name in profiles[0] if name.endswith("_ns")]
    return {name[:-3]: statistics.median(profile[name] for profile in profiles) / 1e9 for name in stages}


def start(stack: ExitStack, factories: Mapping[str, Callable[[], Peer]]) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can be had here, closed with ``stack``, and why the others, by their names, cannot."""
    peers: list[Peer] = []
    absent: dict[str, str] = {}
    for name, factory in factories.items():
        try:
            peer = factory()
        except PeerAbsent as why:
            absent[name] = str(why)
        else:
            stack.callback(peer.close)
            peers.append(peer)
    return peers, absent


def record(benchmark: BenchmarkFixture, rounds: Rounds, subject: str, **facts: object) -> dict[str, object]:
    """Keep what a benchmark found in the JSON, always in the same form, and print it. ``facts`` are further members."""
    summary = {**rounds.summary(subject), **facts}
    benchmark.extra_info.update(summary)
    print(json.dumps(summary, indent=2))
    return summary


def side_by_side(
    benchmark: BenchmarkFixture,
    subject: _P,
    others: Sequence[_P],
    rounds: int,
    *,
    run: Callable[[_P], object],
    before: Callable[[_P], object] = bool,
    after: Callable[[_P], object] = bool,
) -> None:
    """``run`` the subject and every other peer once in each of so many rounds, one at a time, with what comes
    ``before`` and ``after`` each. The benchmark's own time is the subject's.

    Who follows whom changes from round to round: what one leaves behind (memory the host takes back, data on its way
    to the disk) must not always fall on the same one.
    """
    peers = [subject, *others]
    order: list[_P] = []
    turn = 0

    def take(peer: _P) -> None:
        before(peer)
        run(peer)
        after(peer)

    def setup() -> None:
        order[:] = ordered(peers, turn)
        for peer in order[: order.index(subject)]:
            take(peer)
        before(subject)

    def teardown(_: _P) -> None:
        nonlocal turn
        after(subject)
        for peer in order[order.index(subject) + 1 :]:
            take(peer)
        turn += 1

    benchmark.pedantic(run, args=(subject,), setup=setup, teardown=teardown, rounds=rounds)


def ordered(peers: Sequence[_P], turn: int) -> list[_P]:
    """The order of round number ``turn``: each time another one begins, and every other time it goes backwards."""
    first = turn % len(peers)
    order = [*peers[first:], *peers[:first]]
    return order[::-1] if turn % 2 else order


def settle(nbytes: int) -> None:
    """Touch fresh memory for a load of ``nbytes`` bytes and give it back.

    Before every round of every peer: what fresh memory costs depends on who returned some last (a virtual machine's
    host may have taken it back meanwhile), and the peer that happens to follow must not be the one to pay. Three times
    the bytes: for the tensors, for entries of a cache in the page cache, and for what else a peer takes.
    """
    region = HostRegion(min(_LOADS * nbytes, available_memory() // 2))
    region.populate(0, region.nbytes)


def alternate(peers: list[Peer], nbytes: int, rounds: int, warmup: int = 1) -> Rounds:
    """Run ``peers`` in turn, A B C A B C, ``rounds`` times after ``warmup`` uncounted turns."""
    result = Rounds(nbytes)
    for turn in range(warmup + rounds):
        for peer in peers:
            settle(nbytes)
            took = peer.round()
            if turn >= warmup:
                result.add(peer.name, took)
    return result
