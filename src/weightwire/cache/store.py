"""A directory of tensor payloads, laid out as stock ggml-rpc servers lay it out, so that both can share it.

An entry is a regular file whose name is the 16 lower-case hexadecimal digits of the FNV-1a 64 of its content, and
whose content is the payload and nothing else (docs/protocol.md, section 9). Entries are written beside their place,
synced and renamed into it, so that a reader sees a whole entry or none; nothing here trusts that the others do the
same.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from weightwire.errors import ConfigError
from weightwire.transport.memory import first_difference

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["CacheWriter", "TensorCache", "checked_directory", "default_directory", "entry_name"]

logger = logging.getLogger(__name__)

_PIECE: Final = 1 << 20
_TEMP_PREFIX: Final = ".weightwire-"
_TEMP_SUFFIX: Final = ".tmp"
_TEMP_NAME: Final = re.compile(r"\.weightwire-[a-z0-9_]{8}\.tmp", re.ASCII)


def entry_name(content_hash: int) -> str:
    """The file name of the entry for ``content_hash``, a 64-bit FNV-1a. ValueError if it does not fit 64 bits."""
    if not 0 <= content_hash < 1 << 64:
        raise ValueError(f"{content_hash} is not a 64-bit hash")
    return f"{content_hash:016x}"


def default_directory() -> Path:
    """Where a stock server keeps its cache on Linux.

    ``$LLAMA_CACHE/rpc``, else ``$XDG_CACHE_HOME/llama.cpp/rpc``, else ``~/.cache/llama.cpp/rpc``
    (docs/protocol.md, section 9). An empty variable counts as unset.
    """
    if given := os.environ.get("LLAMA_CACHE"):
        return Path(given) / "rpc"
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "llama.cpp" / "rpc"
    return Path.home() / ".cache" / "llama.cpp" / "rpc"


def checked_directory(directory: str | os.PathLike[str]) -> Path:
    """``directory`` as a path. ConfigError if no file could have such a name, or it is empty."""
    text: object = None
    with contextlib.suppress(TypeError):
        text = os.fspath(directory)
    if not isinstance(text, str):
        raise ConfigError(f"cache directory {directory!r} is not a path in text form")
    if not text.strip() or "\0" in text:
        raise ConfigError(
            f"cache directory {text!r} cannot be the name of a directory", hint='"." is the current directory'
        )
    return Path(text)


class TensorCache:
    """The entries in ``directory``, which is made if it is missing.

    What a process that was killed left half written there is removed; other names than its own are never touched.
    Raises ConfigError if the directory cannot be made or is something else. Safe to use from several threads, processes
    and servers at once. Losing an entry is never an error: what cannot be read is a miss, what cannot be written is
    logged (at WARNING; further failures at DEBUG until an entry could be written again) and forgotten.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = checked_directory(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cache directory {self.directory} cannot be made: {error.strerror or error}",
                hint="name a directory this user may write to",
            ) from error
        self._complained = threading.Event()
        self._sweep()

    def __repr__(self) -> str:
        return f"TensorCache({str(self.directory)!r})"

    def path_for(self, content_hash: int) -> Path:
        """Where the entry for ``content_hash`` is or would be."""
        return self.directory / entry_name(content_hash)

    def lookup(self, content_hash: int, nbytes: int) -> int | None:
        """An open, read-only file descriptor of the entry if it is a regular file of exactly ``nbytes`` bytes, else
        None.

        The caller closes it. The content is *not* checked. What has the entry's name and is no regular file is logged
        and left alone; a file of another size is a miss like any other (`size_of` tells them apart).
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

    def discard(self, content_hash: int, reason: str) -> None:
        """Remove a bad entry, saying why (at WARNING), so that the next push stores it anew.

        Only files and symbolic links are removed; a directory of that name is left alone.
        """
        path = self.path_for(content_hash)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cache entry %s: %s; it cannot be removed: %s", path, reason, error.strerror or error)
        else:
            logger.warning("cache entry %s: %s; removed", path, reason)

    def writer(self) -> CacheWriter:
        """A new entry whose hash is not known yet; see `CacheWriter`. Never raises for what the disk does."""
        return CacheWriter(self)

    def save(self, content_hash: int, chunks: Iterable[Buffer]) -> bool:
        """Store the payload made of ``chunks`` (in order) under ``content_hash``, which the caller computed from it.

        True if the entry is in place and on the disk. False if it could not be written, which is logged and leaves
        nothing.
        """
        with self.writer() as writer:
            for chunk in chunks:
                writer.write(chunk)
            return writer.commit(content_hash)

    def holds(self, content_hash: int, payload: Buffer) -> bool:
        """Whether the entry is there with exactly the bytes of ``payload``. Reads it; any failure counts as no."""
        with memoryview(payload) as whole, whole.cast("B") as view:
            if self.size_of(content_hash) != view.nbytes:
                return False
            fd = self._open(content_hash)
            if fd is None:
                return False
            try:
                return _same(fd, view)
            except OSError:
                return False
            finally:
                os.close(fd)

    def written(self) -> None:
        """Note that an entry could be written: the next failure is news again."""
        self._complained.clear()

    def lost(self, what: str, error: OSError) -> None:
        """Log that an entry could not be written: at WARNING if that is new, else at DEBUG."""
        level = logging.DEBUG if self._complained.is_set() else logging.WARNING
        self._complained.set()
        logger.log(
            level,
            "cache %s: %s failed (%s); the tensor is served but not cached; not reported again until a write succeeds",
            self.directory,
            what,
            error.strerror or error,
        )

    def _sweep(self) -> None:
        """Remove temporary files nobody is writing any more: a writer holds a lock on its own, as long as it lives."""
        try:
            with os.scandir(self.directory) as entries:
                names = [entry.name for entry in entries if _TEMP_NAME.fullmatch(entry.name)]
        except OSError as error:
            logger.debug("cache %s cannot be looked through: %s", self.directory, error)
            return
        for name in names:
            path = self.directory / name
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    logger.info("cache %s: removed %s, which was left half written", self.directory, name)
            except OSError:
                pass  # in use, or gone meanwhile
            finally:
                os.close(fd)

    def _open(self, content_hash: int) -> int | None:
        path = self.path_for(content_hash)
        # O_NONBLOCK: opening a fifo of that name must not wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            if path.is_symlink():
                logger.warning("cache entry %s is a symbolic link; not used", path)
            else:
                logger.warning("cache entry %s cannot be opened: %s", path, error.strerror or error)
            return None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            logger.warning("cache entry %s is not a regular file; left alone", path)
            return None
        return fd


def _same(fd: int, view: memoryview) -> bool:
    for start in range(0, view.nbytes, _PIECE):
        piece = view[start : start + _PIECE]
        found = os.pread(fd, piece.nbytes, start)
        if len(found) != piece.nbytes or first_difference(found, piece) >= 0:
            return False
    return True


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
        # mkstemp opens with 0600; the entry gets ordinary permissions when it is put in place.
        fd, temp = tempfile.mkstemp(prefix=_TEMP_PREFIX, suffix=_TEMP_SUFFIX, dir=self._cache.directory)
        with contextlib.suppress(OSError):  # a file system without locks: nobody can take it for abandoned there
            fcntl.flock(fd, fcntl.LOCK_EX)
        # Somebody who starts may have looked at the file before it was locked, and removed it.
        if os.fstat(fd).st_nlink:
            self._fd, self._temp = fd, temp
        else:
            os.close(fd)

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def commit(self, content_hash: int) -> bool:
        """Sync the file and give it the name of ``content_hash``, replacing a file or link of that name."""
        if self._fd < 0:
            return False
        path = self._cache.path_for(content_hash)
        try:
            os.fchmod(self._fd, 0o666 & ~_umask())
            os.fsync(self._fd)
            os.replace(self._temp, path)
        except OSError as error:
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
