"""The file the index lies in: opened, told from other files, moved aside when it is damaged."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Unusable", "connect", "file_at", "is_busy", "is_damage", "is_gone", "move_aside"]

_APPLICATION: Final = 0x77777869
"""SQLite's application_id of an index: "wwxi"."""

_VERSION: Final = 3
_MAGIC: Final = b"SQLite format 3\0"
_POLL: Final = 0.1
"""Seconds that SQLite waits for a lock by itself; longer waits are ours, where Ctrl-C is heard."""

_VERSION_AT: Final = 60
_APPLICATION_AT: Final = 68
"""Where a database's head has user_version and application_id, big-endian (SQLite's "Database File Format", section
1.3).
"""

_BESIDE: Final = ("-journal", "-wal", "-shm")
"""What SQLite opens beside a database (SQLite's "Temporary Files Used By SQLite", sections 2.1 to 2.3)."""

_PATIENCE = 1.0
"""Seconds that a process is given to move a damaged index aside."""

_SCHEMA: Final = (
    "CREATE TABLE files (id INTEGER PRIMARY KEY, device INTEGER NOT NULL, inode INTEGER NOT NULL,"
    " size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL, path BLOB NOT NULL,"
    " seen INTEGER NOT NULL, seal BLOB NOT NULL, UNIQUE (device, inode))",
    "CREATE INDEX files_by_path ON files (path)",
    "CREATE TABLE hashes (file INTEGER NOT NULL, offset INTEGER NOT NULL, nbytes INTEGER NOT NULL,"
    " fnv1a INTEGER NOT NULL, blake3 BLOB NOT NULL, tensor BLOB NOT NULL, seal BLOB NOT NULL,"
    " PRIMARY KEY (file, offset, nbytes)) WITHOUT ROWID",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_VERSION}",
)
_CLEARING: Final = ("DROP TABLE IF EXISTS hashes", "DROP TABLE IF EXISTS files")


class Unusable(Exception):
    """The file cannot serve as an index, and is not ours to move."""


def connect(path: Path) -> sqlite3.Connection:
    """Open the index at ``path``, made if it is missing. In autocommit mode, for any thread that holds a lock.

    Raises Unusable for what is no index, or where something other than a file lies where one of its files belongs, and
    as sqlite3 does. Locks are waited for no longer than `_POLL`.
    """
    try:
        import sqlite3
    except ImportError as error:
        raise Unusable("this Python has no sqlite3 module") from error
    connection = sqlite3.connect(_place(path), timeout=_POLL, isolation_level=None, check_same_thread=False)
    try:
        # Nothing waits for the disk: after a power cut the file may be damaged or old, which costs hashing again. Rows
        # are sealed: one that is not what was written is not known.
        connection.execute("PRAGMA synchronous = OFF")
        # No column of ours is text. What damage made text of may be no UTF-8, which would be an error for one row.
        connection.text_factory = _no_text
        _check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def file_at(path: Path) -> tuple[int, int] | None:
    """(device, inode) of what is at ``path``; None if that cannot be told."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _place(path: Path) -> str:
    """The file that SQLite is to open. Unusable where it would find anything but files: a FIFO blocks for ever.

    It is absolute, as ":memory:" is the name of a file, too.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Unusable(f"its directory cannot be made: {error.strerror or error}") from error
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise Unusable("it is not a regular file")
        # SQLite's own files lie beside the one that a symbolic link leads to.
        place = os.path.realpath(path)
        for name in (*(place + each for each in _BESIDE), _lock_of(path)):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(name).st_mode):
                    raise Unusable(f"{os.path.basename(name)!r} beside it is not a regular file")
    except OSError as error:
        raise Unusable(f"it cannot be looked at: {error.strerror or error}") from error
    return place


def _lock_of(path: Path) -> str:
    return f"{path}.lock"


def _no_text(data: bytes) -> None:
    """What stands for a text."""


