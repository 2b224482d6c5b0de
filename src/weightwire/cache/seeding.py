"""Fill a cache directory from a model that lies on the same machine: no server, no network."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeGuard

from weightwire.cache.copying import CopyingWriter, StrictCache
from weightwire.cache.directory import WRITABLE, default_directory, entry_name
from weightwire.cache.pool import run_each, worker_count
from weightwire.config import checked_flag, checked_progress
from weightwire.errors import CacheError
from weightwire.hashing import hash_payloads
from weightwire.index import FileIdentity, Hashes, HashIndex, IndexChoice, hash_with_digest, identity_of, index_for
from weightwire.model import Model, ModelTensor
from weightwire.model.choosing import compile_include, included
from weightwire.model.opening import opened_model
from weightwire.ranges import FileRange
from weightwire.wire.commands import CACHE_THRESHOLD

__all__ = ["SeedResult", "seed"]

logger = logging.getLogger(__name__)

_IN_THE_WAY: Final = "something else has that entry's name: weightwire cache verify lists what does not belong there"
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FEWER: Final = _NO_ROOM | {errno.EFBIG, errno.EMFILE, errno.ENFILE}
"""What may be another thing with one entry at a time, or for the smaller ones."""

_HINTS: Final = {
    **dict.fromkeys(
        _NO_ROOM, "make room (weightwire cache prune) and seed again: what is there already is not written again"
    ),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), WRITABLE),
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or name a directory that takes larger files",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or have fewer threads (--threads)",
    errno.ENFILE: "the system has too many files open: have fewer threads (--threads), or seed again later",
    errno.EISDIR: _IN_THE_WAY,
    errno.ENOTEMPTY: _IN_THE_WAY,
    errno.EEXIST: _IN_THE_WAY,
}
_NOT_REPLACED: Final = frozenset({errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.EPERM})
"""How rename(2) says that what has the name stays: a directory, or another user's file where those are protected."""

_LOOKS: Final = 3
"""How often an entry is looked for that is there by its name and size, and cannot be had."""


@dataclass(frozen=True, slots=True)
class SeedResult:
    """What a seeding did, in tensors and bytes.

    ``tensors`` (``bytes``) are those that a server caches: over 10 MiB. Of them ``written`` (``written_bytes``) made
    an entry, ``cloned_bytes`` of which share their blocks with the model; ``replaced`` of these took the place of an
    entry that was damaged. ``present`` had an entry already, ``unread`` of which were taken by name and size alone;
    ``duplicates`` equal another tensor. ``seconds`` is how long it took.
    """

    directory: str
    tensors: int
    bytes: int
    written: int = 0
    written_bytes: int = 0
    cloned_bytes: int = 0
    replaced: int = 0
    present: int = 0
    unread: int = 0
    duplicates: int = 0
    seconds: float = 0.0


