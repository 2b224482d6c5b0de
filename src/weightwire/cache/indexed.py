"""Which index of hashes a call uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from weightwire.errors import ConfigError
from weightwire.index import HashIndex

__all__ = ["IndexChoice", "index_for"]

IndexChoice = HashIndex | str | os.PathLike[str] | bool | None


@contextmanager
def index_for(index: IndexChoice) -> Iterator[HashIndex | None]:
    """``index`` itself, or the one at that path; for None or True the user's; for False, and where it is off, None.
    What is opened here is closed on leaving.

    ConfigError for anything else, and for a WEIGHTWIRE_INDEX that cannot be meant.
    """
    if isinstance(index, HashIndex):
        yield index if index.enabled else None
        return
    if index is False:
        yield None
        return
    if index is not None and index is not True and not isinstance(index, (str, os.PathLike)):
        raise ConfigError(f"index: {index!r} is no index", hint="give a path, a HashIndex, or False for none at all")
    with HashIndex(None if index is True else index) as opened:
        yield opened if opened.enabled else None
