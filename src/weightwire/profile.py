"""Where the time of a connection went, on either side of it. docs/profile.md says how each number is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from typing import Any, Final, NoReturn

__all__ = ["CommandStat", "LoadProfile", "Stage"]

_GIB = float(1 << 30)


class Stage(IntEnum):
    """What a connection is busy with, as the core's clock numbers it: at any moment with exactly one.

    Those up to ``BLOCKED`` make up the span; ``ALLOC``, ``VERIFY`` and ``INDEX`` are counted beside it.
    """

    GAP = 0
    READ = 1
    HASH = 2
    ASK = 3
    STAGING = 4
    WIRE = 5
    WAIT = 6
    BLOCKED = 7
    ALLOC = 8
    VERIFY = 9
    INDEX = 10


@dataclass(frozen=True, slots=True)
class CommandStat:
    """How many requests of one kind there were, and how long they took altogether, nanoseconds.

    On the client from sending to having the answer, or to having sent where there is none; requests that wait for
    their answers at the same time each count the whole of it. On the server from the head of the request to the answer.
    """

    count: int
    ns: int


class _Commands(dict[str, CommandStat]):
    """Commands that cannot be changed; unlike a view of a dict they can be pickled, copied and given to `asdict`."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("the commands of a profile cannot be changed")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[type[_Commands], tuple[dict[str, CommandStat]]]:
        return type(self), (dict(self),)


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """What a connection, or one push over it, spent its time on. Times are nanoseconds of CLOCK_MONOTONIC on the thread
    that moves the bytes, sizes are bytes.

    ``side`` is ``"client"`` or ``"server"``, ``peer`` the other end as ``host:port``, ``transport`` ``"tcp"`` or
    ``"rdma"``, ``device`` the RDMA device (None on TCP), ``send_depth`` the most SENDs that were in flight at once (0
    on TCP). ``measured`` is False where profiling was off: then all times and the counts
    of requests are 0, and `lines` says that they were not measured.

    ``set_tensor_calls`` and ``set_tensor_bytes`` count SET_TENSOR requests (SET_TENSOR_2D too) and the bytes of data in
    them. ``span_ns`` is the time from the work for the first of them (or for the first question about one,
    SET_TENSOR_HASH) to the end of the last, its barrier included. It is the sum of ``read_ns`` (reading files),
    ``hash_ns`` (hashing, or waiting for threads that do), ``ask_ns`` (asking the cache, or looking it up),
    ``staging_ns`` (copies on the way into RDMA's ring; on a server all that it does with what it has received),
    ``wire_ns`` (moving bytes to or from the transport), ``wait_ns`` (asleep until the peer moves) and ``gap_ns`` (none
    of these). ``blocked_ns`` is the part of ``wait_ns`` in which a send found no room. Beside the span are ``alloc_ns``
    (limits, sizes, buffers), ``verify_ns`` (reading tensors back) and ``index_ns`` (finishing the index of hashes).
    ``hash_thread_ns`` is what a client's threads spent on hashing meanwhile, summed over them.

    ``hits``, ``misses``, ``corrupt_hits`` (filled wrongly, and sent therefore) and ``bytes_saved`` are the cache's.
    ``copies`` and ``copied_bytes`` count what was copied by this side on its way, ``direct_bytes`` what was sent out of
    registered memory; on a client's TCP connection all three are 0, but that the plain way copies every tensor into its
    message. ``window_full`` counts waits for a free slot of
    RDMA's send ring. ``busy_ns``, ``peer_limited_ns`` and ``buffer_limited_ns`` are the kernel's word on a client's TCP
    connection: how long it had data to send, and how long the receiver's window, or this end's send buffer, kept it
    from sending. ``commands`` has a `CommandStat` for every command that was used; it cannot be changed.
    """

    side: str = "client"
    peer: str = ""
    transport: str = "tcp"
    device: str | None = None
    send_depth: int = 0
    measured: bool = True
    set_tensor_calls: int = 0
    set_tensor_bytes: int = 0
    span_ns: int = 0
    read_ns: int = 0
    hash_ns: int = 0
    ask_ns: int = 0
    staging_ns: int = 0
    wire_ns: int = 0
    wait_ns: int = 0
    gap_ns: int = 0
    blocked_ns: int = 0
    alloc_ns: int = 0
    verify_ns: int = 0
    index_ns: int = 0
    hash_thread_ns: int = 0
    hits: int = 0
    misses: int = 0
    corrupt_hits: int = 0
    bytes_saved: int = 0
    copies: int = 0
    copied_bytes: int = 0
    direct_bytes: int = 0
    window_full: int = 0
    busy_ns: int = 0
    peer_limited_ns: int = 0
    buffer_limited_ns: int = 0
    commands: Mapping[str, CommandStat] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "commands", _Commands(self.commands))

    @property
    def loaded(self) -> bool:
        """Whether anything was sent, or asked of a cache: otherwise there is nothing to tell."""
        return bool(self.set_tensor_calls or self.hits or self.misses or self.corrupt_hits)

    @property
    def bottleneck(self) -> str | None:
        """What the span was spent on most. None where there is no span.

        On a client ``"source-bound"`` (reading, and whatever the caller did between), ``"hash-bound"``,
        ``"wire-bound"`` (moving bytes, and waiting for room while the network was what kept them) or ``"server-bound"``
        (waiting for answers, or for room while the server's window was closed). On a server ``"client-bound"`` (nothing
        came), ``"source-bound"`` (reading entries of its cache), ``"hash-bound"``, ``"wire-bound"`` (taking bytes from
        the transport) or ``"server-bound"`` (what is done with them).
        """
        shares = self._shares()
        return max(shares, key=lambda name: shares[name]) if self.span_ns > 0 else None

    def since(self, before: LoadProfile) -> LoadProfile:
        """What was added after ``before``, an earlier profile of the same connection."""
        values: dict[str, Any] = {}
        for each in fields(self):
            now, then = getattr(self, each.name), getattr(before, each.name)
            if each.name == "commands":
                values[each.name] = _less(now, then)
            elif isinstance(now, int) and each.name not in ("send_depth", "measured"):
                values[each.name] = max(now - then, 0)
            else:
                values[each.name] = now
        return LoadProfile(**values)

    def as_dict(self) -> dict[str, Any]:
        """Every field by its name, and ``bottleneck``, as JSON has them: ``commands`` by name, each a mapping too."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        values["commands"] = {name: asdict(stat) for name, stat in self.commands.items()}
        values["bottleneck"] = self.bottleneck
        return values

    def lines(self) -> list[str]:
        """A small table for people: milliseconds, shares of the span and, where bytes moved, GiB/s (2^30 bytes per
        second). The last line names the bottleneck, if there was anything to measure.
        """
        over = self.transport if self.device is None else f"{self.transport} on {self.device}"
        lines = [f"{self.side}, connection with {self.peer or 'nobody'} over {over}"]
        if self.measured:
            lines.append(
                f"  {self.set_tensor_calls} SET_TENSOR, {_amount(self.set_tensor_bytes)} in {_seconds(self.span_ns)}"
                f"{_rate(self.set_tensor_bytes, self.span_ns)}"
            )
        else:
            lines.append(f"  {_amount(self.set_tensor_bytes)} in SET_TENSOR; times and requests were not measured")
        if self.hits or self.misses or self.corrupt_hits:
            wrong = f", {self.corrupt_hits} of it filled wrongly" if self.corrupt_hits else ""
            lines.append(
                f"  server's cache: {self.hits} hit{'s' if self.hits != 1 else ''}, {self.misses} "
                f"miss{'es' if self.misses != 1 else ''}, {_amount(self.bytes_saved)} not sent{wrong}"
            )
        if self.transport == "rdma":
            lines.append(
                f"  over RDMA: {_amount(self.direct_bytes)} sent where they lay, {_amount(self.copied_bytes)} copied; "
                f"{self.send_depth} SENDs in flight at most, window full {self.window_full} times"
            )
        elif self.copies:
            lines.append(f"  {self.copies} copies of {_amount(self.copied_bytes)}")
        if not self.measured:
            return lines
        lines += self._time_lines()
        if self.bottleneck is not None:
            lines.append(f"{self.bottleneck}: {_WORDS[self.side, self.bottleneck]}")
        return lines

    def _time_lines(self) -> list[str]:
        lines: list[str] = []
        labels = _LABELS[self.side]
        inside = sorted(((getattr(self, f"{name}_ns"), name) for name in labels), reverse=True)
        for ns, name in inside:
            if ns:
                share = 100.0 * ns / self.span_ns if self.span_ns else 0.0
                lines.append(f"  {labels[name]:<24} {_seconds(ns):>11} {share:5.1f} %")
        if self.blocked_ns:
            lines.append(f"    of the waiting, for room to send: {_seconds(self.blocked_ns)}{self._kernel()}")
        if self.hash_thread_ns:
            lines.append(f"  threads hashed for {_seconds(self.hash_thread_ns)} meanwhile")
        beside = [(self.alloc_ns, "laying out"), (self.verify_ns, "verifying"), (self.index_ns, "finishing the index")]
        if any(ns for ns, _ in beside):
            lines.append("  beside it: " + ", ".join(f"{label} {_seconds(ns)}" for ns, label in beside if ns))
        if self.commands:
            used = sorted(self.commands.items(), key=lambda item: -item[1].ns)
            lines.append(
                "  requests: " + ", ".join(f"{name} {stat.count} in {_seconds(stat.ns)}" for name, stat in used)
            )
        return lines

    def _kernel(self) -> str:
        if not self.busy_ns:
            return ""
        closed, full = _seconds(self.peer_limited_ns), _seconds(self.buffer_limited_ns)
        return f" (the server's window was closed for {closed}, the send buffer too small for {full})"

    def _shares(self) -> dict[str, int]:
        if self.side == "server":
            return {
                "client-bound": self.wait_ns + self.gap_ns,
                "source-bound": self.read_ns,
                "hash-bound": self.hash_ns,
                "wire-bound": self.wire_ns,
                "server-bound": self.staging_ns + self.ask_ns,
            }
        # While its window was closed, the server blocked the sends. On RDMA nobody knows, and it counts as the wire.
        by_server = min(self.blocked_ns, self.peer_limited_ns)
        return {
            "source-bound": self.read_ns + self.gap_ns,
            "hash-bound": self.hash_ns,
            "wire-bound": self.wire_ns + self.staging_ns + self.blocked_ns - by_server,
            "server-bound": self.ask_ns + self.wait_ns - self.blocked_ns + by_server,
        }


_LABELS: Final[Mapping[str, Mapping[str, str]]] = {
    "client": {
        "read": "reading",
        "hash": "hashing",
        "ask": "asking the cache",
        "staging": "copying",
        "wire": "sending",
        "wait": "waiting for the server",
        "gap": "gaps",
    },
    "server": {
        "read": "reading the cache",
        "hash": "hashing",
        "ask": "looking up",
        "staging": "copying and storing",
        "wire": "receiving",
        "wait": "waiting for bytes",
        "gap": "waiting for requests",
    },
}

_WORDS: Final[Mapping[tuple[str, str], str]] = {
    ("client", "source-bound"): "the time went on this side, before sending: reading the model, and gaps",
    ("client", "hash-bound"): "the time went on hashing large tensors",
    ("client", "wire-bound"): "the time went on moving bytes",
    ("client", "server-bound"): "the time went on waiting for the server",
    ("server", "client-bound"): "the time went on waiting for the client, or for the network",
    ("server", "source-bound"): "the time went on reading entries of the cache",
    ("server", "hash-bound"): "the time went on hashing",
    ("server", "wire-bound"): "the time went on taking bytes from the transport",
    ("server", "server-bound"): "the time went on what this server does with the bytes",
}


def _less(now: Mapping[str, CommandStat], then: Mapping[str, CommandStat]) -> Mapping[str, CommandStat]:
    none = CommandStat(0, 0)
    left = {
        name: CommandStat(stat.count - then.get(name, none).count, stat.ns - then.get(name, none).ns)
        for name, stat in now.items()
    }
    return {name: stat for name, stat in left.items() if stat.count}


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3f} s" if ns >= 1_000_000 else f"{ns / 1e3:.0f} us"


def _amount(nbytes: int) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / _GIB:.2f} GiB"
    return f"{nbytes / (1 << 20):.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"


def _rate(nbytes: int, ns: int) -> str:
    rate = nbytes / _GIB / (ns / 1e9) if ns else 0.0
    return f", {rate:.2f} GiB/s" if rate >= 0.01 else ""
