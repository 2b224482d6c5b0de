"""A model to several servers at once: each tensor is hashed once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, overload

from weightwire.client.connection import Connection, Reach
from weightwire.client.crew import SummedProgress, Target, as_targets
from weightwire.client.dropping import Claim
from weightwire.client.layers import parse_layers
from weightwire.client.options import ProgressCallback, PushOptions
from weightwire.client.plan import select
from weightwire.client.push import ModelSource, push_selected
from weightwire.client.result import PushResult
from weightwire.client.shared import SharedHashes, visit_all
from weightwire.index import IndexChoice
from weightwire.model import Model, ModelTensor
from weightwire.model.choosing import compile_include
from weightwire.model.opening import opened_model

__all__ = ["Pushed", "PushedAll", "chosen_for", "push_all"]


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of one target: a ``result``, readable as long as ``connection`` is open, or an ``error``.

    ``connection`` is None where none could be made.
    """

    target: Target
    connection: Connection | None
    result: PushResult | None
    error: Exception | None


class PushedAll(Sequence[Pushed]):
    """What became of the targets of `push_all`, in their order; a context manager that closes the connections."""

    def __init__(self, pushed: Iterable[Pushed]) -> None:
        self._pushed = tuple(pushed)

    @overload
    def __getitem__(self, number: int) -> Pushed: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Pushed]: ...
    def __getitem__(self, number: int | slice) -> Pushed | Sequence[Pushed]:
        return self._pushed[number]

    def __len__(self) -> int:
        return len(self._pushed)

    def __iter__(self) -> Iterator[Pushed]:
        return iter(self._pushed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        failed = sum(each.error is not None for each in self._pushed)
        return f"<weightwire.PushedAll: {len(self)} targets, {failed} failed>"

    def close(self) -> None:
        """Close every connection; the servers free what they had allocated. Idempotent, never raises."""
        for each in self._pushed:
            if each.connection is not None:
                each.connection.close()

    def check(self) -> Self:
        """Raise the first target's error, if one failed; otherwise self."""
        for each in self._pushed:
            if each.error is not None:
                raise each.error
        return self


def chosen_for(model: Model, target: Target) -> list[ModelTensor]:
    """The tensors of ``model`` that are for ``target``. Raises as `plan.select` does."""
    return select(model, compile_include(target.include), parse_layers(target.layers))


def push_all(
    model: ModelSource,
    targets: str | Target | Iterable[str | Target],
    *,
    cache: str = "auto",
    verify: bool = False,
    progress: ProgressCallback | None = None,
    threads: int | None = None,
    in_flight: int | None = None,
    index: IndexChoice = None,
    probe: bool | None = None,
    drop_behind: bool = False,
    read: str = "auto",
    timeout: float = 30.0,
    protocol: str | None = None,
    transport: str = "auto",
    profile: bool | None = None,
    optimized: bool | None = None,
) -> PushedAll:
    """Connect to several servers and push a model, or a part of it, to each, all at once.

    ``targets`` are endpoints (``"host:port"``), which get all of it, or a `Target` each, which says what they get. A
    tensor that several of them want is hashed once; each reads it, from the page cache. ``threads`` and ``in_flight``
    (bytes) are for all of them together. ``progress(name, done, total)`` counts the bytes of all, twice with
    ``verify``, and is never called by two threads at once; if it raises, everything ends and that is raised. The
    other arguments are those of `Connection.push` and `connect`.

    One that fails does not stop the others: its error is in the result, whose connections are open until `PushedAll`
    is closed. Raised are only ConfigError for an argument, or where two targets turn out to be one server when they are
    connected to, ModelError for a model that cannot be opened, and whatever interrupts the call (Ctrl-C), after which
    every connection is closed and nothing reads the model any more.
    """
    aims = as_targets(targets)
    reach = Reach(timeout=timeout, protocol=protocol, transport=transport, profile=profile, optimized=optimized)
    with opened_model(model) as opened:
        chosen = [chosen_for(opened, target) for target in aims]
        totals = [sum(tensor.nbytes for tensor in tensors) for tensors in chosen]
        summed = SummedProgress(progress, totals, 2 if verify else 1)
        options = [
            PushOptions(
                cache=cache,
                verify=verify,
                include=target.include,
                layers=target.layers,
                progress=summed.of(number),
                device=target.device,
                threads=threads,
                in_flight=in_flight,
                index=index,
                probe=probe,
                drop_behind=drop_behind,
                read=read,
                optimized=reach.optimized,
            )
            for number, target in enumerate(aims)
        ]
        opened.check_unchanged()

        def work(number: int, connection: Connection, shared: SharedHashes | None, claim: Claim | None) -> PushResult:
            mine, channel = options[number], connection._channel
            hashes, feed = None, None
            if shared is not None and mine.uses_cache(connection.server_has_cache):
                hashes, feed = shared.take(number)
            with channel.exclusive("push"):
                return push_selected(channel, opened, chosen[number], mine, hashes, feed, claim=claim)

        members = visit_all(opened, aims, chosen, options[0], summed, reach, work)
        return PushedAll(Pushed(m.target, m.connection, m.result, m.error) for m in members)
