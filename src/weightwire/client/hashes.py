"""What is known and found out about the hashes of a model's large tensors: the index first, then the pool."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Self, TypeGuard

from weightwire.client.hashpool import HashFeed, HashPool
from weightwire.client.sources import in_blocks
from weightwire.errors import ModelError
from weightwire.hashing import cpu_features
from weightwire.index import FileIdentity, Hashes, HashIndex, hash_with_digest, identity_of
from weightwire.model import Model, ModelTensor
from weightwire.ranges import FileRange
from weightwire.wire.commands import CACHE_THRESHOLD

if TYPE_CHECKING:
    from weightwire.client.options import PushOptions

__all__ = ["TensorHashes", "is_cached"]

_log = logging.getLogger(__name__)

_INTERLEAVED: Final = 4
"""Tensors that one thread hashes together where the CPU has no vectors for one: their waits overlap."""


def is_cached(tensor: ModelTensor) -> bool:
    """Whether servers keep such a tensor in their caches (docs/protocol.md, section 9)."""
    return tensor.nbytes > CACHE_THRESHOLD


class TensorHashes:
    """FNV-1a 64 of those of ``tensors`` that a cache may hold, each read at most once, for any number of senders.

    What ``index`` has is not read for that; what it lacks is added to it by `record`. ``threads`` and ``in_flight``
    (bytes, of all senders together) are the pool's. ``read`` is how files are read (see `Sources`). ``plain`` is for
    a push that is not optimized: one after the other, byte by byte. `start` and `close` belong to one ``try`` and its
    ``finally``.

    Raises ModelError where a file cannot be looked at.
    """

    def __init__(
        self,
        tensors: Iterable[ModelTensor],
        *,
        threads: int,
        in_flight: int,
        index: HashIndex | None = None,
        read: str = "auto",
        plain: bool = False,
    ) -> None:
        self._tensors = [tensor for tensor in tensors if is_cached(tensor)]
        self._number = {tensor.name: number for number, tensor in enumerate(self._tensors)}
        self._index = index
        self._in_flight = in_flight
        self._identities: dict[int, FileIdentity] = {}
        known: dict[int, int] = {}
        files = {n: tensor.payload for n, tensor in enumerate(self._tensors) if _may_be_known(tensor.payload)}
        if index is not None:
            for payload in files.values():
                if payload.fd not in self._identities:
                    self._identities[payload.fd] = _identity(payload)
            for number, found in zip(files, index.find(list(files.values())), strict=True):
                if found is not None:
                    known[number] = found.fnv1a
        self._known = frozenset(known)
        self._doubtful: set[str] = set()
        recording = index is not None and index.enabled
        settled = {fd for fd, identity in self._identities.items() if recording and identity.settled}
        payloads = [tensor.payload for tensor in self._tensors]
        # Of a file that was changed a moment ago nothing could be recorded, nor in an index that cannot be used.
        digest = [number for number, payload in files.items() if payload.fd in settled and number not in known]
        self.pool = HashPool(
            payloads,
            threads=threads,
            known=known,
            digest=digest,
            group=_INTERLEAVED if not plain and cpu_features().many == "interleaved" else 1,
            blocks=frozenset() if plain else in_blocks(payloads, read),
            plain=plain,
        )

    @classmethod
    def of(cls, tensors: Iterable[ModelTensor], options: PushOptions, index: HashIndex | None) -> Self:
        """Those for a push with ``options``, with ``index`` from `PushOptions.opened_index`."""
        return cls(
            tensors,
            threads=options.load.threads,
            in_flight=options.load.in_flight,
            index=index,
            read=options.read,
            plain=not options.optimized,
        )

    @property
    def known(self) -> int:
        """How many the index knew."""
        return len(self._known)

    def feed(self, tensors: Sequence[ModelTensor], senders: int = 1) -> HashFeed:
        """The hashes of those of ``tensors`` that a cache may hold, in order, for one of ``senders``.

        All feeds are made before `start`.
        """
        order = [self._number[tensor.name] for tensor in tensors if is_cached(tensor)]
        return self.pool.feed(order, self._in_flight // senders)

    def start(self) -> None:
        """Begin to hash."""
        self.pool.start()

    def close(self) -> None:
        """Stop, as `HashPool.close` does. Idempotent."""
        self.pool.close()

    def from_index(self, name: str) -> bool:
        """Whether the hash of tensor ``name`` is the index's word alone."""
        return self._number.get(name) in self._known

    def doubt(self, name: str) -> None:
        """A server filled tensor ``name`` wrongly: was it asked for by a wrong hash? For any thread."""
        self._doubtful.add(name)

    def record(self, model: Model) -> int:
        """Add to the index what was found out, once everything has arrived. Returns how many hashes were new.

        Raises ModelError, with nothing recorded, if ``model`` is not what it was when it was opened.
        """
        if self._index is None:
            return 0
        model.check_unchanged()
        entries: list[tuple[FileRange, str, Hashes]] = []
        for number, found in self.pool.results().items():
            tensor = self._tensors[number]
            if _may_be_known(tensor.payload):
                entries.append((tensor.payload, tensor.name, found))
        stored = self._index.record(entries, self._identities) if entries else 0
        return stored + self.recheck()

    def recheck(self) -> int:
        """Hash anew what the index said of tensors that a server filled wrongly; where it was wrong, put it right.

        Returns how many entries were wrong. What cannot be read any more is left as it is.
        """
        index, wrong = self._index, 0
        # One by one: while a tensor is hashed, others may come to be doubted, by the threads of other targets.
        while self._doubtful:
            try:
                name = self._doubtful.pop()
            except KeyError:  # somebody else took the last one
                break
            if index is None or not self.from_index(name):
                continue
            tensor = self._tensors[self._number[name]]
            assert isinstance(tensor.payload, FileRange)
            try:
                right = hash_with_digest(tensor.payload)
            except ModelError as error:
                _log.debug("%s: %s", name, error)
                continue
            said = self.pool.hash_of(self._number[name])
            if right.fnv1a != said:
                wrong += 1
                _log.warning(
                    "the index %s said that tensor %r hashes to %016x, but it hashes to %016x: entry replaced",
                    index.path, name, said, right.fnv1a,
                )  # fmt: skip
                index.record([(tensor.payload, name, right)], self._identities)
        return wrong


def _may_be_known(payload: FileRange | memoryview) -> TypeGuard[FileRange]:
    """Whether what the bytes hash to can be known from one push to the next."""
    return isinstance(payload, FileRange) and payload.dated


def _identity(payload: FileRange) -> FileIdentity:
    try:
        return identity_of(payload.fd)
    except OSError as error:
        raise ModelError(f"cannot look at: {error.strerror}", path=payload.path) from error
