"""`HashIndex`: hashes by file identity and range, in a SQLite file."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from blake3 import blake3

from weightwire.errors import ConfigError
from weightwire.index import database
from weightwire.index.digest import DIGEST_BYTES, Hashes
from weightwire.index.identity import FileIdentity, identity_of
from weightwire.model.mapped import written_through_mappings

if TYPE_CHECKING:
    import sqlite3

    from weightwire.ranges import FileRange

__all__ = ["HashIndex", "Owner", "default_index_path"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_READ_SECONDS: Final = 2.0
_WRITE_SECONDS: Final = 5.0
"""Longest waits for a lock of the file; then the index counts as empty."""

_REST_SECONDS: Final = 30.0
"""After such a wait the index is left alone for as long: no push is to wait again and again."""

_DAY: Final = 86_400
_KEPT_DAYS: Final = 180
_MOST_ROWS: Final = 250_000
"""About 60 MB of file: a hundred models of 2,500 tensors."""


class Owner(NamedTuple):
    """A tensor that was seen to have some hash: its file's path, its name, its size and BLAKE3 (32 bytes)."""

    path: str
    tensor: str
    nbytes: int
    blake3: bytes


def default_index_path() -> Path | None:
    """Where the user's index is: ``$WEIGHTWIRE_INDEX``, else ``weightwire/index.sqlite3`` in ``$XDG_CACHE_HOME``, else
    in ``~/.cache``. None if WEIGHTWIRE_INDEX is ``off``.

    ConfigError if WEIGHTWIRE_INDEX cannot be the name of a file. An XDG_CACHE_HOME that is empty or a relative path
    counts as unset (XDG Base Directory Specification).
    """
    given = os.environ.get("WEIGHTWIRE_INDEX")
    if given is not None:
        if not given.strip() or "\0" in given:
            raise ConfigError(
                f"environment variable WEIGHTWIRE_INDEX: {given!r} cannot be the name of a file",
                hint='name a file, or "off"; see docs/configuration.md',
            )
        return None if given.strip().lower() == "off" else Path(given)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared) / "weightwire" / "index.sqlite3"
    return Path(os.path.expanduser("~")) / ".cache" / "weightwire" / "index.sqlite3"


