"""``weightwire push``: a model to a server."""

from __future__ import annotations

import click

from weightwire.cli.failures import as_usage
from weightwire.cli.options import check_protocol, help_, include, json_output, protocol, quiet, timeout, transport
from weightwire.cli.output import line, object_
from weightwire.cli.progress import Progress, choose_display
from weightwire.cli.report import push_lines, push_object
from weightwire.config import CACHE_MODES, ClientConfig

__all__ = ["push"]


@click.command(add_help_option=False)
@click.argument("model", metavar="MODEL")
@click.argument("endpoint", metavar="HOST:PORT")
@click.option(
    "--cache",
    type=click.Choice(CACHE_MODES),
    help="Ask the server's tensor cache first: auto does if the server says it has one, always is for stock servers "
    "started with -c, which cannot say. [WEIGHTWIRE_CACHE; default: auto]",
)
@include
@click.option("--verify", is_flag=True, help="Read every tensor back and compare.")
@timeout
@protocol
@transport
@json_output
@quiet
@help_
def push(
    model: str,
    endpoint: str,
    cache: str | None,
    include: str | None,
    verify: bool,
    timeout: float | None,
    protocol: str | None,
    transport: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Push the tensors of MODEL to the server at HOST:PORT.

    MODEL is a GGUF or safetensors file, any file of a split one, or a folder with one model in it. It is checked before
    anything is sent.

    Unless the server retains tensors, they last as long as this command's connection; what lasts is its cache.
    """
    from weightwire.client import connect
    from weightwire.client.plan import compile_include, select
    from weightwire.model import open_model

    config = ClientConfig.resolve(timeout=timeout, protocol=protocol, cache=cache, transport=transport)
    check_protocol(config.protocol, "WEIGHTWIRE_PROTOCOL")
    with as_usage():
        opened = open_model(model)
    with opened:
        with as_usage():
            # Before a server hears of it.
            total = sum(tensor.nbytes for tensor in select(opened, compile_include(include)))
        with connect(
            endpoint, timeout=config.timeout, protocol=config.protocol, transport=config.transport
        ) as connection:
            then = "verifying" if verify else ""
            with Progress("pushing", total, choose_display(quiet), then=then) as progress:
                result = connection.push(
                    opened, cache=config.cache, verify=verify, include=include, progress=progress.report
                )
            if as_json:
                object_(push_object(connection, result.summary))
            else:
                for text in push_lines(connection, result.summary):
                    line(text)
