"""Alternate the peers round by round and reduce what they took to medians and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weightwire.transport.memory import HostRegion


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

    def ratio(self, name: str, against: str) -> float:
        """How many times as fast as ``against`` is ``name``: the median over rounds run side by side."""
        pairs = zip(self.seconds[against], self.seconds[name], strict=True)
        return statistics.median(other / own for other, own in pairs)

    def summary(self, subject: str) -> Mapping[str, object]:
        """What a benchmark keeps: medians, spread, GiB/s and the subject's ratio to every peer."""
        return {
            "bytes": self.nbytes,
            "rounds": len(next(iter(self.seconds.values()))),
            "median_seconds": {name: self.median(name) for name in self.seconds},
            "min_max_seconds": {name: [min(took), max(took)] for name, took in self.seconds.items()},
            "gib_per_s": {name: self.nbytes / 2**30 / self.median(name) for name in self.seconds},
            "times_as_fast_as": {name: self.ratio(subject, name) for name in self.seconds if name != subject},
        }


def split(profiles: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Median seconds of each stage of `LoadProfile`, the whole span included, over the profiles of several rounds."""
    stages = [name for name in profiles[0] if name.endswith("_ns")]
    return {name[:-3]: statistics.median(profile[name] for profile in profiles) / 1e9 for name in stages}


def settle(nbytes: int) -> None:
    """Touch ``nbytes`` bytes of fresh memory and give them back.

    Before every round of every peer: what fresh memory costs depends on who returned some last (a virtual machine's
    host may have taken it back meanwhile), and the peer that happens to follow must not be the one to pay.
    """
    region = HostRegion(nbytes)
    region.populate(0, nbytes)


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
