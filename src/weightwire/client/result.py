"""What a push returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from weightwire.client.remote import RemoteTensor
from weightwire.profile import LoadProfile

__all__ = ["PushResult", "PushSummary"]


@dataclass(frozen=True, slots=True)
class PushSummary:
    """What a push did. ``bytes`` is what the tensors hold and ``sent`` what of it crossed the wire; ``hits`` and
    ``misses`` count the tensors that the server's cache had and had not, ``corrupt_hits`` those that it filled wrongly
    and that were sent therefore. ``hashes_known`` counts tensors whose hash the index knew, so that they were not read
    to be asked about; ``threads`` could hash the others (0: the one that sends did). ``verified`` says that every byte
    was read back and compared, which took ``verify_seconds`` of the ``seconds``.
    """

    tensors: int
    bytes: int
    sent: int
    hits: int
    misses: int
    corrupt_hits: int
    hashes_known: int
    threads: int
    verified: bool
    seconds: float
    verify_seconds: float
    profile: LoadProfile


class PushResult(Mapping[str, RemoteTensor]):
    """The tensors of a push by name, in the model's order, and a ``summary``.

    They can be read as long as the connection they were pushed over is open.
    """

    __slots__ = ("_tensors", "summary")

    def __init__(self, tensors: Mapping[str, RemoteTensor], summary: PushSummary) -> None:
        self._tensors = dict(tensors)
        self.summary = summary

    def __getitem__(self, name: str) -> RemoteTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<weightwire.PushResult: {len(self)} tensors, {self.summary.bytes} bytes>"
