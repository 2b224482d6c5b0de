"""Whether the entries of a cache directory are what their names say, and what to do with those that are not."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from weightwire.cache.inspect import Entry, entry_kind, list_entries
from weightwire.cache.pool import run_each, worker_count
from weightwire.cache.quarantine import move_aside
from weightwire.config import checked_progress
from weightwire.errors import ConfigError, ModelError
from weightwire.index import FileIdentity, Hashes, IndexChoice, Owner, hash_with_digest, identity_of, index_for
from weightwire.ranges import FileRange

__all__ = ["BadEntry", "CacheReport", "UncheckedEntry", "verify_cache"]

_TRIES: Final = 3
_FILES: Final = frozenset({"content", "truncated", "collision", "unreadable"})
_CROWDED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What says nothing about an entry: that too many are open at once."""

_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class BadEntry:
    """An entry that must not be used: its ``name``, what is wrong with it (``kind``, one of ``"content"``,
    ``"truncated"``, ``"collision"``, ``"unreadable"``, or what it is instead of a file), a sentence (``reason``), and
    what was done (``action``: ``"none"``, ``"quarantined"``, ``"removed"``, ``"failed"``).
    """

    name: str
    kind: str
    reason: str
    nbytes: int = 0
    action: str = "none"

    @property
    def is_file(self) -> bool:
        """Whether it is a file, which can be moved or removed; anything else is left to the user."""
        return self.kind in _FILES


