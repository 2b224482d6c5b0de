"""``weightwire warm``: a model into the tensor caches of servers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from weightwire.cli.failures import FAILED, as_usage
from weightwire.cli.options import (
    check_protocol,
    drop_behind,
    endpoints,
    help_,
    include_each,
    json_output,
    layers_each,
    no_index,
    no_mmap,
    optimized,
    profile,
    protocol,
    quiet,
    targets_of,
    threads,
    timeout,
    transport,
)
from weightwire.cli.output import line, note, object_, printable
from weightwire.cli.progress import Progress, choose_display
from weightwire.cli.report import say_all, warm_lines, warm_object
from weightwire.config import ClientConfig

if TYPE_CHECKING:
    from weightwire.client import Warmed

__all__ = ["warm"]


@click.command(add_help_option=False)
@click.argument("model", metavar="MODEL")
@endpoints
@include_each
@layers_each
@drop_behind
@no_mmap
@threads
@no_index
@timeout
@protocol
@transport
@profile
@optimized
@json_output
@quiet
@help_
def warm(
    model: str,
    endpoints: tuple[str, ...],
    include: tuple[str, ...],
    layers: tuple[str, ...],
    drop_behind: bool,
    no_mmap: bool,
    threads: int | None,
    no_index: bool,
    timeout: float | None,
    protocol: str | None,
    transport: str | None,
    show_profile: bool,
    optimized: bool | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Fill the tensor cache of the server at HOST:PORT, or of several, with the tensors of MODEL over 10 MiB.

    The next load of the model there comes from the server's disk, also one by llama.cpp itself. The server needs a
    cache (stock ones are started with -c) and memory for the largest tensor; it is free again at once.
    """
    from weightwire.client import warm as warm_caches
    from weightwire.client.fanout import chosen_for
    from weightwire.client.hashes import is_cached
    from weightwire.model import open_model

    config = ClientConfig.resolve(
        timeout=timeout,
        protocol=protocol,
        transport=transport,
        optimized=optimized,
        settings=("timeout", "protocol", "transport", "optimized"),
    )
    check_protocol(config.protocol, "WEIGHTWIRE_PROTOCOL")
    targets = targets_of(endpoints, include, layers)
    with as_usage():
        opened = open_model(model)
    with opened:
        with as_usage():
            # Before a server hears of it.
            total = sum(t.nbytes for target in targets for t in chosen_for(opened, target) if is_cached(t))
        started = time.monotonic()
        with Progress("warming", total, choose_display(quiet)) as progress:
            warmed = warm_caches(
                opened,
                targets,
                progress=progress.report,
                threads=threads,
                index=False if no_index else None,
                drop_behind=drop_behind,
                read="read" if no_mmap else "auto",
                timeout=config.timeout,
                protocol=config.protocol,
                transport=config.transport,
                profile=show_profile or None,
                optimized=config.optimized,
            )
        seconds = time.monotonic() - started
    if len(warmed) == 1:
        error = warmed[0].error
        if error is not None:
            raise error
    code = FAILED if any(each.summary is not None and each.summary.too_large for each in warmed) else 0
    reports = [_report(each, as_json) for each in warmed]
    if len(warmed) > 1:
        return max(code, say_all(reports, [target.endpoint for target in targets], seconds, json=as_json))
    if as_json:
        assert not isinstance(reports[0], Exception)
        object_(reports[0])
    return code


def _report(warmed: Warmed, as_json: bool) -> dict[str, Any] | Exception:
    if warmed.error is not None:
        return warmed.error
    assert warmed.summary is not None
    for name in warmed.summary.too_large:
        note(
            f"weightwire: {warmed.endpoint}: tensor {printable(repr(name))} is longer than the server's largest "
            "buffer, and was left out"
        )
    if not as_json:
        for text in warm_lines(warmed, warmed.summary):
            line(text)
    return warm_object(warmed, warmed.summary)
