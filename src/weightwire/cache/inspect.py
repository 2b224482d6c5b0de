"""What lies in a cache directory: entries, what only looks like one, and whose tensors they are. Reads no content."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from weightwire.cache.directory import checked_directory, default_directory
from weightwire.cache.quarantine import FOLDER, list_quarantine
from weightwire.cache.writing import TEMP_NAME
from weightwire.errors import CacheError, ConfigError
from weightwire.index import IndexChoice, Owner, index_for

__all__ = ["CacheStatus", "Entry", "Listing", "cache_status", "entry_kind", "list_entries", "place_of"]

_ENTRY: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Entry:
    """A regular file with an entry's name.

    ``content_hash`` is the FNV-1a 64 it is named after, ``nbytes`` its size, ``last_used_ns`` the later of its times of
    access and modification (ns since the epoch). ``owners`` are the tensors it is of, as far as an index knows.
    """

    path: Path
    content_hash: int
    nbytes: int
    last_used_ns: int
    owners: tuple[Owner, ...] = ()


@dataclass(frozen=True, slots=True)
class Listing:
    """What a directory holds.

    ``entries``, least recently used first; ``misplaced``, what has an entry's name and is no regular file, with what it
    is instead (``"directory"``, ``"symbolic link"``, …); ``temporary``, files of entries being written or left half
    written, with their bytes; ``others``, names that have nothing to do with a cache.
    """

    directory: Path
    entries: Sequence[Entry]
    misplaced: Mapping[str, str] = field(default_factory=dict)
    temporary: Mapping[str, int] = field(default_factory=dict)
    others: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """A directory in numbers: counts, bytes, and times in ns since the epoch (None where there is no entry).

    ``free_bytes`` is what this user can still write to its file system, ``total_bytes`` the size of that.
    """

    directory: str
    entries: int
    bytes: int
    oldest_ns: int | None
    newest_ns: int | None
    temporary: int
    temporary_bytes: int
    quarantined: int
    quarantined_bytes: int
    misplaced: int
    others: int
    free_bytes: int
    total_bytes: int


def place_of(directory: str | os.PathLike[str] | None) -> Path:
    """``directory``, or that of a stock server, which must be there: nothing is made.

    Raises ConfigError if it is missing or no directory.
    """
    path = default_directory() if directory is None else checked_directory(directory)
    what = "is not a directory"
    try:
        if path.is_dir():
            return path
        if not os.path.lexists(path):
            what = "does not exist"
        elif path.is_dir():  # made since the first look
            return path
    except OSError as error:  # a folder above it that this user may not look into
        raise _unlisted(path, error) from error
    raise ConfigError(
        f"cache directory {path} {what}",
        hint="name the directory that holds the entries (--cache)"
        if directory is not None
        else "that is where a stock server of this user would have it; name another one (--cache)",
    )


def _unlisted(path: Path, error: OSError) -> CacheError:
    hint = "ask as the user that the server runs as" if error.errno == errno.EACCES else ""
    why = error.strerror or str(error)
    return CacheError(f"cache directory {path} cannot be listed: {why}", path=str(path), errno=error.errno, hint=hint)


def entry_kind(mode: int) -> str:
    """What a file of ``mode`` (stat(2)) is, in a word or two."""
    kinds = (
        (stat.S_ISREG, "file"),
        (stat.S_ISDIR, "directory"),
        (stat.S_ISLNK, "symbolic link"),
        (stat.S_ISFIFO, "fifo"),
        (stat.S_ISSOCK, "socket"),
    )
    return next((name for is_it, name in kinds if is_it(mode)), "device")


def list_entries(directory: str | os.PathLike[str] | None = None, *, index: IndexChoice = None) -> Listing:
    """What the cache ``directory`` (None: a stock server's) holds. No file is opened.

    ``index`` is the index of hashes that tells whose tensors the entries are (a path or `HashIndex`; None: the user's;
    False: none). Raises ConfigError if the directory is not there, CacheError if it cannot be listed.
    """
    path = place_of(directory)
    with index_for(index) as known:
        owners: Mapping[int, list[Owner]] = known.owners() if known is not None else {}
    entries: list[Entry] = []
    misplaced: dict[str, str] = {}
    temporary: dict[str, int] = {}
    others: list[str] = []
    try:
        with os.scandir(path) as found:
            for each in found:
                try:
                    status = each.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                is_file = stat.S_ISREG(status.st_mode)
                if _ENTRY.fullmatch(each.name):
                    if not is_file:
                        misplaced[each.name] = entry_kind(status.st_mode)
                        continue
                    content_hash = int(each.name, 16)
                    used = max(status.st_atime_ns, status.st_mtime_ns)
                    whose = tuple(o for o in owners.get(content_hash, ()) if o.nbytes == status.st_size)
                    entries.append(Entry(path / each.name, content_hash, status.st_size, used, whose))
                elif is_file and TEMP_NAME.fullmatch(each.name):
                    temporary[each.name] = status.st_size
                elif each.name != FOLDER:
                    others.append(each.name)
    except OSError as error:
        raise _unlisted(path, error) from error
    entries.sort(key=lambda entry: (entry.last_used_ns, entry.content_hash))
    return Listing(path, entries, dict(sorted(misplaced.items())), dict(sorted(temporary.items())), sorted(others))


def cache_status(directory: str | os.PathLike[str] | None = None) -> CacheStatus:
    """The cache ``directory`` (None: a stock server's) in numbers. Raises as `list_entries` does."""
    listing = list_entries(directory, index=False)
    quarantined = list_quarantine(listing.directory)
    try:
        room = os.statvfs(listing.directory)
    except OSError as error:
        where = str(listing.directory)
        raise CacheError(f"{where}: {error.strerror or error}", path=where, errno=error.errno) from error
    used = [entry.last_used_ns for entry in listing.entries]
    return CacheStatus(
        directory=str(listing.directory),
        entries=len(used),
        bytes=sum(entry.nbytes for entry in listing.entries),
        oldest_ns=min(used, default=None),
        newest_ns=max(used, default=None),
        temporary=len(listing.temporary),
        temporary_bytes=sum(listing.temporary.values()),
        quarantined=len(quarantined),
        quarantined_bytes=sum(each.nbytes for each in quarantined),
        misplaced=len(listing.misplaced),
        others=len(listing.others),
        free_bytes=room.f_bavail * room.f_frsize,
        total_bytes=room.f_blocks * room.f_frsize,
    )