@dataclass(frozen=True, slots=True)
class UncheckedEntry:
    """An entry that this process could not open, so that nothing is known of it: its ``name``, a sentence (``reason``),
    and the system's ``errno``.
    """

    name: str
    reason: str
    errno: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What checking a directory found.

    ``entries`` (``bytes``) were read; ``digests`` of them were compared by BLAKE3 with the index, too; ``bad`` must
    not be used, in order of their names. ``changing`` are the names of entries that something wrote to while they were
    read, or replaced at each attempt to open them, which says nothing yet, and ``unchecked`` those that could not be
    opened, though they may be sound: another user's, or one too many for the limit of open files. ``others`` are names
    that are no entry's; nothing reads those.
    """

    directory: str
    entries: int
    bytes: int
    digests: int
    bad: tuple[BadEntry, ...]
    changing: tuple[str, ...]
    others: tuple[str, ...]
    unchecked: tuple[UncheckedEntry, ...] = ()


@dataclass(slots=True)
class _Finding:
    entry: Entry
    bad: BadEntry | None = None
    digest: bool = False
    state: Literal["read", "gone", "changing", "unchecked"] = "read"
    refused: OSError | None = None
    """Why it is unchecked, or could not be moved."""

    @property
    def crowded(self) -> bool:
        """Whether it would be another one with fewer files open."""
        return self.refused is not None and self.refused.errno in _CROWDED


def verify_cache(
    directory: str | os.PathLike[str] | None = None,
    *,
    threads: int | None = None,
    bad: Literal["keep", "quarantine", "remove"] = "keep",
    index: IndexChoice = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> CacheReport:
    """Read every entry of the cache ``directory`` (None: a stock server's) and compare its hash with its name.

    ``threads`` as for `seed`. ``bad`` says what becomes of a file that is not what its name says: it stays, goes to
    quarantine (see `weightwire.cache.quarantine`), or is removed; either takes the name only, so that a server that has
    it open reads on. A file that its owner alone may read is unchecked, and stays, unless this is its owner; so is one
    for which the system has no descriptor (after a second try, on this thread and one at a time). A directory, a link,
    a fifo or the like of an entry's name is reported and never opened or touched. ``index`` (a path or `HashIndex`;
    None: the user's; False: none) knows tensors by their BLAKE3, too: an entry that hashes to its name but is another
    content is a collision. ``progress(name, done, total)``, in bytes, is called on this thread.

    Raises ConfigError if the directory is not there or an argument cannot be meant, CacheError if it cannot be listed.
    """
    if bad not in ("keep", "quarantine", "remove"):
        raise ConfigError(f"bad: {bad!r} is not one of keep, quarantine, remove")
    count = worker_count(threads)
    checked_progress(progress)
    with index_for(index) as known:
        owners: Mapping[int, list[Owner]] = known.owners() if known is not None else {}
    listing = list_entries(directory, index=False)
    total = sum(entry.nbytes for entry in listing.entries)
    findings: list[_Finding] = []
    crowded: list[Entry] = []
    done = 0

    def took(found: _Finding) -> None:
        nonlocal done
        findings.append(found)
        done += found.entry.nbytes
        if progress is not None:
            progress(found.entry.path.name, done, total)

    def look(entry: Entry, check: Callable[[], None]) -> _Finding:
        return _look(entry, owners.get(entry.content_hash, []), bad, check)

    def sorted_out(found: _Finding) -> None:
        if found.crowded:
            crowded.append(found.entry)
        else:
            took(found)

    # The largest first, so that no thread is left with one at the end.
    ordered = sorted(listing.entries, key=lambda entry: -entry.nbytes)
    run_each(ordered, look, count, took=sorted_out)
    run_each(crowded, look, 0, took=took)  # nobody else has a file open now
    read = [found for found in findings if found.state == "read"]
    wrong = [found.bad for found in findings if found.bad is not None]
    wrong += [
        BadEntry(name, kind, f"it is a {kind}, where a file is expected") for name, kind in listing.misplaced.items()
    ]
    return CacheReport(
        directory=str(listing.directory),
        entries=len(read),
        bytes=sum(found.entry.nbytes for found in read),
        digests=sum(found.digest for found in read),
        bad=tuple(sorted(wrong, key=lambda entry: entry.name)),
        changing=tuple(sorted(found.entry.path.name for found in findings if found.state == "changing")),
        others=tuple(listing.others),
        unchecked=tuple(
            sorted((_unchecked(found) for found in findings if found.state == "unchecked"), key=lambda each: each.name)
        ),
    )


def _look(entry: Entry, owners: list[Owner], bad: str, check: Callable[[], None]) -> _Finding:
    """Read one entry, again if something wrote to it meanwhile, and deal with it if it is bad."""
    name = entry.path.name
    for _ in range(_TRIES):
        seen = _status(entry.path)
        try:
            fd = _open(entry)
        except FileNotFoundError:
            return _Finding(entry, state="gone")
        except OSError as error:
            unopened = _unopened(entry, error, bad, seen)
            if unopened is None:
                continue
            return unopened
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                kind = entry_kind(status.st_mode)
                return _Finding(entry, BadEntry(name, kind, f"it is a {kind}, where a file is expected"))
            before = identity_of(fd)
            whose = [owner for owner in owners if owner.nbytes == status.st_size]
            digest = bool(whose)
            wrong: BadEntry | None
            try:
                hashes = hash_with_digest(FileRange(fd, 0, status.st_size, str(entry.path)), check, digest=digest)
            except ModelError as error:
                wrong = BadEntry(name, "unreadable", f"it cannot be read: {error.detail}", status.st_size)
            else:
                wrong = _judge(entry.content_hash, status.st_size, hashes, whose, owners)
            if not before.same(identity_of(fd)) and (wrong is not None or not _only_used(before, fd)):
                continue
            finding = _Finding(entry, wrong, digest=digest)
            if wrong is not None and bad != "keep":
                _act(finding, wrong, status, bad)
            return finding
        finally:
            os.close(fd)
    return _Finding(entry, state="changing")


def _open(entry: Entry) -> int:
    # Being checked is no use of an entry: it must not make it look recently used. Only its owner may ask for that.
    try:
        return os.open(entry.path, _OPEN | os.O_NOATIME)
    except PermissionError:
        return os.open(entry.path, _OPEN)


def _only_used(before: FileIdentity, fd: int) -> bool:
    """Whether nothing but the time of change (ctime) of an open entry that hashes to its name differs, which a server
    that uses the entry causes when it sets its time of access, and the entry has not been removed.
    """
    return before.same(identity_of(fd)._replace(ctime_ns=before.ctime_ns)) and os.fstat(fd).st_nlink > 0


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _changed(seen: os.stat_result | None, now: os.stat_result) -> bool:
    """Whether a name has another file than it had, or one with another owner or mode."""
    return seen is None or not os.path.samestat(seen, now) or seen.st_ctime_ns != now.st_ctime_ns


def _unopened(entry: Entry, error: OSError, bad: str, seen: os.stat_result | None) -> _Finding | None:
    """What is said of an entry that could not be opened because of ``error``; None if something else has its name than
    had before the attempt (``seen``), of which the error says nothing.
    """
    if error.errno in _CROWDED:
        return _Finding(entry, state="unchecked", refused=error)
    reason = f"it cannot be opened: {error.strerror or error}"
    try:
        status = os.lstat(entry.path)
    except FileNotFoundError:
        return _Finding(entry, state="gone")
    except OSError as unseen:
        return _Finding(entry, state="unchecked", refused=unseen)
    if _changed(seen, status):
        return None
    kind = entry_kind(status.st_mode)
    if kind != "file":
        return _Finding(entry, BadEntry(entry.path.name, kind, f"it is a {kind}, where a file is expected"))
    wrong = BadEntry(entry.path.name, "unreadable", reason, status.st_size)
    if isinstance(error, PermissionError):
        if status.st_uid != os.geteuid():  # whose server may be able to read it
            return _Finding(entry, state="unchecked", refused=error)
        finding = _Finding(entry, wrong)
        if bad != "keep":
            _act(finding, wrong, status, bad)
        return finding
    if bad != "keep":
        wrong = replace(wrong, reason=f"{reason}; left: it may be sound")
    return _Finding(entry, wrong)


def _unchecked(found: _Finding) -> UncheckedEntry:
    error = found.refused
    assert error is not None
    whose = " and is another user's" if isinstance(error, PermissionError) else ""
    reason = f"it cannot be opened{whose}: {error.strerror or error}"
    return UncheckedEntry(found.entry.path.name, reason, error.errno or 0)


def _judge(expected: int, nbytes: int, hashes: Hashes, whose: list[Owner], owners: list[Owner]) -> BadEntry | None:
    """What is wrong with an entry of ``nbytes`` bytes and those hashes; None if nothing is."""
    name = f"{expected:016x}"
    if hashes.fnv1a == expected:
        if whose and all(owner.blake3 != hashes.blake3 for owner in whose):
            reason = f"it hashes to its name, but is not {whose[0].tensor!r} of {whose[0].path}: their BLAKE3 differ"
            return BadEntry(name, "collision", reason, nbytes)
        return None
    longer = [owner for owner in owners if owner.nbytes > nbytes]
    if not nbytes:
        return BadEntry(name, "truncated", "it is empty", nbytes)
    if longer and not whose:
        reason = f"it has {nbytes} bytes of the {longer[0].nbytes} of {longer[0].tensor!r}"
        return BadEntry(name, "truncated", reason, nbytes)
    return BadEntry(name, "content", f"its content hashes to {hashes.fnv1a:016x}", nbytes)


def _act(found: _Finding, wrong: BadEntry, status: os.stat_result, bad: str) -> None:
    """Take its name from a bad file of that ``status``, unless another one has it by now, and note what was done."""
    path = found.entry.path
    action = "quarantined" if bad == "quarantine" else "removed"
    try:
        if bad == "quarantine":
            if move_aside(path, lambda there: os.path.samestat(there, status)) is None:
                action = "none"
        elif os.path.samestat(os.lstat(path), status):
            os.unlink(path)
        else:
            action = "none"
    except FileNotFoundError:
        action = "none"
    except OSError as error:
        found.refused = error
        reason = f"{wrong.reason}; it cannot be {action}: {error.strerror or error}"
        wrong, action = replace(wrong, reason=reason), "failed"
    found.bad = replace(wrong, action=action)
