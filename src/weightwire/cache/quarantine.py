"""Where bad entries go: a folder in the cache's directory, bounded, that no server reads from.

The folder itself is opened without following a link, and worked in through that descriptor: whoever may write to the
cache's directory cannot have files moved or removed elsewhere.

A quarantined entry is called ``<16 hexadecimal digits>-<n>``: the name it had, and a number that makes it unique.
"""

from __future__ import annotations

import contextlib
import errno
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
    try:
        folder = _open(directory, os.O_RDONLY)
    except OSError:
        return found
    try:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                name = _NAME.fullmatch(entry.name)
                if name is None:
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):
                        path = directory / FOLDER / entry.name
                        found.append(Quarantined(path, int(name[1], 16), status.st_size, status.st_ctime_ns))
    finally:
        os.close(folder)
    return sorted(found, key=lambda entry: (entry.moved_ns, entry.path))


def empty_quarantine(directory: Path) -> tuple[int, int]:
    """Remove everything that is in quarantine: how many files that were, and their bytes.

    What cannot be removed is left and not counted.
    """
    return _remove(list_quarantine(directory), directory)


def move_aside(path: Path, is_it: Callable[[os.stat_result], bool]) -> Path | None:
    """Move the entry at ``path`` into quarantine; where it is now, or None if it has gone or is another one.

    ``is_it`` says of the status of what lies there whether that is the bad one: another server may have replaced it.
    Raises OSError if it cannot be moved: IsADirectoryError for a directory, which is not touched, NotADirectoryError
    where the quarantine is a link or anything else.
    """
    for _ in range(_ATTEMPTS):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(21, "it is a directory", str(path))
        if not is_it(status):
            return None
        # Either it has gone, or somebody has emptied the quarantine and removed the folder that was open.
        with contextlib.suppress(FileNotFoundError):
            folder, name = _claim(path.parent, path.name)
            try:
                if not _move(path, folder, name, is_it):
                    return None
            finally:
                os.close(folder)
            _bound(path.parent)
            return path.parent / FOLDER / name
    raise _unsteady(path.parent)


def _move(path: Path, folder: int, name: str, is_it: Callable[[os.stat_result], bool]) -> bool:
    """Move ``path`` onto the empty file ``name`` in ``folder``; whether that was the bad one, else it is put back."""
    try:
        os.rename(path, name, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise
    try:
        if is_it(os.stat(name, dir_fd=folder, follow_symlinks=False)):
            return True
    except FileNotFoundError:
        return True  # somebody has emptied the quarantine: moved it was
    # Replaced between the look and the move: put the good one back, unless a third is there already.
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.link(name, path, src_dir_fd=folder, follow_symlinks=False)
        os.unlink(name, dir_fd=folder)
    return False


def _open(directory: Path, how: int = os.O_PATH) -> int:
    """The quarantine of ``directory``; NotADirectoryError for anything but a folder, a link to one included."""
    where = directory / FOLDER
    try:
        return os.open(where, how | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise NotADirectoryError(errno.ENOTDIR, f"{FOLDER} is not a directory", str(where)) from error


def _claim(directory: Path, name: str) -> tuple[int, str]:
    """The quarantine, open, and an empty file in it of a name that nobody else has, to be replaced by the rename."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory / FOLDER)
        with contextlib.suppress(FileNotFoundError):  # somebody has just emptied it
            folder = _open(directory)
            try:
                return folder, _free_name(folder, name)
            except BaseException:
                os.close(folder)
                raise
    raise _unsteady(directory)


def _unsteady(directory: Path) -> FileExistsError:
    return FileExistsError(17, "the quarantine does not stay", str(directory / FOLDER))


def _free_name(folder: int, name: str) -> str:
    for number in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            free = f"{name}-{number}"
            os.close(os.open(free, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
            return free
    raise FileExistsError(17, "no name is free in quarantine", name)


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
    try:
        folder = _open(directory)
    except OSError:
        return 0, 0
    try:
        for entry in entries:
            with contextlib.suppress(OSError):
                os.unlink(entry.path.name, dir_fd=folder)
                count += 1
                nbytes += entry.nbytes
    finally:
        os.close(folder)
    with contextlib.suppress(OSError):
        os.rmdir(directory / FOLDER)
    return count, nbytes
