"""Every way in which an entry of a tensor cache can be bad, made on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def _symlink(entry: Path, data: bytes) -> None:
    # To bytes of the right size and the wrong content, somewhere else.
    target = foreign(entry)
    target.parent.mkdir()
    target.write_bytes(bytes(len(data)))
    entry.symlink_to(target)


def _directory(entry: Path, data: bytes) -> None:
    entry.mkdir()
    (entry / "kept").write_bytes(b"kept")


def _unreadable(entry: Path, data: bytes) -> None:
    entry.write_bytes(data)
    entry.chmod(0)


def _flipped(entry: Path, data: bytes) -> None:
    middle = len(data) // 2
    entry.write_bytes(data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :])


def foreign(entry: Path) -> Path:
    """What a symlink in the place of ``entry`` leads to."""
    return entry.parent.parent / "foreign" / entry.name


#: How to put a bad entry where the good one, of the given bytes, would be.
BAD_ENTRIES: dict[str, Callable[[Path, bytes], object]] = {
    "empty": lambda entry, data: entry.write_bytes(b""),
    "truncated": lambda entry, data: entry.write_bytes(data[: len(data) // 2]),
    "one byte short": lambda entry, data: entry.write_bytes(data[:-1]),
    "oversized": lambda entry, data: entry.write_bytes(data + b"\0"),
    "flipped": _flipped,
    "unreadable": _unreadable,
    "directory": _directory,
    "symlink": _symlink,
}
