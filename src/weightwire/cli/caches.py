"""What the verbs that work on a cache directory share: its option, threads, and times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from weightwire.cli.options import threads_that
from weightwire.errors import ConfigError

__all__ = ["cache_dir", "cache_path", "moment", "threads"]

_F = TypeVar("_F", bound=Callable[..., Any])


def cache_dir(function: _F) -> _F:
    """``--cache`` of a verb that works on a directory."""
    return click.option(
        "--cache",
        metavar="DIR",
        help="The directory that holds the entries. [default: a stock server's: $LLAMA_CACHE/rpc, "
        "$XDG_CACHE_HOME/llama.cpp/rpc or ~/.cache/llama.cpp/rpc]",
    )(function)


threads = threads_that("read and hash; 0: none but the main one")


def cache_path(text: str | None) -> Path | None:
    """What ``--cache`` names, with a leading ``~`` resolved; None for the default."""
    if text is None:
        return None
    if not text.strip():
        raise ConfigError("--cache: it is empty", hint="leave it out for a stock server's directory")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--cache: {text}: {error}", hint="write the path without ~") from error


def moment(ns: int | None) -> str | None:
    """A time of the file system (ns since the epoch) as text in UTC, to the second; None for None."""
    if ns is None:
        return None
    try:
        return datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError):
        return str(ns)  # a year that nobody's calendar has
