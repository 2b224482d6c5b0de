"""Which index of hashes a call uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weightwire.errors import ConfigError
from weightwire.index import HashIndex

__all__ = ["index_for"]


@contextmanager
def index_for(index: HashIndex | bool | None) -> Iterator[HashIndex | None]:
    """``index`` itself; for None or True the user's, closed on leaving; for False, and where it is off, None.

    ConfigError for anything else, and for a WEIGHTWIRE_INDEX that cannot be meant.
    """
    if isinstance(index, HashIndex):
        yield index if index.enabled else None
        return
    if index is False:
        yield None
        return
    if index is not None and index is not True:
        raise ConfigError(f"index: {index!r} is no HashIndex", hint="None is the user's, False is none")
    with HashIndex() as users:
        yield users if users.enabled else None
