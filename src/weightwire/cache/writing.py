"""One entry being written: under a temporary name first, in its place once all of it is on the disk."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from weightwire.cache.store import TensorCache

__all__ = ["TEMP_NAME", "CacheWriter", "sweep"]

logger = logging.getLogger(__name__)

_TEMP_PREFIX: Final = ".weightwire-"
_TEMP_SUFFIX: Final = ".tmp"
TEMP_NAME: Final = re.compile(r"\.weightwire-[a-z0-9_]{8}\.tmp", re.ASCII)


class CacheWriter:
    """One entry being written under a temporary name in the cache's directory; a context manager.

    `write` the payload in order, then `commit`. Leaving the block without a commit removes the temporary file. A
    failure of the disk is logged by the cache, turns the writer off and makes `commit` return False; nothing is
    raised.
    """

    def __init__(self, cache: TensorCache) -> None:
        self._cache = cache
        self._fd = -1
        self._temp = ""
        try:
            while self._fd < 0:
                self._begin()
        except OSError as error:
            cache.lost("making a temporary file", error)

    def _begin(self) -> None:
        try:
            fd, temp = self._make()
        except FileNotFoundError:
            if not self._cache.remake():
                raise
            fd, temp = self._make()
        self._cache.in_use()
        with contextlib.suppress(OSError):  # a file system without locks: nobody can take it for abandoned there
            fcntl.flock(fd, fcntl.LOCK_EX)
        # Somebody who starts may have looked at the file before it was locked, and removed it.
        if os.fstat(fd).st_nlink:
            self._fd, self._temp = fd, temp
        else:
            os.close(fd)

    def _make(self) -> tuple[int, str]:
        # mkstemp opens with 0600; the entry gets ordinary permissions when it is put in place.
        return tempfile.mkstemp(prefix=_TEMP_PREFIX, suffix=_TEMP_SUFFIX, dir=self._cache.directory)

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort()

    def write(self, chunk: Buffer) -> None:
        """Append ``chunk``."""
        if self._fd < 0:
            return
        try:
            with memoryview(chunk) as whole, whole.cast("B") as view:
                done = 0
                while done < view.nbytes:
                    done += os.write(self._fd, view[done : done + (64 << 20)])
        except OSError as error:
            self._cache.lost("writing", error)
            self.abort()

    @property
    def fd(self) -> int:
        """The temporary file, open for writing and reading; -1 when there is none (any more)."""
        return self._fd

    def commit(self, content_hash: int, still: Callable[[], bool] = lambda: True) -> bool:
        """Sync the file and give it the name of ``content_hash``, replacing a file or link of that name.

        ``still`` is asked after the sync, which may take long, whether the entry is still wanted. Whether the entry is
        in place.
        """
        if self._fd < 0:
            return False
        path = self._cache.path_for(content_hash)
        try:
            os.fchmod(self._fd, 0o666 & ~_umask())
            os.fsync(self._fd)
            if not still():
                self.abort()
                return False
            os.replace(self._temp, path)
        except OSError as error:
            if still():  # who wants it no more may have unlinked it
                self._cache.lost(f"storing {path.name}", error)
            self.abort()
            return False
        self._temp = ""
        self.abort()
        self._cache.written()
        return True

    def abort(self) -> None:
        """Close, and remove the temporary file unless it was committed. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        temp, self._temp = self._temp, ""
        if temp:
            with contextlib.suppress(OSError):
                os.unlink(temp)

    def unlink(self) -> None:
        """Remove the temporary file's name and nothing else, from another thread than the one that writes: for who
        cannot wait for the disk. What is written is lost.
        """
        if self._temp:
            with contextlib.suppress(OSError):
                os.unlink(self._temp)


def sweep(directory: Path) -> int:
    """Remove temporary files nobody is writing any more: a writer holds a lock on its own, as long as it lives. How
    many that were; other processes may do the same meanwhile.
    """
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if TEMP_NAME.fullmatch(entry.name)]
    except OSError as error:
        logger.debug("cache %s cannot be looked through: %s", directory, error)
        return 0
    removed = 0
    for name in names:
        path = directory / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
                logger.info("cache %s: removed %s, which was left half written", directory, name)
        except OSError:
            pass  # in use, or gone meanwhile
        finally:
            os.close(fd)
    return removed


def _umask() -> int:
    # Reading the umask means setting it, which is not safe with threads; Linux shows it without.
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except (OSError, ValueError):
        pass
    return 0o022
