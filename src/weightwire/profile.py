"""Where the time of a load went.

A load is in exactly one stage at any moment, so the stages (with ``other`` for what is none of them) add up to its
span.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from time import perf_counter_ns

__all__ = ["LoadProfile", "LoadRecorder", "Stage"]

_GIB = float(1 << 30)


class Stage(IntEnum):
    """What a load is doing. ``OTHER`` is planning, encoding and the caller's progress callback."""

    OTHER = 0
    HASH = 1
    ASK = 2
    SEND = 3
    WAIT = 4
    ALLOC = 5
    VERIFY = 6


_LABELS = {
    Stage.HASH: "hashing",
    Stage.ASK: "asking the cache",
    Stage.SEND: "sending",
    Stage.WAIT: "waiting for the server",
    Stage.ALLOC: "laying out",
    Stage.VERIFY: "verifying",
    Stage.OTHER: "other",
}


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """What a load spent its time on. Every ``*_ns`` is wall-clock nanoseconds of the thread that moves the bytes.

    ``calls`` counts requests to the server and ``bytes`` what the tensors hold; ``bytes_saved`` of those came out of
    the server's cache, which filled ``corrupt_hits`` tensors wrongly, so that they were sent. ``hash_ns`` is the time
    spent waiting for hashes (they are computed ahead by other threads) and, at the end, for what the index records,
    ``ask_ns`` for the server's answers about its cache, ``send_ns`` in giving bytes to the transport, ``wait_ns`` for
    other answers and the final barrier, ``alloc_ns`` for limits, sizes and allocation, ``verify_ns`` for reading back
    and comparing. Over RDMA, ``direct_bytes`` went out of registered memory where they lay and ``copied_bytes``
    (requests included) by way of the ring; both are 0 on TCP.
    """

    calls: int = 0
    bytes: int = 0
    span_ns: int = 0
    hash_ns: int = 0
    ask_ns: int = 0
    send_ns: int = 0
    wait_ns: int = 0
    alloc_ns: int = 0
    verify_ns: int = 0
    hits: int = 0
    misses: int = 0
    corrupt_hits: int = 0
    bytes_saved: int = 0
    direct_bytes: int = 0
    copied_bytes: int = 0

    @property
    def other_ns(self) -> int:
        """What is left of the span once every named stage is taken off, nanoseconds."""
        return self.span_ns - sum(
            (self.hash_ns, self.ask_ns, self.send_ns, self.wait_ns, self.alloc_ns, self.verify_ns)
        )

    def as_dict(self) -> dict[str, int]:
        """Every number by its name, ``other_ns`` included."""
        values: dict[str, int] = asdict(self)
        values["other_ns"] = self.other_ns
        return values

    def lines(self) -> list[str]:
        """A small table for people: seconds, share and, where bytes moved, GiB/s (2^30 bytes per second)."""
        spent = {
            Stage.HASH: self.hash_ns,
            Stage.ASK: self.ask_ns,
            Stage.SEND: self.send_ns,
            Stage.WAIT: self.wait_ns,
            Stage.ALLOC: self.alloc_ns,
            Stage.VERIFY: self.verify_ns,
            Stage.OTHER: self.other_ns,
        }
        moved = {Stage.SEND: self.bytes - self.bytes_saved, Stage.VERIFY: self.bytes}
        lines = [
            f"{_amount(self.bytes)} in {_seconds(self.span_ns)}{_rate(self.bytes, self.span_ns)}, {self.calls} requests"
        ]
        if self.hits or self.misses:
            lines.append(
                f"  server's cache: {self.hits} hits, {self.misses} misses, {_amount(self.bytes_saved)} not sent"
            )
        if self.direct_bytes or self.copied_bytes:
            lines.append(
                f"  over RDMA: {_amount(self.direct_bytes)} sent where they lay, {_amount(self.copied_bytes)} copied"
            )
        for stage, spent_ns in sorted(spent.items(), key=lambda item: -item[1]):
            if spent_ns > 0:
                share = 100.0 * spent_ns / self.span_ns if self.span_ns else 0.0
                rate = _rate(moved.get(stage, 0), spent_ns)
                lines.append(f"  {_LABELS[stage]:<22} {_seconds(spent_ns):>10} {share:5.1f} %{rate}")
        if self.span_ns:
            lines.append(f"most of the time went on: {_LABELS[max(spent, key=lambda stage: spent[stage])]}")
        return lines


class LoadRecorder:
    """Builds a :class:`LoadProfile`: one clock that is always in exactly one stage. Used by one thread."""

    __slots__ = (
        "_since", "_spent", "_stage", "bytes", "bytes_saved", "calls", "copied_bytes", "corrupt_hits",
        "direct_bytes", "hits", "misses",
    )  # fmt: skip

    def __init__(self) -> None:
        self._spent = [0] * len(Stage)
        self._stage = Stage.OTHER
        self._since = perf_counter_ns()
        self.calls = 0
        self.bytes = 0
        self.bytes_saved = 0
        self.direct_bytes = 0
        self.copied_bytes = 0
        self.hits = 0
        self.misses = 0
        self.corrupt_hits = 0

    def switch(self, stage: Stage) -> Stage:
        """Enter ``stage`` and return the one that was left."""
        now = perf_counter_ns()
        previous = self._stage
        self._spent[previous] += now - self._since
        self._since = now
        self._stage = stage
        return previous

    def finish(self) -> LoadProfile:
        """The profile up to now."""
        self.switch(self._stage)
        spent = self._spent
        return LoadProfile(
            calls=self.calls,
            bytes=self.bytes,
            span_ns=sum(spent),
            hash_ns=spent[Stage.HASH],
            ask_ns=spent[Stage.ASK],
            send_ns=spent[Stage.SEND],
            wait_ns=spent[Stage.WAIT],
            alloc_ns=spent[Stage.ALLOC],
            verify_ns=spent[Stage.VERIFY],
            hits=self.hits,
            misses=self.misses,
            corrupt_hits=self.corrupt_hits,
            bytes_saved=self.bytes_saved,
            direct_bytes=self.direct_bytes,
            copied_bytes=self.copied_bytes,
        )


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3f} s" if ns >= 1_000_000 else f"{ns / 1e3:.0f} us"


def _amount(nbytes: int) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / _GIB:.2f} GiB"
    return f"{nbytes / (1 << 20):.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"


def _rate(nbytes: int, ns: int) -> str:
    return f" {nbytes / _GIB / (ns / 1e9):8.2f} GiB/s" if nbytes and ns else ""