class HashIndex:
    """The hashes of tensors of files seen before; a context manager.

    ``path`` is its file (None: `default_index_path`, which may say that there is none). Safe to use from several
    threads and processes at once, after a fork too. Nothing that the disk does is raised: what cannot be read is not
    known, what cannot be written is forgotten, and either is logged once (at WARNING). So is what is no index, or has
    anything but files where its journal and lock belong. A damaged file is moved aside to ``<name>.damaged`` and begun
    anew; rows are sealed, and one that is not what was written is not known. Files not seen for 180 days are dropped,
    and above 250,000 tensors those not seen for longest.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = default_index_path() if path is None else Path(path)
        if self.path is not None:
            with contextlib.suppress(OSError):  # where it is to be used, that is found out again, and said
                self.path = self.path.absolute()
        self._otherwise = (
            "name another file with WEIGHTWIRE_INDEX, or do without: WEIGHTWIRE_INDEX=off, --no-index of push and warm"
            if path is None
            else "give another path, or do without: index=False"
        )
        self._states: dict[int, _State] = {}

    def __enter__(self) -> HashIndex:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HashIndex({str(self.path) if self.path is not None else 'off'!r})"

    @property
    def enabled(self) -> bool:
        """False if there is no index, or its file turned out to be of no use."""
        return not self._own().off

    def close(self) -> None:
        """Close the file. Idempotent; the next use would open it again."""
        self._own().close()

    def find(self, ranges: Sequence[FileRange]) -> list[Hashes | None]:
        """What is known of each range, in order: None for one that is not known, or whose file has changed since, or
        could have without its times telling (not ``dated``, or mapped to be written to by this process).

        Costs one fstat(2) and two queries for each file, and a look at this process's mappings.
        """
        if not self._own().usable():
            return [None] * len(ranges)
        identities: dict[int, FileIdentity] = {}
        for fd in _dated(ranges):
            with contextlib.suppress(OSError):
                identities[fd] = identity_of(fd)
        if not identities:
            return [None] * len(ranges)
        known = self._attempt("reading", lambda use: _rows(use, identities), _READ_SECONDS)
        if known is None:
            return [None] * len(ranges)
        rows, stale = known
        if stale:
            self._attempt("noting what is used", lambda use: _note_seen(use, stale), 0.0, quiet=True)
        return [rows.get((each.fd, each.offset, each.nbytes)) if each.dated else None for each in ranges]

    def record(self, entries: Iterable[tuple[FileRange, str, Hashes]], identities: Mapping[int, FileIdentity]) -> int:
        """Remember ranges, the names of their tensors and their hashes; returns how many were stored.

        ``identities`` gives for each ``fd`` what `identity_of` said *before* the bytes were read. Nothing is stored for
        a file that is another now, or that had been changed so shortly before (2 s) that a further write might not
        show, nor for what `find` would not look for, nor for hashes without a BLAKE3. What was known of an earlier
        content of the file, or of an earlier file of its path, is dropped.
        """
        if not self._own().usable():
            return 0
        files: dict[int, list[tuple[FileRange, str, Hashes]]] = {}
        for entry in entries:
            if entry[0].dated and len(entry[2].blake3) == DIGEST_BYTES:
                files.setdefault(entry[0].fd, []).append(entry)
        dated = _dated(of[0][0] for of in files.values())
        sound = {
            fd: of for fd, of in files.items() if fd in dated and fd in identities and _unchanged(fd, identities[fd])
        }
        if not sound:
            return 0
        return (
            self._attempt(
                "writing",
                lambda use: _store_all(use, [(identities[fd], of) for fd, of in sound.items()]),
                _WRITE_SECONDS,
                writes=True,
            )
            or 0
        )

    def owners(self) -> Mapping[int, list[Owner]]:
        """Every tensor the index knows, by its FNV-1a 64."""
        return self._attempt("reading", _owners, _READ_SECONDS) or {}

    # How the file is used.

    def _attempt(
        self,
        what: str,
        work: Callable[[sqlite3.Connection], _T],
        seconds: float,
        *,
        writes: bool = False,
        quiet: bool = False,
    ) -> _T | None:
        """What ``work`` gives, done again while others hold the file for up to ``seconds``; None if it cannot be done.

        ``work`` that ``writes`` is one transaction.
        """
        own = self._own()
        if not own.usable():
            return None
        try:
            import sqlite3
        except ImportError:
            self._give_up(own, "it cannot be used: this Python has no sqlite3 module")
            return None
        deadline = time.monotonic() + seconds
        with own.lock:
            while True:
                opened = False
                try:
                    connection = self._open(own)
                    opened = True
                    return _transaction(connection, work) if writes else work(connection)
                except database.Unusable as error:
                    self._give_up(own, f"it cannot be used: {error}")
                    return None
                except (sqlite3.Error, OverflowError, ValueError) as error:
                    if database.is_busy(error):
                        if time.monotonic() < deadline:
                            time.sleep(0.01)
                            continue
                        if not quiet:
                            own.rest_until = time.monotonic() + _REST_SECONDS
                            logger.warning(
                                "index %s: %s failed: others hold it locked; not used for now", self.path, what
                            )
                        return None
                    if database.is_gone(error):
                        own.close()  # what has its name now is opened
                        if time.monotonic() < deadline:
                            continue
                        return None
                    if quiet:
                        return None
                    if not database.is_damage(error):
                        tried = f"{what} failed" if opened else f"it cannot be {'opened' if own.seen else 'made'}"
                        self._give_up(own, f"{tried}: {error}")
                        return None
                    try:
                        self._mend(own, error)
                    except database.Unusable as why:
                        self._give_up(own, f"it cannot be used: {why} ({error})")
                        return None

    def _own(self) -> _State:
        """This process's state. Of several threads that are the first in a fork, all get the same one."""
        pid = os.getpid()
        state = self._states.get(pid)
        if state is None:
            _ABANDONED.extend(self._states.values())
            state = self._states.setdefault(pid, _State(self.path is None))
        return state

    def _open(self, own: _State) -> sqlite3.Connection:
        if own.connection is None:
            assert self.path is not None
            own.seen = database.file_at(self.path)
            own.connection = database.connect(self.path)
            own.seen = database.file_at(self.path)  # another process may just have begun it anew
        return own.connection

    def _mend(self, own: _State, error: Exception) -> None:
        """Move a damaged file aside, once, so that a new one can be begun. Unusable if it cannot be done."""
        assert self.path is not None
        own.close()
        if own.mended:
            raise database.Unusable("it is damaged again")
        database.move_aside(self.path, own.seen)
        own.mended = True
        logger.warning("index %s: it is damaged (%s); moved aside and begun anew", self.path, error)

    def _give_up(self, own: _State, why: str) -> None:
        own.close()
        own.off = True
        logger.warning("index %s: %s; hashes are computed instead (%s)", self.path, why, self._otherwise)


