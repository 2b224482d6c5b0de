"""Which index of hashes a call uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from weightwire.errors import ConfigError
from weightwire.index.store import HashIndex, default_index_path

__all__ = ["IndexChoice", "check_index", "index_for", "open_index"]

IndexChoice = HashIndex | str | os.PathLike[str] | bool | None


def check_index(index: object) -> None:
    """ConfigError for what is no `IndexChoice`."""
    if index is not None and not isinstance(index, (HashIndex, str, os.PathLike, bool)):
        raise ConfigError(f"index: {index!r} is no index", hint="give a path, a HashIndex, or False for none at all")


def open_index(index: IndexChoice) -> HashIndex | None:
    """``index`` itself, or the one at that path; for None or True the user's; for False, and where it is off, None.

    Whoever calls closes it, unless it is the caller's own (``index`` itself). ConfigError as `check_index`, and for a
    WEIGHTWIRE_INDEX that cannot be meant.
    """
    check_index(index)
    if isinstance(index, HashIndex):
        return index if index.enabled else None
    if index is False:
        return None
    if index is None or index is True:
        return HashIndex() if default_index_path() is not None else None
    return HashIndex(index)


@contextmanager
def index_for(index: IndexChoice) -> Iterator[HashIndex | None]:
    """Inside: what `open_index` gives, closed on leaving if it was opened here."""
    opened = open_index(index)
    try:
        yield opened
    finally:
        if opened is not None and opened is not index:
            opened.close()
