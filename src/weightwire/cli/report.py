"""What a push or a warming did, as an object and as lines; ``push`` and ``demo`` say it alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightwire.cli.failures import as_failure, error_facts, say
from weightwire.cli.output import counted, gib_per_second, human_bytes, object_, printable

if TYPE_CHECKING:
    from weightwire.client import Connection, PushSummary, Warmed, WarmSummary

__all__ = ["carrier", "push_lines", "push_object", "say_all", "version", "warm_lines", "warm_object"]


def push_object(connection: Connection, summary: PushSummary) -> dict[str, Any]:
    """The object that ``push --json`` writes.

    ``seconds`` is all of it; ``gib_per_s`` is the tensors' bytes, sent or already there, by the time without verifying,
    which took ``verify_seconds``.
    """
    return _object(
        connection,
        connection.dialect.text,
        connection.transport,
        summary,
        _pushing(summary),
        verified=summary.verified,
        verify_seconds=round(summary.verify_seconds, 6),
    )


def push_lines(connection: Connection, summary: PushSummary) -> list[str]:
    """The same for people."""
    protocol = version(connection.protocol, connection.dialect.text)
    where = f"{connection.endpoint} ({protocol}, {carrier(connection)})"
    seconds = _pushing(summary)
    lines = [
        f"pushed {counted(summary.tensors, 'tensor', 'tensors')}, {human_bytes(summary.bytes)}, to {printable(where)}",
        f"in {seconds:.2f} s, {gib_per_second(summary.bytes, seconds):.2f} GiB/s; {human_bytes(summary.sent)} sent",
    ]
    lines += _why_tcp(connection.transport)
    lines += _cache_lines(summary)
    if summary.verified:
        lines.append(f"every byte verified, in {summary.verify_seconds:.2f} s")
    return lines


def warm_object(warmed: Warmed, summary: WarmSummary) -> dict[str, Any]:
    """The object that ``warm --json`` writes. ``gib_per_s`` is the tensors' bytes, sent or there, by the time."""
    return _object(
        warmed, warmed.spoken, warmed.transport or {}, summary, summary.seconds, too_large=list(summary.too_large)
    )


def warm_lines(warmed: Warmed, summary: WarmSummary) -> list[str]:
    """The same for people."""
    protocol = version(str(warmed.protocol), str(warmed.spoken))
    where = printable(f"{warmed.endpoint} ({protocol}, {_carrier(warmed.transport or {})})")
    if not summary.tensors:
        return [f"nothing to warm at {where}: no tensor has more than 10 MiB, and only those are cached"]
    there = summary.tensors - len(summary.too_large)
    lines = [
        f"warmed {where}: {counted(there, 'tensor', 'tensors')} of {human_bytes(summary.bytes)} "
        f"{'is' if there == 1 else 'are'} in its cache"
        if not summary.too_large
        else f"warmed {where}: {there} of {counted(summary.tensors, 'tensor', 'tensors')} "
        f"{'is' if there == 1 else 'are'} in its cache",
        f"in {summary.seconds:.2f} s; {counted(summary.hits, 'was', 'were')} there already, "
        f"{human_bytes(summary.sent)} sent",
    ]
    if summary.corrupt_hits:
        lines.append(
            f"{counted(summary.corrupt_hits, 'entry was', 'entries were')} damaged or cut short, and sent anew"
        )
    return lines + _why_tcp(warmed.transport or {})


def say_all(
    reports: Sequence[Mapping[str, Any] | Exception], endpoints: Sequence[str], seconds: float, *, json: bool
) -> int:
    """Report each server's failure on stderr, and with ``json`` one object of all on stdout: ``endpoints`` has each
    one's own object (of a failure ``endpoint`` and ``error``), ``totals`` the sums. Returns the worst exit code.
    """
    code = 0
    objects: list[Mapping[str, Any]] = []
    for report, endpoint in zip(reports, endpoints, strict=True):
        if isinstance(report, Exception):
            code = max(code, say(report, json=False))
            objects.append({"endpoint": endpoint, "error": error_facts(as_failure(report))})
        else:
            objects.append(report)
    if json:
        done = [report for report in reports if not isinstance(report, Exception)]
        names = ("tensors", "bytes", "sent", "hits", "misses", "corrupt_hits")
        totals: dict[str, Any] = {name: sum(report[name] for report in done) for name in names}
        totals |= {
            "failed": len(reports) - len(done),
            "seconds": round(seconds, 6),
            "gib_per_s": gib_per_second(totals["bytes"], seconds),
        }
        object_({"endpoints": objects, "totals": totals})
    return code


def _object(
    server: Connection | Warmed,
    spoken: str | None,
    transport: Mapping[str, object],
    summary: PushSummary | WarmSummary,
    moving: float,
    **own: object,
) -> dict[str, Any]:
    """What both objects have, and what is one's ``own``. ``moving`` are the seconds in which the bytes were moved."""
    return {
        "endpoint": server.endpoint,
        "protocol": server.protocol,
        "spoken": spoken,
        "transport": dict(transport),
        "optimized": server.optimized,
        "tensors": summary.tensors,
        "bytes": summary.bytes,
        "sent": summary.sent,
        "hits": summary.hits,
        "misses": summary.misses,
        "corrupt_hits": summary.corrupt_hits,
        **own,
        "hashes_known": summary.hashes_known,
        "threads": summary.threads,
        "seconds": round(summary.seconds, 6),
        "gib_per_s": gib_per_second(summary.bytes, moving),
        "profile": summary.profile.as_dict(),
    }


def version(announced: str, spoken: str) -> str:
    """What a server announced, and what was spoken to it instead, if that was another one."""
    other = spoken.split(".")[0] != announced.split(".")[0]
    return f"protocol {announced}" + (f", spoken as {spoken}" if other else "")


def carrier(connection: Connection) -> str:
    """What carries the bytes, in few words: ``"tcp"``, ``"rdma on rxe0"``."""
    return _carrier(connection.transport)


def _carrier(transport: Mapping[str, object]) -> str:
    kind, device = transport["kind"], transport["device"]
    return str(kind) if device is None else f"{kind} on {device}"


def _why_tcp(transport: Mapping[str, object]) -> list[str]:
    return [printable(f"over tcp: {transport['reason']}")] if transport.get("kind") == "tcp" else []


def _cache_lines(summary: PushSummary) -> list[str]:
    if not (summary.hits or summary.misses or summary.corrupt_hits):
        return []
    text = f"server's cache: {counted(summary.hits, 'hit', 'hits')}, {counted(summary.misses, 'miss', 'misses')}"
    if summary.corrupt_hits:
        text += f", {summary.corrupt_hits} filled wrongly and sent instead"
    return [text]


def _pushing(summary: PushSummary) -> float:
    """Seconds without reading back and comparing."""
    return max(summary.seconds - summary.verify_seconds, 0.0)