class _State:
    """What one process has of an index: after a fork neither a connection may be used that the parent has, nor a lock
    that another of its threads held.
    """

    def __init__(self, off: bool) -> None:
        self.lock = threading.RLock()
        self.connection: sqlite3.Connection | None = None
        self.seen: tuple[int, int] | None = None
        self.off = off
        self.rest_until = 0.0
        self.mended = False

    def usable(self) -> bool:
        """Whether there is an index, and it is not at rest."""
        return not self.off and time.monotonic() >= self.rest_until

    def close(self) -> None:
        with self.lock:
            connection, self.connection = self.connection, None
            if connection is not None:
                _close(connection)


_ABANDONED: Final[list[_State]] = []
"""What parent processes have: never closed, as they go on using it, and never used."""


def _close(connection: sqlite3.Connection) -> None:
    import sqlite3

    with contextlib.suppress(sqlite3.Error):
        connection.close()


def _transaction(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], _T]) -> _T:
    import sqlite3

    try:
        # Within: an interrupt that comes right after it would leave all others locked out.
        connection.execute("BEGIN IMMEDIATE")
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    return result


def _dated(ranges: Iterable[FileRange]) -> set[int]:
    """The files of ``ranges`` that could not be written to without their times telling."""
    fds = {each.fd for each in ranges if each.dated}
    return fds - written_through_mappings(fds)


def _unchanged(fd: int, before: FileIdentity) -> bool:
    try:
        return before.settled and before.same(identity_of(fd))
    except OSError:
        return False


# What the rows hold.


def _signed(value: int) -> int:
    """The lowest 64 bits of a number as SQLite has it, with a sign: times (ns) may have more, after the year 2554. Two
    of a file are taken for one only if they lie 584 years apart.
    """
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _key(identity: FileIdentity) -> tuple[int, ...]:
    return tuple(_signed(value) for value in identity[:5])


def _seal(numbers: Sequence[int], *data: bytes) -> bytes:
    """A checksum over what a row says, and of which file: SQLite would not notice a flipped bit, and a wrong hash would
    have a server take other bytes for the tensor's.
    """
    head = struct.pack(f"<{len(numbers) + len(data) + 1}q", len(numbers), *numbers, *map(len, data))
    return blake3(head + b"".join(data)).digest(length=8)


def _sealed(seal: object, numbers: Sequence[int], *data: bytes) -> bool:
    """Whether a row is what was written, down to the types of its columns."""
    try:
        return seal == _seal(numbers, *data)
    except (struct.error, TypeError):
        return False


def _row(key: Sequence[int], each: FileRange, tensor: str, hashes: Hashes) -> tuple[int | bytes, ...]:
    """The columns of a range of the file ``key``, but for the file's id: the seal binds it to the file's identity."""
    numbers = (each.offset, each.nbytes, _signed(hashes.fnv1a))
    data = (hashes.blake3, tensor.encode("utf-8", "surrogatepass"))
    return (*numbers, *data, _seal((*key, *numbers), *data))


def _rows_of(connection: sqlite3.Connection, file: int, key: Sequence[int]) -> Iterator[tuple[int, int, bytes, Hashes]]:
    """Offset, size, tensor and hashes of the sound rows of a file, by their offsets."""
    for offset, nbytes, fnv1a, digest, tensor, seal in connection.execute(
        "SELECT offset, nbytes, fnv1a, blake3, tensor, seal FROM hashes WHERE file = ? ORDER BY offset, nbytes", (file,)
    ):
        if _sealed(seal, (*key, offset, nbytes, fnv1a), digest, tensor):
            yield offset, nbytes, tensor, Hashes(fnv1a & (1 << 64) - 1, digest)


