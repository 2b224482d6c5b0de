"""``weightwire seed``: a model into the cache directory of a server on this machine."""

from __future__ import annotations

from dataclasses import asdict

import click

from weightwire.cli.caches import cache_dir, cache_path, threads
from weightwire.cli.failures import as_usage
from weightwire.cli.options import help_, include, json_output, quiet
from weightwire.cli.output import counted, gib_per_second, human_bytes, line, object_, printable
from weightwire.cli.progress import Progress, choose_display
from weightwire.cli.signals import raising_on_signals

__all__ = ["seed"]


@click.command(add_help_option=False)
@click.argument("model", metavar="MODEL")
@cache_dir
@include
@click.option("--verify", is_flag=True, help="Read entries that are there already, too, and replace damaged ones.")
@threads
@json_output
@quiet
@help_
def seed(
    model: str,
    cache: str | None,
    include: str | None,
    verify: bool,
    threads: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Fill a server's tensor cache from MODEL, a copy on the same machine: no server is needed, and no network.

    Every tensor over 10 MiB becomes an entry, as if a client had sent it. A stock server started with -c finds them in
    the default directory, at once and without a restart.
    """
    from weightwire.cache import seed as seed_cache
    from weightwire.model import open_model

    directory = cache_path(cache)
    with as_usage():
        opened = open_model(model)
    with (
        opened,
        raising_on_signals(),
        Progress("seeding", opened.nbytes, choose_display(quiet)) as progress,
    ):
        result = seed_cache(
            opened, directory, include=include, threads=threads, verify=verify, progress=progress.report
        )
    if as_json:
        object_(
            {"model": model}
            | asdict(result)
            | {"seconds": round(result.seconds, 6), "gib_per_s": gib_per_second(result.bytes, result.seconds)}
        )
        return
    line(
        f"{printable(model)}: {counted(result.tensors, 'tensor', 'tensors')} over 10 MiB, {human_bytes(result.bytes)}, "
        f"for {printable(result.directory)}"
    )
    line(
        f"in {result.seconds:.2f} s: {counted(result.written, 'entry', 'entries')} written, "
        + human_bytes(result.written_bytes)
        + (f", {human_bytes(result.cloned_bytes)} of them shared with the model" if result.cloned_bytes else "")
        + (f"; {counted(result.duplicates, 'is', 'are')} equal to another tensor" if result.duplicates else "")
    )
    if result.replaced:
        line(f"{result.replaced} of them replaced a damaged entry")
    if result.present:
        unread = "; by name and size, --verify reads them" if result.unread else "; read, and sound"
        line(f"{counted(result.present, 'entry was', 'entries were')} there already{unread}")