def seed(
    model: str | os.PathLike[str] | Mapping[str, object] | Model,
    directory: str | os.PathLike[str] | None = None,
    *,
    include: str | None = None,
    threads: int | None = None,
    verify: bool = False,
    index: IndexChoice = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> SeedResult:
    """Put every tensor of ``model`` over 10 MiB into the cache ``directory``, as a server that received it would.

    ``directory`` is made if missing; None is that of a stock server, `default_directory`. ``include`` is a regular
    expression found in the names of the tensors wanted. ``threads`` (0 to 64; 0: in line; None: GGML_RPC_LOAD_THREADS,
    or one for each CPU of this process, at most 8) copy and hash. ``index`` is the index of hashes (a path or
    `HashIndex`; None: the user's; False: none): a tensor it knows, with an entry of the right size, is not read, unless
    ``verify``, which reads such entries and replaces damaged ones.
    ``progress(name, done, total)``, in bytes, is called on this thread.

    An entry is named after what was read back from it, synced, and put in place in one step: whatever interrupts, it is
    whole and rightly named or not there. Raises ModelError for a model that cannot be read or that changed meanwhile,
    ConfigError for what cannot be meant, CacheDirectoryError where the directory cannot be made, CacheError where an
    entry cannot be stored (its text says what was done): at once, or, where only something else that has the entry's
    name is in the way, after all others have been.
    """
    started = time.monotonic()
    count = worker_count(threads)
    checked_flag("verify", verify)
    checked_progress(progress)
    pattern = compile_include(include)
    with opened_model(model) as opened:
        tensors = [tensor for tensor in included(opened, pattern) if tensor.nbytes > CACHE_THRESHOLD]
        cache = StrictCache(default_directory() if directory is None else directory)
        with index_for(index) as hashes:
            work = _Seeding(cache, tensors, hashes, verify)
            try:
                work.run(count, progress)
            except CacheError as error:
                raise CacheError(
                    f"{error.detail}; {work.said()}", path=error.path, errno=error.errno, hint=error.hint
                ) from error
            finally:
                work.remember()
            opened.check_unchanged()
            return work.result(time.monotonic() - started)


class _Seeding:
    """One run: the counts, and what the workers must agree on, behind ``_lock``."""

    def __init__(self, cache: StrictCache, tensors: list[ModelTensor], index: HashIndex | None, verify: bool) -> None:
        self._cache = cache
        self._tensors = tensors
        self._index = index
        self._verify = verify
        self._lock = threading.Lock()
        self._claimed: dict[int, list[ModelTensor]] = {}
        """The hashes that somebody makes entries of, and the tensors that leave it to him."""
        self._found: list[tuple[FileRange, str, Hashes]] = []
        self._counts = dict.fromkeys(
            ("written", "written_bytes", "cloned_bytes", "replaced", "present", "unread", "duplicates"), 0
        )
        self._done = 0
        self._last = ""
        self._identities: dict[int, FileIdentity] = {}
        self._placed: dict[int, str] = {}
        """The hashes of the entries that are there now, with the names of the tensors whose they are."""
        self._known: dict[str, Hashes] = {}
        self._sizes: Counter[int] = Counter()
        """How many entries of each size could be a tensor's that has not been hashed."""
        self._not_stored: list[CacheError] = []

    def run(self, threads: int, progress: Callable[[str, int, int], object] | None) -> None:
        total = sum(tensor.nbytes for tensor in self._tensors)

        def watch() -> None:
            if progress is not None:
                progress(self._last, min(self._done, total), total)

        self._look_up()
        try:
            run_each(self._tensors, self._one, threads, watch=watch)
        except CacheError as error:
            if threads < 2 or error.errno not in _FEWER:
                raise
            # Half-written entries share the room and the descriptors that are left, and one by itself may fit.
            run_each(self._left_over(), self._one, 0, watch=watch)
        self._done = total
        watch()
        if self._not_stored:
            raise self._not_stored[0]

    def _left_over(self) -> list[ModelTensor]:
        """The tensors without an entry, when nobody works any more: from the beginning with them."""
        for content_hash in self._claimed.keys() - self._placed.keys():
            self._unclaim(content_hash)
        done = {*self._placed.values(), *(tensor.name for same in self._claimed.values() for tensor in same)}
        return [tensor for tensor in self._tensors if tensor.name not in done]

    def _look_up(self) -> None:
        ranges = [(t.name, t.payload) for t in self._tensors if _may_be_known(t.payload)]
        for _, payload in ranges:
            if payload.fd not in self._identities:
                self._identities[payload.fd] = identity_of(payload.fd)
        if self._index is not None:
            known = self._index.find([payload for _, payload in ranges])
            self._known = {name: at for (name, _), at in zip(ranges, known, strict=True) if at is not None}
        taken = {entry_name(hashes.fnv1a) for hashes in self._known.values()}
        with contextlib.suppress(OSError), os.scandir(self._cache.directory) as entries:
            for entry in entries:
                if entry.name not in taken:
                    with contextlib.suppress(FileNotFoundError):  # others write, move and remove files meanwhile
                        self._sizes[entry.stat(follow_symlinks=False).st_size] += 1

    def remember(self) -> None:
        """Give the index what was computed."""
        if self._index is not None:
            self._index.record(self._found, self._identities)

    def said(self) -> str:
        """What was done so far, for a message."""
        counts = self._counts
        stored = f"{counts['written']} of {len(self._tensors)} entries were stored"
        if counts["present"]:
            stored += f", {counts['present']} {'was' if counts['present'] == 1 else 'were'} there before"
        if self._not_stored:
            stored += f", {len(self._not_stored)} could not be"
        return stored

    def result(self, seconds: float) -> SeedResult:
        return SeedResult(
            directory=str(self._cache.directory),
            tensors=len(self._tensors),
            bytes=sum(tensor.nbytes for tensor in self._tensors),
            seconds=seconds,
            **self._counts,
        )

    # On a worker's thread.

    def _one(self, tensor: ModelTensor, check: Callable[[], None]) -> None:
        told = 0

        def tell(nbytes: int) -> None:
            nonlocal told
            told += nbytes
            with self._lock:
                self._done += nbytes
                self._last = tensor.name
            check()

        left = self._stored(tensor, check, tell)
        tell(tensor.nbytes - told)
        while left:  # these have been told of
            left += self._stored(left.pop(), check, lambda nbytes: check())

    def _stored(self, tensor: ModelTensor, check: Callable[[], None], tell: Callable[[int], None]) -> list[ModelTensor]:
        """`_place`; returns the tensors that were wrongly taken for duplicates of this one, and have no entry yet."""
        left: list[ModelTensor] = []
        try:
            self._place(tensor, check, tell, left)
        except OSError as error:
            raise _refused(self._cache, tensor, error) from error
        return left

    def _place(
        self, tensor: ModelTensor, check: Callable[[], None], tell: Callable[[int], None], left: list[ModelTensor]
    ) -> None:
        hashes = self._known.get(tensor.name)
        # Where an entry of this size is there it may well be this tensor's: reading is cheaper than writing.
        looked = hashes is None and self._sizes[tensor.nbytes] > 0
        if looked:
            hashes = self._known[tensor.name] = self._hash(tensor.payload, check)
            self._found_out(tensor, hashes)
        replaces = False
        if hashes is not None:
            if not self._claim(hashes.fnv1a, tensor):
                return
            there = self._there(hashes.fnv1a, tensor.nbytes, check)
            if looked and there is not None:
                with self._lock:
                    self._sizes[tensor.nbytes] -= 1  # that one is nobody else's
            if there:
                self._count(present=1, unread=0 if self._verify else 1)
                self._placed[hashes.fnv1a] = tensor.name
                return
            replaces = there is False
        with CopyingWriter(self._cache) as writer:
            cloned = writer.fill(tensor.payload, check, tell)
            # Named after what lies on the disk: the model may have been written to meanwhile.
            stored = self._hash(writer.content(), check)
            if stored != hashes:
                self._found_out(tensor, stored)
            if hashes is None or stored.fnv1a != hashes.fnv1a:
                self._known[tensor.name] = stored  # what was said of it is not claimed again
                if hashes is not None:
                    left += self._unclaim(hashes.fnv1a)
                if not self._claim(stored.fnv1a, tensor):
                    return
                there = self._there(stored.fnv1a, tensor.nbytes, check)
                if there:
                    self._count(present=1, unread=0 if self._verify else 1)
                    self._placed[stored.fnv1a] = tensor.name
                    return
                replaces = there is False
            writer.put_down(check)
            check()
            try:
                writer.commit(stored.fnv1a)
            except OSError as error:
                if error.errno not in _NOT_REPLACED:
                    raise
                # It is about this one name: the other entries can be stored.
                with self._lock:
                    self._not_stored.append(_refused(self._cache, tensor, error, _in_the_way(error)))
                return
        self._placed[stored.fnv1a] = tensor.name
        self._count(written=1, written_bytes=tensor.nbytes, cloned_bytes=cloned, replaced=int(replaces))

    def _hash(self, payload: FileRange | memoryview, check: Callable[[], None]) -> Hashes:
        return hash_with_digest(payload, check, digest=self._index is not None)

    def _there(self, content_hash: int, nbytes: int, check: Callable[[], None]) -> bool | None:
        """Whether a usable entry is there: None if nothing of the name is, False if what is must be replaced."""
        for _ in range(_LOOKS):
            fd = self._cache.lookup(content_hash, nbytes)
            if fd is not None:
                break
            size = self._cache.size_of(content_hash)
            if size != nbytes:
                return None if size is None else False
            # Another process has stored it between the two looks.
        else:
            return False
        try:
            if not self._verify or hash_payloads([FileRange(fd, 0, nbytes)], check=check) == [content_hash]:
                self._cache.used(fd)  # wanted again: it is not to be pruned first
                return True
        except ValueError:  # a ModelError: it shrank, or cannot be read
            pass
        finally:
            os.close(fd)
        logger.warning(
            "cache %s: %s did not hash to its name; replaced", self._cache.directory, entry_name(content_hash)
        )
        return False

    def _claim(self, content_hash: int, tensor: ModelTensor) -> bool:
        """Whether ``tensor`` is the first of the run with that content; otherwise it is a duplicate."""
        with self._lock:
            duplicates = self._claimed.get(content_hash)
            if duplicates is None:
                self._claimed[content_hash] = []
                return True
            duplicates.append(tensor)
            self._counts["duplicates"] += 1
            return False

    def _unclaim(self, content_hash: int) -> list[ModelTensor]:
        """Whoever claimed it turned out to have another content: the tensors that were taken for his duplicates."""
        with self._lock:
            duplicates = self._claimed.pop(content_hash)
            self._counts["duplicates"] -= len(duplicates)
            return duplicates

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def _found_out(self, tensor: ModelTensor, hashes: Hashes) -> None:
        if _may_be_known(tensor.payload) and hashes.blake3:
            with self._lock:
                self._found.append((tensor.payload, tensor.name, hashes))


def _may_be_known(payload: FileRange | memoryview) -> TypeGuard[FileRange]:
    """Whether what the bytes hash to can be known from one seeding to the next."""
    return isinstance(payload, FileRange) and payload.dated


def _in_the_way(error: OSError) -> str:
    """What to do where what has an entry's name was not replaced because of ``error``."""
    if error.errno != errno.EPERM:
        return _IN_THE_WAY
    # rename(2) in a directory with the sticky bit: new names are welcome, other users' are theirs.
    return "a file of another user's has that entry's name, and only its owner may replace or remove it here"


def _refused(cache: StrictCache, tensor: ModelTensor, error: OSError, hint: str = "") -> CacheError:
    """What an OSError from the directory means, and what to do about it (``hint``, else by its number)."""
    reason = error.strerror or str(error)
    what = f"cache {cache.directory}: the entry for {tensor.name!r} ({tensor.nbytes} bytes) cannot be stored: {reason}"
    hint = hint or _HINTS.get(error.errno or 0, "")
    return CacheError(what, path=str(cache.directory), errno=error.errno, hint=hint)
