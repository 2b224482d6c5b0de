"""``weightwire push``: a model to a server, or to several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from weightwire.cli.failures import as_usage
from weightwire.cli.options import Sending, connecting, include_each, layers_each, sending, targets_of
from weightwire.cli.output import line, object_
from weightwire.cli.progress import Progress, choose_display
from weightwire.cli.report import push_lines, push_object, say_all
from weightwire.config import CACHE_MODES, LoadConfig, profile_wanted

if TYPE_CHECKING:
    from weightwire.client import Pushed, Target
    from weightwire.model import Model

__all__ = ["push"]


@click.command(add_help_option=False)
@click.option(
    "--cache",
    type=click.Choice(CACHE_MODES),
    help="Ask the server's tensor cache first: auto does if the server says it has one, always is for stock servers "
    "started with -c, which cannot say. [WEIGHTWIRE_CACHE; default: auto]",
)
@include_each
@layers_each
@click.option("--verify", is_flag=True, help="Read every tensor back and compare.")
@click.option(
    "--probe/--no-probe",
    default=None,
    help="After a hit of the server's cache see whether it has filled the tensor's ends, too. [default: with --cache "
    "always]",
)
@sending
def push(
    told: Sending,
    cache: str | None,
    include: tuple[str, ...],
    layers: tuple[str, ...],
    verify: bool,
    probe: bool | None,
) -> int:
    """Push the tensors of MODEL to the server at HOST:PORT, or to several servers at once.

    MODEL is a GGUF or safetensors file, any file of a split one, or a folder with one model in it. It is checked before
    anything is sent. With several servers each tensor is hashed once for all of them, and one that fails does not
    stop the others.

    Unless the server retains tensors, they last as long as this command's connection; what lasts is its cache.
    """
    from weightwire.client.fanout import chosen_for
    from weightwire.model import open_model

    config = told.config(cache=cache)
    wanted = profile_wanted(told.show_profile or None)
    LoadConfig.resolve(threads=told.threads)  # a variable that cannot be used is heard of before a server is
    targets = targets_of(told.endpoints, include, layers)
    options = {"cache": config.cache, "verify": verify, "probe": probe, **told.reading()}
    with as_usage():
        opened = open_model(told.model)
    with opened:
        with as_usage():
            # Before a server hears of it.
            totals = [sum(tensor.nbytes for tensor in chosen_for(opened, target)) for target in targets]
        to = {"profile": wanted, **connecting(config)}
        if len(targets) > 1:
            return _push_to_all(told, opened, targets, sum(totals), to, options)
        _push_to_one(told, opened, targets[0], totals[0], to, options)
        return 0


def _push_to_one(
    told: Sending, model: Model, target: Target, total: int, to: dict[str, Any], options: dict[str, Any]
) -> None:
    from weightwire.client import connect

    with connect(target.endpoint, **to) as connection:
        then = "verifying" if options["verify"] else ""
        with Progress("pushing", total, choose_display(told.quiet), then=then) as progress:
            result = connection.push(
                model, include=target.include, layers=target.layers, progress=progress.report, **options
            )
        if told.as_json:
            object_(push_object(connection, result.summary))
        else:
            for text in push_lines(connection, result.summary):
                line(text)


def _push_to_all(
    told: Sending, model: Model, targets: Sequence[Target], total: int, to: dict[str, Any], options: dict[str, Any]
) -> int:
    from weightwire.client import push_all

    label = "pushing and verifying" if options["verify"] else "pushing"
    started = time.monotonic()
    with Progress(label, total, choose_display(told.quiet)) as progress:
        pushed = push_all(model, targets, progress=progress.report, **to, **options)
    seconds = time.monotonic() - started
    with pushed:
        reports = [_report(each, told.as_json) for each in pushed]
        return say_all(reports, [target.endpoint for target in targets], seconds, json=told.as_json)


def _report(pushed: Pushed, as_json: bool) -> dict[str, Any] | Exception:
    if pushed.error is not None:
        return pushed.error
    assert pushed.connection is not None
    assert pushed.result is not None
    if not as_json:
        for text in push_lines(pushed.connection, pushed.result.summary):
            line(text)
    return push_object(pushed.connection, pushed.result.summary)