def _rows(
    connection: sqlite3.Connection, identities: Mapping[int, FileIdentity]
) -> tuple[dict[tuple[int, int, int], Hashes], list[int]]:
    """The sound rows of all files by (fd, offset, nbytes), and the files whose use was noted more than a day ago."""
    rows: dict[tuple[int, int, int], Hashes] = {}
    old: set[int] = set()
    now = int(time.time())
    for fd, identity in identities.items():
        key = _key(identity)
        for file, path, seal, seen in connection.execute(
            "SELECT id, path, seal, seen FROM files"
            " WHERE device = ? AND inode = ? AND size = ? AND mtime_ns = ? AND ctime_ns = ?",
            key,
        ):
            if not _sealed(seal, (file, *key), path):
                continue  # `owners` could not name it: hashed once more, it is recorded anew
            if not isinstance(seen, int) or abs(now - seen) > _DAY:
                old.add(file)
            for offset, nbytes, _, hashes in _rows_of(connection, file, key):
                rows[fd, offset, nbytes] = hashes
    return rows, sorted(old)


def _note_seen(connection: sqlite3.Connection, files: Sequence[int]) -> None:
    now = int(time.time())
    connection.executemany("UPDATE files SET seen = ? WHERE id = ?", [(now, file) for file in files])


def _store_all(
    connection: sqlite3.Connection, files: Iterable[tuple[FileIdentity, Sequence[tuple[FileRange, str, Hashes]]]]
) -> int:
    now = int(time.time())
    stored = sum(_store(connection, identity, entries, now) for identity, entries in files)
    _bound(connection, now)
    return stored


def _store(
    connection: sqlite3.Connection,
    identity: FileIdentity,
    entries: Sequence[tuple[FileRange, str, Hashes]],
    now: int,
) -> int:
    key = _key(identity)
    path = os.fsencode(os.path.abspath(entries[0][0].path)) if entries[0][0].path else b""
    file, others = None, []
    for found, *times, old_path, seal in connection.execute(
        "SELECT id, size, mtime_ns, ctime_ns, path, seal FROM files WHERE device = ? AND inode = ?", key[:2]
    ):
        if file is None and tuple(times) == key[2:] and _sealed(seal, (found, *key), old_path):
            file = found
        else:
            others.append(found)
    replaced = connection.execute("SELECT id FROM files WHERE path = ? AND path != x'' AND id IS NOT ?", (path, file))
    _drop(connection, [*others, *(row[0] for row in replaced.fetchall())])
    if file is None:
        file = connection.execute(
            "INSERT INTO files (device, inode, size, mtime_ns, ctime_ns, path, seen, seal)"
            " VALUES (?, ?, ?, ?, ?, x'', 0, x'')",
            key,
        ).lastrowid
        assert file is not None
    # The path may be a new one.
    connection.execute(
        "UPDATE files SET path = ?, seen = ?, seal = ? WHERE id = ?", (path, now, _seal((file, *key), path), file)
    )
    rows = [(file, *_row(key, *entry)) for entry in entries]
    connection.executemany(
        "INSERT OR REPLACE INTO hashes (file, offset, nbytes, fnv1a, blake3, tensor, seal)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        rows,
    )
    return len(rows)


def _drop(connection: sqlite3.Connection, files: Iterable[int]) -> None:
    for file in files:
        connection.execute("DELETE FROM hashes WHERE file = ?", (file,))
        connection.execute("DELETE FROM files WHERE id = ?", (file,))


def _bound(connection: sqlite3.Connection, now: int) -> None:
    """Drop files not seen for long, and those longest not seen while there are too many rows."""
    old = connection.execute("SELECT id FROM files WHERE seen < ?", (now - _KEPT_DAYS * _DAY,)).fetchall()
    _drop(connection, [row[0] for row in old])
    over = connection.execute("SELECT count(*) FROM hashes").fetchone()[0] - _MOST_ROWS
    while over > 0:
        row = connection.execute("SELECT id FROM files ORDER BY seen, id LIMIT 1").fetchone()
        if row is None:
            return
        over -= connection.execute("SELECT count(*) FROM hashes WHERE file = ?", row).fetchone()[0]
        _drop(connection, [row[0]])


def _owners(connection: sqlite3.Connection) -> dict[int, list[Owner]]:
    files = [
        (path, file, key)
        for file, *key, path, seal in connection.execute(
            "SELECT id, device, inode, size, mtime_ns, ctime_ns, path, seal FROM files"
        )
        if _sealed(seal, (file, *key), path)
    ]
    owners: dict[int, list[Owner]] = {}
    for path, file, key in sorted(files):
        for _, nbytes, tensor, hashes in _rows_of(connection, file, key):
            owner = Owner(os.fsdecode(path), tensor.decode("utf-8", "surrogatepass"), nbytes, hashes.blake3)
            owners.setdefault(hashes.fnv1a, []).append(owner)
    return owners
