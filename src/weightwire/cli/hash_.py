"""``weightwire hash``: the names a tensor cache files a model's tensors under."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from weightwire.cli.failures import as_usage
from weightwire.cli.options import help_, include, json_output, quiet
from weightwire.cli.output import line, object_, printable
from weightwire.cli.progress import Progress, choose_display
from weightwire.errors import ConfigError

if TYPE_CHECKING:
    from weightwire.model import ModelTensor

__all__ = ["hash_"]

GROUP = 4  # as many as are hashed side by side for little more than the price of one


@click.command("hash", add_help_option=False)
@click.argument("model", metavar="MODEL")
@include
@json_output
@quiet
@help_
def hash_(model: str, include: str | None, as_json: bool, quiet: bool) -> None:
    """Print the FNV-1a 64 hash, the bytes and the name of every tensor of MODEL, one per line.

    The hash is 16 hexadecimal digits: the name of the file in which a server's tensor cache keeps those bytes.
    """
    from weightwire.model import open_model
    from weightwire.model.choosing import compile_include

    pattern = compile_include(include)
    with as_usage():
        opened = open_model(model)
    with opened:
        tensors = [t for t in opened.tensors.values() if pattern is None or pattern.search(t.name)]
        if not tensors and opened.tensors:
            raise ConfigError(
                f"--include: no tensor of {model} has {include!r} in its name",
                hint="weightwire info lists the names",
            )
        # The lines themselves are progress enough on a terminal.
        display = choose_display(quiet or (not as_json and sys.stdout.isatty()))
        rows: list[dict[str, Any]] = []
        with Progress("hashing", sum(t.nbytes for t in tensors), display) as progress:
            for tensor, value in _hashes(tensors, progress):
                if as_json:
                    rows.append({"hash": f"{value:016x}", "bytes": tensor.nbytes, "name": tensor.name})
                else:
                    line(f"{value:016x} {tensor.nbytes:>12} {printable(tensor.name)}")
        opened.check_unchanged()
        if as_json:
            object_(
                {
                    "model": model,
                    "format": opened.format,
                    "bytes": sum(t.nbytes for t in tensors),
                    "tensors": rows,
                }
            )


def _hashes(tensors: Sequence[ModelTensor], progress: Progress) -> Iterator[tuple[ModelTensor, int]]:
    """Each tensor with its hash, in order, a group at a time."""
    from weightwire.hashing import hash_payloads

    total = sum(tensor.nbytes for tensor in tensors)
    done = 0
    for start in range(0, len(tensors), GROUP):
        group = tensors[start : start + GROUP]
        values = hash_payloads([tensor.payload for tensor in group])
        done += sum(tensor.nbytes for tensor in group)
        progress.report(group[-1].name, done, total)
        yield from zip(group, values, strict=True)
