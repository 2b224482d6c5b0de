"""``weightwire bench``: what a server and the way to it are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from weightwire.cli.options import (
    SECONDS,
    SIZE,
    WholeNumber,
    check_protocol,
    help_,
    json_output,
    optimized,
    protocol,
    quiet,
    timeout,
    transport,
)
from weightwire.cli.output import counted, human_bytes, line, note, object_, printable
from weightwire.cli.progress import Progress, choose_display
from weightwire.cli.report import carrier
from weightwire.config import ClientConfig

if TYPE_CHECKING:
    from weightwire.client import BenchResult, BenchTransfer, Connection

__all__ = ["bench"]

_KINDS = ("mix", "large", "small")


@click.command(add_help_option=False)
@click.argument("endpoint", metavar="HOST:PORT")
@click.option(
    "--size",
    type=SIZE,
    metavar="SIZE",
    default="1GiB",
    help="Bytes of each upload; at most half of what the server has free. [default: 1GiB]",
)
@click.option(
    "--seconds",
    type=SECONDS,
    metavar="S",
    help="Begin rounds for so long; the last one is finished, and there is one at least. [default: 10]",
)
@click.option("--rounds", type=WholeNumber(1, 10_000), metavar="N", help="Make so many rounds instead.")
@click.option(
    "--tensors",
    type=click.Choice(_KINDS),
    multiple=True,
    help="What to upload: mix has a 27B model's proportions, large is 64 MiB each, small 4 KiB. Can be given several "
    "times. [default: all]",
)
@timeout
@protocol
@transport
@optimized
@json_output
@quiet
@help_
def bench(
    endpoint: str,
    size: int,
    seconds: float | None,
    rounds: int | None,
    tensors: tuple[str, ...],
    timeout: float | None,
    protocol: str | None,
    transport: str | None,
    optimized: bool | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure the server at HOST:PORT and the way to it, like iperf, for weights.

    Round trips, uploads of generated tensors, reading them back and, if the server keeps a cache, questions to it. What
    it allocates there is freed, and nothing is put into its cache. The server should have nothing else to do.
    """
    from weightwire.client import bench as measure
    from weightwire.client.connection import connect_measured

    if rounds is not None and seconds is not None:
        raise click.UsageError("--rounds and --seconds cannot be given together")
    config = ClientConfig.resolve(
        timeout=timeout,
        protocol=protocol,
        transport=transport,
        optimized=optimized,
        settings=("timeout", "protocol", "transport", "optimized"),
    )
    check_protocol(config.protocol, "WEIGHTWIRE_PROTOCOL")
    with (
        connect_measured(
            endpoint,
            timeout=config.timeout,
            protocol=config.protocol,
            transport=config.transport,
            optimized=config.optimized,
        ) as connection,
        Progress("measuring", 0, choose_display(quiet)),
    ):
        result = measure(
            connection,
            nbytes=size,
            rounds=rounds,
            seconds=10.0 if seconds is None else seconds,
            tensors=tensors or _KINDS,
        )
    if result.bytes < size:
        note(
            f"weightwire: the server has {human_bytes(result.free)} free, so uploads are of "
            f"{human_bytes(result.bytes)} instead of {human_bytes(size)}"
        )
    if as_json:
        about = {
            "endpoint": connection.endpoint,
            "protocol": connection.protocol,
            "optimized": connection.optimized,
            "transport": dict(connection.transport),
        }
        object_(about | result.as_dict())
        return
    for text in _lines(connection, result):
        line(text)


def _lines(connection: Connection, result: BenchResult) -> list[str]:
    way = "" if connection.optimized else ", the plain way"
    where = printable(f"{connection.endpoint} (protocol {connection.protocol}, {carrier(connection)}{way})")
    lines = [
        f"measured {where}: {counted(result.rounds, 'round', 'rounds')}, medians (and quartiles)",
        f"round trip  {result.latency.median * 1e3:.3f} ms, 99 of 100 within {result.latency.p99 * 1e3:.3f} ms",
    ]
    for kind, transfer in result.uploads.items():
        lines.append(f"{kind:<10}  {_speed(transfer)}, {_what(transfer)}")
    lines.append(f"{'download':<10}  {_speed(result.download)}, of what {result.download.kind} has sent")
    if result.questions is None:
        lines.append("cache       not asked: the server has none, or is a stock server, which cannot say")
    else:
        lines.append(f"cache       {result.questions.count / result.questions.seconds:,.0f} questions/s")
    return lines


def _speed(transfer: BenchTransfer) -> str:
    low, high = transfer.quartiles
    if transfer.kind == "small":
        slow, median, fast = (transfer.tensors / took for took in (high, transfer.median, low))
        return f"{median:,.0f} tensors/s ({slow:,.0f} – {fast:,.0f})"
    slow, median, fast = (transfer.bytes / took / 2**30 for took in (high, transfer.median, low))
    return f"{median:.2f} GiB/s ({slow:.2f} – {fast:.2f})"


def _what(transfer: BenchTransfer) -> str:
    count, size = transfer.tensors, human_bytes(transfer.bytes)
    return f"{size} in {counted(count, 'tensor', 'tensors')} of at most {human_bytes(transfer.largest)}"
