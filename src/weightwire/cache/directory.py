"""Where a cache directory is, and what the files in it are called."""

from __future__ import annotations

import contextlib
import errno
import os
import reprlib
from pathlib import Path
from typing import Final

from weightwire.errors import CacheDirectoryError, ConfigError

__all__ = [
    "WRITABLE",
    "checked_directory",
    "default_directory",
    "entry_name",
    "make_directory",
    "unmake_directories",
]

WRITABLE: Final = "name a directory that this user may write to"
"""What to do where a directory may not be written to."""

_ABOUT: Final = {
    errno.EACCES: WRITABLE,
    errno.EPERM: WRITABLE,
    errno.EROFS: "its file system is mounted read-only; name a directory that this user may write to",
    errno.ENOSPC: "make room there, or name a directory on another file system",
    errno.EDQUOT: "make room there, or name a directory on another file system",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ELOOP: "symbolic links there lead in a circle: name a directory that they are not part of",
    errno.EMLINK: "the directory above it has as many as it can hold: name another one",
}


_ATTEMPTS: Final = 1000
"""Another process that made it, or what it lies in, may have unmade that by the next call: each time takes one more.
Processes that do nothing else now and then keep in step for a dozen times. All of them take milliseconds where there is
no hope.
"""


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
    if not text.strip() or "\0" in text or not _encodes(text):
        raise ConfigError(
            f"cache directory {text!r} cannot be the name of a directory", hint='"." is the current directory'
        )
    return Path(text)


def _encodes(text: str) -> bool:
    """Whether ``text`` can be made the bytes of a name; a lone surrogate may have none."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def make_directory(directory: Path) -> list[Path]:
    """Make ``directory`` and what it lies in, if they are missing; returns those that were made, outermost first.

    Raises ConfigError if something else has its name, CacheDirectoryError where the system does not let it be made;
    none is left then that was not there before.
    """
    made: list[Path] = []
    try:
        _make(directory, made)
    except OSError as error:
        unmake_directories(made)
        raise _not_made(directory, error) from error
    except BaseException:
        unmake_directories(made)
        raise
    return made


def _not_made(directory: Path, error: OSError) -> ConfigError:
    """What ``error`` says of the directory that was to be made, and what to do about it."""
    if error.errno == errno.EEXIST and os.path.lexists(directory):
        why = ""
        with contextlib.suppress(OSError):  # no link, or it has gone by now
            target = os.readlink(directory)
            why = "" if os.path.exists(directory) else f", but a link to {target}, which leads nowhere"
        return ConfigError(
            f"cache directory {directory} is not a directory{why}", hint="name a directory, or a new path to create one"
        )
    shown = reprlib.repr(str(directory)) if error.errno == errno.ENAMETOOLONG else str(directory)
    reason = error.strerror or str(error)
    hint = _ABOUT.get(error.errno or 0, "")
    above = next((each for each in directory.parents if os.path.lexists(each)), directory)
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and not os.path.isdir(above):
        reason, hint = f"{above} is not a directory", "name a directory, or a new path that leads through none but such"
    elif error.errno == errno.ENOENT:
        # Where nothing but the directory itself is missing, either nobody can make one there (/proc), or it would lie
        # in one that has been removed.
        gone = not directory.is_absolute() and not _current_is_there()
        hint = "the current directory has been removed: name an absolute path" if gone else "name another place for it"
    return CacheDirectoryError(
        f"cannot create cache directory {shown}: {reason}", path=str(directory), errno=error.errno, hint=hint
    )


def _current_is_there() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _make(directory: Path, made: list[Path]) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            os.mkdir(directory)
        except FileNotFoundError:
            if directory.parent == directory or attempt == _ATTEMPTS - 1:
                raise
            _make(directory.parent, made)
        except OSError as error:
            # Not FileExistsError alone: a directory that is there may lie on a file system that is read-only.
            if directory.is_dir():
                return
            if error.errno != errno.EEXIST or attempt == _ATTEMPTS - 1:
                raise
        else:
            made.append(directory)
            return


def unmake_directories(made: list[Path]) -> None:
    """Remove what `make_directory` made, but for what is not empty any more. Never raises."""
    for directory in reversed(made):
        with contextlib.suppress(OSError):
            directory.rmdir()
