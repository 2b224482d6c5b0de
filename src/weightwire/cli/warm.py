"""``weightwire warm``: a model into the tensor caches of servers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from weightwire.cli.failures import FAILED, as_usage
from weightwire.cli.options import Sending, connecting, include_each, layers_each, sending, targets_of
from weightwire.cli.output import line, note, object_, printable
from weightwire.cli.progress import Progress, choose_display
from weightwire.cli.report import say_all, warm_lines, warm_object

if TYPE_CHECKING:
    from weightwire.client import Warmed

__all__ = ["warm"]


@click.command(add_help_option=False)
@include_each
@layers_each
@sending
def warm(told: Sending, include: tuple[str, ...], layers: tuple[str, ...]) -> int:
    """Fill the tensor cache of the server at HOST:PORT, or of several, with the tensors of MODEL over 10 MiB.

    The next load of the model there comes from the server's disk, also one by llama.cpp itself. The server needs a
    cache (stock ones are started with -c) and memory for the largest tensor; it is free again at once.
    """
    from weightwire.client import warm as warm_caches
    from weightwire.client.fanout import chosen_for
    from weightwire.client.hashes import is_cached
    from weightwire.model import open_model

    config = told.config()
    targets = targets_of(told.endpoints, include, layers)
    with as_usage():
        opened = open_model(told.model)
    with opened:
        with as_usage():
            # Before a server hears of it.
            total = sum(t.nbytes for target in targets for t in chosen_for(opened, target) if is_cached(t))
        started = time.monotonic()
        with Progress("warming", total, choose_display(told.quiet)) as progress:
            warmed = warm_caches(
                opened,
                targets,
                progress=progress.report,
                profile=told.show_profile or None,
                **told.reading(),
                **connecting(config),
            )
        seconds = time.monotonic() - started
    if len(warmed) == 1:
        error = warmed[0].error
        if error is not None:
            raise error
    code = FAILED if any(each.summary is not None and each.summary.too_large for each in warmed) else 0
    reports = [_report(each, told.as_json) for each in warmed]
    if len(warmed) > 1:
        return max(code, say_all(reports, [target.endpoint for target in targets], seconds, json=told.as_json))
    if told.as_json:
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
