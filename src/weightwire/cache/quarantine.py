"""Where bad entries go: a folder in the cache's directory, bounded, that no server reads from.

A quarantined entry is called ``<16 hexadecimal digits>-<n>``: the name it had, and a number that makes it unique.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["FOLDER", "MAX_BYTES", "MAX_ENTRIES", "Quarantined", "empty_quarantine", "list_quarantine", "move_aside"]

FOLDER: Final = ".weightwire-quarantine"
MAX_ENTRIES: Final = 64
MAX_BYTES: Final = 2 << 30
"""What is kept for somebody to look at; the oldest go first, the newest stays whatever its size."""

_NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,9})", re.ASCII)
_ATTEMPTS: Final = 1000


class Quarantined(NamedTuple):
    """One file in quarantine: its path, the hash it was named by, its size in bytes, when it was moved there (a number
    of nanoseconds since the epoch, of its last change of status).
    """

    path: Path
    content_hash: int
    nbytes: int
    moved_ns: int


def list_quarantine(directory: Path) -> list[Quarantined]:
    """What is in quarantine in the cache ``directory``, oldest first; empty if there is no such folder, or it cannot be
    read. Other names than its own are left out.
    """
    found: list[Quarantined] = []
    with contextlib.suppress(OSError), os.scandir(directory / FOLDER) as entries:
        for entry in entries:
            name = _NAME.fullmatch(entry.name)
            if name is None:
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    found.append(Quarantined(Path(entry.path), int(name[1], 16), status.st_size, status.st_ctime_ns))
    return sorted(found, key=lambda entry: (entry.moved_ns, entry.path))


def empty_quarantine(directory: Path) -> tuple[int, int]:
    """Remove everything that is in quarantine: how many files that were, and their bytes.

    What cannot be removed is left and not counted.
    """
    return _remove(list_quarantine(directory), directory)


def move_aside(path: Path, is_it: Callable[[os.stat_result], bool]) -> Path | None:
    """Move the entry at ``path`` into quarantine; where it is now, or None if it has gone or is another one.

    ``is_it`` says of the status of what lies there whether that is the bad one: another server may have replaced it.
    Raises OSError if it cannot be moved: IsADirectoryError for a directory, which is not touched.
    """
    try:
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(21, "it is a directory", str(path))
        if not is_it(status):
            return None
        target = _claim(path.parent / FOLDER, path.name)
    except FileNotFoundError:
        return None
    try:
        os.rename(path, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(target)
        if isinstance(error, FileNotFoundError):
            return None
        raise
    if not is_it(os.lstat(target)):
        # Replaced between the look and the move: put the good one back, unless a third is there already.
        with contextlib.suppress(OSError):
            os.link(target, path, follow_symlinks=False)
            os.unlink(target)
        return None
    _bound(path.parent)
    return target


def _claim(folder: Path, name: str) -> Path:
    """An empty file of a name that nobody else has, to be replaced by the rename."""
    number = 0
    for _ in range(_ATTEMPTS):
        target = folder / f"{name}-{number}"
        try:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileNotFoundError:
            # Not there yet, or somebody has just emptied it.
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            number += 1
        else:
            return target
    raise FileExistsError(17, "no name is free in quarantine", str(folder))


def _bound(directory: Path) -> None:
    kept = list_quarantine(directory)
    surplus: list[Quarantined] = []
    nbytes = sum(entry.nbytes for entry in kept)
    while len(kept) > 1 and (len(kept) > MAX_ENTRIES or nbytes > MAX_BYTES):
        nbytes -= kept[0].nbytes
        surplus.append(kept.pop(0))
    _remove(surplus, directory)


def _remove(entries: list[Quarantined], directory: Path) -> tuple[int, int]:
    count = nbytes = 0
    for entry in entries:
        with contextlib.suppress(OSError):
            os.unlink(entry.path)
            count += 1
            nbytes += entry.nbytes
    with contextlib.suppress(OSError):
        os.rmdir(directory / FOLDER)
    return count, nbytes
