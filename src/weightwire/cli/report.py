"""What a push did, as an object and as lines; ``push`` and ``demo`` say it alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightwire.cli.output import gib_per_second, human_bytes, printable

if TYPE_CHECKING:
    from weightwire.client import Connection, PushSummary

__all__ = ["carrier", "push_lines", "push_object"]


def push_object(connection: Connection, summary: PushSummary) -> dict[str, Any]:
    """The object that ``push --json`` writes.

    ``seconds`` is all of it; ``gib_per_s`` is the tensors' bytes, sent or already there, by the time without verifying.
    """
    return {
        "endpoint": connection.endpoint,
        "protocol": connection.protocol,
        "transport": dict(connection.transport),
        "tensors": summary.tensors,
        "bytes": summary.bytes,
        "sent": summary.sent,
        "hits": summary.hits,
        "misses": summary.misses,
        "verified": summary.verified,
        "seconds": round(summary.seconds, 6),
        "gib_per_s": gib_per_second(summary.bytes, _pushing(summary)),
        "profile": summary.profile.as_dict(),
    }


def push_lines(connection: Connection, summary: PushSummary) -> list[str]:
    """The same for people."""
    where = f"{connection.endpoint} (protocol {connection.protocol}, {carrier(connection)})"
    seconds = _pushing(summary)
    lines = [
        f"pushed {summary.tensors} tensors, {human_bytes(summary.bytes)}, to {printable(where)}",
        f"in {seconds:.2f} s, {gib_per_second(summary.bytes, seconds):.2f} GiB/s; {human_bytes(summary.sent)} sent",
    ]
    if summary.hits or summary.misses:
        lines.append(f"server's cache: {summary.hits} hits, {summary.misses} misses")
    if summary.verified:
        lines.append(f"every byte verified, in {summary.profile.verify_ns / 1e9:.2f} s")
    return lines


def carrier(connection: Connection) -> str:
    """What carries the bytes, in few words: ``"tcp"``, ``"rdma on rxe0"``."""
    kind, device = connection.transport["kind"], connection.transport["device"]
    return str(kind) if device is None else f"{kind} on {device}"


def _pushing(summary: PushSummary) -> float:
    """Seconds without reading back and comparing."""
    return max(summary.seconds - summary.profile.verify_ns / 1e9, 0.0)
