"""What a server has done, in numbers: kept by each session for itself, and added up when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from weightwire.cache.saving import Saver
from weightwire.cache.store import TensorCache
from weightwire.server.capacity import Capacity
from weightwire.server.served import Registry

__all__ = ["Counts", "Ledger", "ServerStats", "TransportStats"]


@dataclass(frozen=True, slots=True)
class TransportStats:
    """What has been carried by one transport.

    ``open_connections`` are connected now, ``connections`` have been in all: clients that have said HELLO, and for RDMA
    have been heard there. ``bytes_received`` and ``bytes_sent`` are everything on the wire above TCP or the queue pair,
    payload and framing; the HELLO of a connection that moves to RDMA is TCP's.
    """

    open_connections: int = 0
    connections: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0


@dataclass(frozen=True, slots=True)
class ServerStats:
    """A server at one moment. What is not said to be so *now* counts from `Server.start` on and never falls, whoever
    leaves.

    ``uptime``: seconds from `Server.start` until now, or until it was closed.

    ``connections_open`` are served now, ``connections_waiting`` wait now for a place; ``connections_accepted`` have
    been given one, ``connections_refused`` were turned away because the server was full, ``connections_failed`` ended
    otherwise than by the client's leaving between two requests or by `Server.close` (or could not be given a thread).
    Of the failed, ``bad_requests`` asked for what cannot be had (a buffer that is none, bytes outside a tensor, a
    computation), ``protocol_errors`` broke the form (no HELLO, or none in time; an unknown command; a wrong length).
    ``tcp`` and ``rdma`` tell transports apart; `bytes_received` and `bytes_sent` are the sums.

    ``tensors_completed`` have arrived to their last byte, ``tensors_retained`` are in `Server.tensors` now (each of
    several with one name). ``bytes_allocated`` of ``bytes_limit`` (whole pages) are given out now;
    ``rdma_pinned_bytes`` are pinned now for the rings of RDMA connections, beside that limit.

    ``cache_hits`` and ``cache_misses`` are the answers to SET_TENSOR_HASH (docs/protocol.md, section 5): "filled" and
    "send it"; ``cache_filled_bytes`` is what the hits filled. ``cache_corrupt`` entries were found bad and moved to
    quarantine, by whoever uses the same `TensorCache`. ``cache_saved`` entries were stored, ``cache_save_failures``
    could not be (the disk is full or too slow, or was not waited for at `Server.close`), ``cache_pending`` are on
    their way now. What the cache had already counts as neither.
    """

    uptime: float = 0.0
    connections_open: int = 0
    connections_waiting: int = 0
    connections_accepted: int = 0
    connections_refused: int = 0
    connections_failed: int = 0
    bad_requests: int = 0
    protocol_errors: int = 0
    tcp: TransportStats = TransportStats()
    rdma: TransportStats = TransportStats()
    tensors_completed: int = 0
    tensors_retained: int = 0
    bytes_allocated: int = 0
    bytes_limit: int = 0
    rdma_pinned_bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_filled_bytes: int = 0
    cache_corrupt: int = 0
    cache_saved: int = 0
    cache_save_failures: int = 0
    cache_pending: int = 0

    @property
    def bytes_received(self) -> int:
        """Bytes from all clients, payload and framing."""
        return self.tcp.bytes_received + self.rdma.bytes_received

    @property
    def bytes_sent(self) -> int:
        """Bytes to all clients, payload and framing."""
        return self.tcp.bytes_sent + self.rdma.bytes_sent

    def as_dict(self) -> dict[str, Any]:
        """Every number by its name, the sums included; ``tcp`` and ``rdma`` are mappings."""
        return {**asdict(self), "bytes_received": self.bytes_received, "bytes_sent": self.bytes_sent}


@dataclass(slots=True)
class Counts:
    """What one session, or all that have ended, did."""

    tcp: int = 0
    rdma: int = 0
    tcp_received: int = 0
    tcp_sent: int = 0
    rdma_received: int = 0
    rdma_sent: int = 0
    failed: int = 0
    bad_requests: int = 0
    protocol_errors: int = 0
    completed: int = 0
    hits: int = 0
    misses: int = 0
    filled: int = 0
    pinned: int = 0

    def add(self, other: Counts) -> Self:
        """Add every number of ``other``."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


class Ledger:
    """A server's own numbers, and those of the sessions that have ended. All but `end` with the server's lock held."""

    def __init__(self) -> None:
        self.accepted = 0
        self.refused = 0
        self.failed = 0
        self._past = Counts()
        self._began: float | None = None
        self._ended: float | None = None
        self._corrupt_before = 0

    def begin(self, cache: TensorCache | None) -> None:
        """The server starts."""
        self._began = time.monotonic()
        self._corrupt_before = cache.quarantined if cache is not None else 0

    def end(self) -> None:
        """The server has ended."""
        self._ended = time.monotonic()

    def close(self, counts: Counts) -> None:
        """A session has ended and will not be counted again."""
        self._past.add(counts)

    def snapshot(
        self,
        *,
        live: Iterable[Counts],
        waiting: int,
        registry: Registry,
        capacity: Capacity | None,
        cache: TensorCache | None,
        saver: Saver | None,
    ) -> ServerStats:
        """Everything at this moment."""
        now, connected = Counts(), 0
        for counts in live:
            now.add(counts)
            connected += 1
        total = Counts().add(self._past).add(now)
        uptime = 0.0
        if self._began is not None:
            uptime = (self._ended if self._ended is not None else time.monotonic()) - self._began
        limit, free = (capacity.total, capacity.free) if capacity is not None else (0, 0)
        saved, lost, pending = saver.counts() if saver is not None else (0, 0, 0)
        return ServerStats(
            uptime=uptime,
            connections_open=connected,
            connections_waiting=waiting,
            connections_accepted=self.accepted,
            connections_refused=self.refused,
            connections_failed=self.failed + total.failed,
            bad_requests=total.bad_requests,
            protocol_errors=total.protocol_errors,
            tcp=TransportStats(now.tcp, total.tcp, total.tcp_received, total.tcp_sent),
            rdma=TransportStats(now.rdma, total.rdma, total.rdma_received, total.rdma_sent),
            tensors_completed=total.completed,
            tensors_retained=registry.count,
            bytes_allocated=limit - free,
            bytes_limit=limit,
            rdma_pinned_bytes=now.pinned,
            cache_hits=total.hits,
            cache_misses=total.misses,
            cache_filled_bytes=total.filled,
            cache_corrupt=cache.quarantined - self._corrupt_before if cache is not None else 0,
            cache_saved=saved,
            cache_save_failures=lost,
            cache_pending=pending,
        )
