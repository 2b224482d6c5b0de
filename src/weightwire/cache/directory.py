"""Where a cache directory is, and what the files in it are called."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from weightwire.errors import ConfigError

__all__ = ["checked_directory", "default_directory", "entry_name", "make_directory", "unmake_directories"]


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

    Raises OSError where that cannot be, and then has made none.
    """
    made: list[Path] = []
    try:
        _make(directory, made)
    except BaseException:
        unmake_directories(made)
        raise
    return made


def _make(directory: Path, made: list[Path]) -> None:
    try:
        try:
            os.mkdir(directory)
        except FileNotFoundError:
            if directory.parent == directory:
                raise
            _make(directory.parent, made)
            os.mkdir(directory)
    except OSError:
        # Not FileExistsError alone: a directory that is there may lie on a file system that is read-only.
        if not directory.is_dir():
            raise
    else:
        made.append(directory)


def unmake_directories(made: list[Path]) -> None:
    """Remove what `make_directory` made, but for what is not empty any more. Never raises."""
    for directory in reversed(made):
        with contextlib.suppress(OSError):
            directory.rmdir()
