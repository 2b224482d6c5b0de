"""A directory of tensor payloads, laid out as stock ggml-rpc servers lay it out, so that both can share it.

An entry is a regular file whose name is the 16 lower-case hexadecimal digits of the FNV-1a 64 of its content, and
whose content is the payload and nothing else (docs/protocol.md, section 9). Entries are written beside their place,
synced and renamed into it, so that a reader sees a whole entry or none; nothing here trusts that the others do the
same.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weightwire.cache.directory import checked_directory, entry_name, make_directory, unmake_directories
from weightwire.cache.quarantine import move_aside
from weightwire.cache.reading import EntryChanged
from weightwire.cache.writing import CacheWriter, sweep
from weightwire.config import CACHE_VERIFY_MODES, shown
from weightwire.errors import ConfigError, WeightwireError
from weightwire.hashing import hash_payloads
from weightwire.ranges import FileRange
from weightwire.transport.memory import first_difference

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["NOT_ITS_NAME", "TensorCache", "same_bytes"]

logger = logging.getLogger(__name__)

NOT_ITS_NAME: Final = "its content is not what its name says"

_PIECE: Final = 1 << 20
_REMEMBERED: Final = 4096

_BAD_ENTRY: Final = frozenset((errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP, errno.ENXIO, errno.ENODEV))
"""What opening or reading says of the entry itself; everything else (too many open files, say) may be over soon."""


class TensorCache:
    """The entries in ``directory``, which is made if it is missing.

    What a process that was killed left half written there is removed; other names than its own are never touched.
    ``verify`` is what a server checks of an entry before it says that it has it: ``"content"``, size and hash, or
    ``"size"`` alone. Raises CacheDirectoryError if the directory cannot be made, ConfigError if it is something else,
    or for another ``verify``. Safe to use from several threads, processes and servers at once. Losing an entry is never
    an error: what cannot be read is a miss, what cannot be written is logged (at WARNING; further failures at DEBUG
    until an entry could be written again) and forgotten. A bad entry is moved to quarantine
    (`weightwire.cache.quarantine`).
    """

    def __init__(self, directory: str | os.PathLike[str], *, verify: str = "content") -> None:
        self.directory = checked_directory(directory)
        if verify not in CACHE_VERIFY_MODES:
            raise ConfigError(f"verify={shown(verify)}", hint=f"one of {', '.join(CACHE_VERIFY_MODES)}")
        self.verify = verify
        self._made = make_directory(self.directory)
        self._absolute = self.directory
        with contextlib.suppress(OSError):  # the current directory has been removed
            self._absolute = Path(os.path.abspath(self.directory))
        self._found = self.directory not in self._made
        """Whether somebody else made the directory, and nothing has been written to it here yet."""
        self.quarantined = 0
        """How many entries this object has moved to quarantine."""
        self._counting = threading.Lock()
        self._complained = False
        self._stuck: set[tuple[int, str]] = set()
        self._sound: set[tuple[int, ...]] = set()
        sweep(self.directory)

    def __repr__(self) -> str:
        return f"TensorCache({str(self.directory)!r})"

    def unmake(self) -> None:
        """Remove the directories that were made for this object and are empty: what it was made for cannot begin."""
        unmake_directories(self._made)

    def remake(self) -> bool:
        """Make the directory again if whoever made it may have unmade it: another server, say, that could not begin.
        One that goes later has been removed on purpose. Whether it is there.
        """
        if not self._found:
            return False
        try:
            make_directory(self._absolute)
        except WeightwireError:
            return False
        return True

    def in_use(self) -> None:
        """Note that something has been written to the directory: nobody unmakes it any more."""
        self._found = False

    def path_for(self, content_hash: int) -> Path:
        """Where the entry for ``content_hash`` is or would be."""
        return self.directory / entry_name(content_hash)

    def lookup(self, content_hash: int, nbytes: int) -> int | None:
        """An open, read-only file descriptor of the entry if it is a regular file of exactly ``nbytes`` bytes, else
        None.

        The caller closes it. The content is *not* checked. What has the entry's name and is no readable regular file
        goes to quarantine; a file of another size is a miss like any other (`size_of` tells them apart).
        """
        fd = self._open(content_hash)
        if fd is None:
            return None
        if os.fstat(fd).st_size == nbytes:
            return fd
        os.close(fd)
        return None

    def size_of(self, content_hash: int) -> int | None:
        """Bytes in the entry, or None if there is no regular file of its name. Logs nothing."""
        try:
            found = os.lstat(self.path_for(content_hash))
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def used(self, fd: int) -> None:
        """Note in the entry's time of access that it was of use just now: a file system leaves that out most times
        (``relatime`` in mount(8)). Its time of modification stays. Nothing if it cannot be noted.
        """
        with contextlib.suppress(OSError):
            os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))

    def quarantine(self, content_hash: int, reason: str, fd: int | None = None) -> bool:
        """Move a bad entry out of the way, saying why (at WARNING), so that the next push stores it anew.

        With ``fd``, an open descriptor of the bad file, only that file: one that replaced it meanwhile stays. What
        cannot be moved (a directory, or for want of permission) stays where it is, which is logged once for each name
        and reason. Whether it was moved.
        """
        return self._quarantine(content_hash, reason, os.fstat(fd) if fd is not None else None)

    def _quarantine(self, content_hash: int, reason: str, bad: os.stat_result | None) -> bool:
        path = self.path_for(content_hash)
        try:
            where = move_aside(path, lambda found: bad is None or os.path.samestat(found, bad))
        except OSError as error:
            why = error.strerror or str(error)
            self._once(content_hash, reason, "cache entry %s: %s; it cannot be moved away: %s", path, reason, why)
            return False
        if where is not None:
            with self._counting:
                self.quarantined += 1
            logger.warning("cache entry %s: %s; moved to %s", path, reason, where)
        return where is not None

    def failed(self, content_hash: int, fd: int, error: OSError) -> None:
        """Reading the open entry ``fd`` failed: to quarantine with it if that is the entry's fault, else log it."""
        if isinstance(error, EntryChanged) or error.errno in _BAD_ENTRY:
            self.quarantine(content_hash, f"it cannot be read: {error.strerror or error}", fd)
        else:
            logger.warning("cache entry %s cannot be read: %s", self.path_for(content_hash), error)

    def look_into(self, content_hash: int, nbytes: int, check: Callable[[], object] | None = None) -> None:
        """After a miss: if there is an entry of another size than ``nbytes``, find out whether it is a bad one, which
        would be missed until the tensor is stored anew, and move that to quarantine.

        No more than ``nbytes`` bytes are read, however long the entry is: a shorter one is bad if it does not hash to
        its name, a longer one if its start does, which is the tensor then, with something behind it. What is not found
        bad is left, and read only once. ``check`` is called as in `hash_payloads`.
        """
        size = self.size_of(content_hash)
        if size is None or size == nbytes:
            return
        fd = self.lookup(content_hash, size)
        if fd is None:
            return
        try:
            found = os.fstat(fd)
            length = min(size, nbytes)
            identity = (content_hash, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, length)
            if identity in self._sound:
                return
            actual = self._hash(content_hash, fd, length, check)
            if actual is None:
                return
            now = os.fstat(fd)
            if (now.st_size, now.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
                return  # a stock server is writing it: half of it says nothing
            if (actual == content_hash) is (size > nbytes):
                said = f"it has {size} bytes, where the tensor has {nbytes}" if size else "it is empty"
                self.quarantine(content_hash, said, fd)
                return
            if len(self._sound) >= _REMEMBERED:
                self._sound.clear()
            self._sound.add(identity)
        finally:
            os.close(fd)

    def proved(self, content_hash: int, fd: int, nbytes: int, check: Callable[[], object] | None = None) -> bool | None:
        """Whether the ``nbytes`` bytes of the open entry are what its name says; None if they cannot be read. If not,
        or None, it goes to quarantine. ``check`` is called as in `hash_payloads`.
        """
        actual = self._hash(content_hash, fd, nbytes, check)
        if actual is not None and actual != content_hash:
            self.quarantine(content_hash, NOT_ITS_NAME, fd)
        return None if actual is None else actual == content_hash

    def _hash(self, content_hash: int, fd: int, nbytes: int, check: Callable[[], object] | None) -> int | None:
        """The hash of the entry's first ``nbytes`` bytes; None, and it is in quarantine, if they cannot be read."""
        try:
            return hash_payloads([FileRange(fd, 0, nbytes, str(self.path_for(content_hash)))], check=check)[0]
        except WeightwireError as error:
            self.quarantine(content_hash, f"it cannot be read: {error}", fd)
            return None

    def writer(self) -> CacheWriter:
        """A new entry whose hash is not known yet; see `CacheWriter`. Never raises for what the disk does."""
        return CacheWriter(self)

    def holds(self, content_hash: int, payload: Buffer, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Whether the entry is there with exactly the bytes of ``payload``. Reads it; otherwise as `same_bytes`."""
        with memoryview(payload) as whole, whole.cast("B") as view:
            if self.size_of(content_hash) != view.nbytes:
                return False
            fd = self._open(content_hash)
            if fd is None:
                return False
            try:
                return same_bytes(fd, view, stopped)
            finally:
                os.close(fd)

    def holds_file(self, content_hash: int, fd: int, nbytes: int, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Whether the entry is there with exactly the ``nbytes`` bytes of the open file ``fd``. Any failure counts as
        no, and so does that it was ``stopped`` meanwhile.
        """
        if self.size_of(content_hash) != nbytes:
            return False
        entry = self._open(content_hash)
        if entry is None:
            return False
        try:
            for start in range(0, nbytes, _PIECE):
                if stopped():
                    return False
                piece = os.pread(fd, min(_PIECE, nbytes - start), start)
                if not piece or piece != os.pread(entry, len(piece), start):
                    return False
        except OSError:
            return False
        finally:
            os.close(entry)
        return True

    def _once(self, content_hash: int, what: str, message: str, *arguments: object) -> None:
        """Log at WARNING what stays true, once for each entry."""
        key = (content_hash, what)
        if key in self._stuck:
            return
        if len(self._stuck) >= _REMEMBERED:
            self._stuck.clear()
        self._stuck.add(key)
        logger.warning(message, *arguments)

    def sync_names(self) -> None:
        """Have the names of new entries on the disk, too: until then a crash may lose them. Never raises."""
        with contextlib.suppress(OSError):
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def written(self) -> None:
        """Note that an entry could be written: the next failure is news again."""
        self._complained = False

    def lost(self, what: str, error: OSError) -> None:
        """Log that an entry could not be written: at WARNING if that is new, else at DEBUG."""
        level = logging.DEBUG if self._complained else logging.WARNING
        self._complained = True
        logger.log(
            level,
            "cache %s: %s failed (%s); the tensor is served but not cached; not reported again until a write succeeds",
            self.directory,
            what,
            error.strerror or error,
        )

    def _open(self, content_hash: int) -> int | None:
        path = self.path_for(content_hash)
        # O_NONBLOCK: opening a fifo of that name must not wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        bad: os.stat_result | None = None
        while True:
            try:
                fd = os.open(path, flags)
                break
            except FileNotFoundError:
                return None
            except OSError as error:
                why = (
                    "it is a symbolic link" if error.errno == errno.ELOOP else f"it cannot be opened: {error.strerror}"
                )
                if error.errno not in _BAD_ENTRY:
                    self._once(content_hash, why, "cache entry %s: %s", path, why)
                    return None
            if bad is not None:
                self._quarantine(content_hash, why, bad)
                return None
            # Looked at before it is tried again: what goes to quarantine is no good one that has replaced it meanwhile.
            try:
                bad = os.lstat(path)
            except FileNotFoundError:
                return None
            except OSError:
                self._quarantine(content_hash, why, None)  # which says that it cannot
                return None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            self.quarantine(content_hash, "it is not a regular file", fd)
            os.close(fd)
            return None
        return fd


def same_bytes(fd: int, payload: Buffer, stopped: Callable[[], bool] = lambda: False) -> bool:
    """Whether the file starts with exactly the bytes of ``payload``. Any failure to read it counts as no, and so does
    that it was ``stopped`` meanwhile.
    """
    with memoryview(payload) as whole, whole.cast("B") as view:
        for start in range(0, view.nbytes, _PIECE):
            if stopped():
                return False
            piece = view[start : start + _PIECE]
            try:
                found = os.pread(fd, piece.nbytes, start)
            except OSError:
                return False
            if len(found) != piece.nbytes or first_difference(found, piece) >= 0:
                return False
    return True
