"""Keep a cache directory small: the least recently used entries go first."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weightwire.cache.inspect import Entry, list_entries
from weightwire.cache.quarantine import empty_quarantine, list_quarantine
from weightwire.cache.writing import sweep
from weightwire.config import checked_flag
from weightwire.errors import ConfigError
from weightwire.index import IndexChoice

__all__ = ["PruneResult", "prune_cache"]

_FOR_EVER: Final = 1e12
"""Seconds, more than any file is old; a longer age, which may be infinite, is no number of nanoseconds."""


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What a pruning removed, or with ``dry_run`` would have.

    ``removed`` entries of ``removed_bytes``, least recently used first; ``kept`` entries of ``kept_bytes`` remain; what
    others removed meanwhile is in neither. ``quarantined`` files of ``quarantined_bytes`` and ``temporary`` files left
    by writers that died went too; of ``failed`` entries the system would not let go (with why).
    """

    directory: str
    dry_run: bool
    removed: tuple[Entry, ...]
    removed_bytes: int
    kept: int
    kept_bytes: int
    quarantined: int
    quarantined_bytes: int
    temporary: int
    failed: tuple[tuple[str, str], ...] = ()


def prune_cache(
    directory: str | os.PathLike[str] | None = None,
    *,
    max_bytes: int | None = None,
    max_age: float | None = None,
    quarantine: bool = False,
    dry_run: bool = False,
    index: IndexChoice = None,
) -> PruneResult:
    """Remove entries of the cache ``directory`` (None: a stock server's) until it is as wanted.

    First those not used for ``max_age`` seconds, then the least recently used until no more than ``max_bytes`` bytes
    remain (0: all go). An entry's last use is the later of its times of access and modification. ``quarantine`` empties
    the quarantine. Temporary files whose writer died go in any case; no other name is touched. A server that is reading
    an entry reads on, as only the name goes; one used meanwhile is spared. With ``dry_run`` nothing is removed.
    ``index`` names the tensors of what is removed (a path or `HashIndex`; None: the user's; False: none).

    Raises ConfigError if the directory is not there, nothing is asked for, or an argument cannot be meant, CacheError
    if it cannot be listed.
    """
    checked_flag("quarantine", quarantine)
    checked_flag("dry_run", dry_run)
    for name, value in (("max_bytes", max_bytes), ("max_age", max_age)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
            raise ConfigError(f"{name}: {value!r} is not a number from 0 on")
    if max_bytes is None and max_age is None and not quarantine:
        raise ConfigError("nothing says what to remove", hint="give a largest size, an age, or the quarantine")
    listing = list_entries(directory, index=index)
    surplus = _surplus(listing.entries, max_bytes, max_age)
    temporary = 0
    isolated = list_quarantine(listing.directory) if quarantine else []
    counted, isolated_bytes = len(isolated), sum(each.nbytes for each in isolated)
    removed: list[Entry] = []
    gone: set[Path] = set()
    failed: list[tuple[str, str]] = []
    if dry_run:
        removed = surplus
    else:
        temporary = sweep(listing.directory)
        if quarantine:
            counted, isolated_bytes = empty_quarantine(listing.directory)
        for entry in surplus:
            try:
                if _remove(entry):
                    removed.append(entry)
            except FileNotFoundError:
                gone.add(entry.path)  # somebody else has removed it
            except OSError as error:
                failed.append((entry.path.name, error.strerror or str(error)))
    gone.update(entry.path for entry in removed)
    kept = [entry for entry in listing.entries if entry.path not in gone]
    return PruneResult(
        directory=str(listing.directory),
        dry_run=dry_run,
        removed=tuple(removed),
        removed_bytes=sum(entry.nbytes for entry in removed),
        kept=len(kept),
        kept_bytes=sum(entry.nbytes for entry in kept),
        quarantined=counted,
        quarantined_bytes=isolated_bytes,
        temporary=temporary,
        failed=tuple(failed),
    )


def _surplus(entries: Sequence[Entry], max_bytes: int | None, max_age: float | None) -> list[Entry]:
    """Which of ``entries``, least recently used first, are too old or too much."""
    before = time.time_ns() - int(min(max_age, _FOR_EVER) * 1e9) if max_age is not None else None
    left = sum(entry.nbytes for entry in entries)
    surplus: list[Entry] = []
    for entry in entries:
        too_old = before is not None and entry.last_used_ns < before
        too_much = max_bytes is not None and left > max_bytes
        if too_old or too_much:
            surplus.append(entry)
            left -= entry.nbytes
    return surplus


def _remove(entry: Entry) -> bool:
    """Remove an entry if it is still what was listed. Whether it was. FileNotFoundError if it has gone already."""
    status = os.lstat(entry.path)
    if not stat.S_ISREG(status.st_mode) or max(status.st_atime_ns, status.st_mtime_ns) != entry.last_used_ns:
        return False
    os.unlink(entry.path)
    return True