def _check(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN")  # what is looked at is of one moment: another process may be making it
    made = _made(connection)
    connection.execute("COMMIT")
    if made:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not _made(connection):  # another process may have been first
            # What an earlier form knew lacks something: it is found out again.
            for statement in (*_CLEARING, *_SCHEMA):
                connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        _rollback(connection)
        raise


def _made(connection: sqlite3.Connection) -> bool:
    """Whether the tables are there, in this form. Unusable if other ones are."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application == _APPLICATION and version == _VERSION:
        return True
    if application == _APPLICATION and 0 < version < _VERSION:
        return False
    if application == _APPLICATION:
        raise Unusable(_of_another_form(version))
    if application or version or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise Unusable("it is a database of something else")
    return False


def _of_another_form(version: int) -> str:
    return f"it has the form {version} of another weightwire; this one knows form {_VERSION}"


def _rollback(connection: sqlite3.Connection) -> None:
    import sqlite3

    with contextlib.suppress(sqlite3.Error):
        connection.execute("ROLLBACK")


def is_busy(error: Exception) -> bool:
    """Whether another process or thread held the file locked (SQLITE_BUSY, SQLITE_LOCKED)."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (5, 6)


def is_damage(error: Exception) -> bool:
    """Whether what lies there is no sound database (SQLITE_CORRUPT, SQLITE_NOTADB), or its tables are not ours: they
    lack something, have rules that no row of ours breaks (SQLITE_CONSTRAINT), or names that are no text.
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (11, 19, 26) or (code == 1 and "no such" in str(error)) or isinstance(error, UnicodeDecodeError)


def is_gone(error: Exception) -> bool:
    """Whether the file that is open is not the one of that name any more (SQLITE_READONLY_DBMOVED): moved aside by
    another process, or deleted. Only who is to write is told.
    """
    return getattr(error, "sqlite_errorcode", 0) == 1032


def move_aside(path: Path, seen: tuple[int, int] | None) -> None:
    """Rename a damaged index to ``<name>.damaged``, unless another process has done so since ``seen`` was there.

    ``seen`` is its `file_at`. Afterwards the place is free or holds another file. Unusable where that cannot be
    done; a file that was never an index, as a mistaken WEIGHTWIRE_INDEX may name, is left where it is, and nothing is
    made beside it.
    """
    try:
        if not _is_still(path, seen):
            return
        with os.fdopen(_open_file(_lock_of(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "rb") as lock:
            _take(lock)
            if not _is_still(path, seen):  # another one may have come while the lock was waited for
                return
            # First what lies beside it: it must never be played back into the index that is begun anew.
            for each in _BESIDE:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{path}{each}")
            os.replace(path, f"{path}.damaged")
    except FileNotFoundError:
        return
    except BlockingIOError as error:
        raise Unusable("it is damaged, and another process is taking long to move it aside") from error
    except OSError as error:
        raise Unusable(f"it is damaged and cannot be moved aside: {error.strerror or error}") from error


def _is_still(path: Path, seen: tuple[int, int] | None) -> bool:
    """Whether the file at ``path`` is the damaged one. Unusable if that was never an index: it is one by its head, or
    by its name where it has no database's head.
    """
    with os.fdopen(_open_file(path, os.O_RDONLY), "rb") as file:
        found = os.fstat(file.fileno())
        if seen is not None and (found.st_dev, found.st_ino) != seen:
            return False
        start = file.read(_APPLICATION_AT + 4)
    database = start.startswith(_MAGIC)
    ours = start[_APPLICATION_AT:] == _APPLICATION.to_bytes(4, "big") if database else path.suffix == ".sqlite3"
    if not ours:
        raise Unusable("it is no index of hashes")
    version = int.from_bytes(start[_VERSION_AT : _VERSION_AT + 4], "big")
    if database and version > _VERSION:
        # Not damaged: another process has brought it into its own form since it was opened here.
        raise Unusable(_of_another_form(version))
    return True


def _open_file(path: str | Path, flags: int) -> int:
    """open(2), for regular files only: OSError for others, which are not waited for."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def _take(lock: IO[bytes]) -> None:
    """Lock the file. BlockingIOError if another process still has it after a while."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.01)
