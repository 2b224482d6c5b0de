"""What pushes of one model to several servers share: each tensor's hash is found out once."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from weightwire.client.crew import Member, SummedProgress, Target, run_all
from weightwire.client.dropping import Claim, claims_for, dropping
from weightwire.client.hashes import TensorHashes
from weightwire.client.peers import Peers
from weightwire.errors import ModelError

if TYPE_CHECKING:
    from weightwire.client.connection import Connection, Reach
    from weightwire.client.hashpool import HashFeed
    from weightwire.client.options import PushOptions
    from weightwire.model import Model, ModelTensor

__all__ = ["SharedHashes", "shared_hashes", "visit_all"]

_log = logging.getLogger(__name__)

_R = TypeVar("_R")


class SharedHashes:
    """The hashes of everything that any target wants; hashing begins when the first server turns out to be asked."""

    def __init__(self, model: Model, hashes: TensorHashes, feeds: Sequence[HashFeed]) -> None:
        self._model = model
        self._hashes = hashes
        self._feeds = feeds
        self._lock = threading.Lock()
        self._started = False

    def take(self, number: int) -> tuple[TensorHashes, HashFeed]:
        """What target ``number`` asks its server with; `leave` must follow."""
        with self._lock:
            if not self._started:
                self._started = True
                self._hashes.start()
        return self._hashes, self._feeds[number]

    def leave(self, number: int) -> None:
        """Hash nothing more for target ``number`` alone. Idempotent."""
        self._feeds[number].close()

    def record(self) -> None:
        """Put what was found out into the index. A model that has changed since is none to be remembered; nothing that
        goes wrong here is a failure of the pushes, which have succeeded.
        """
        if self._started:
            try:
                self._hashes.record(self._model)
            except ModelError as error:
                _log.debug("nothing is remembered of the model: %s", error)
            except Exception:
                _log.warning("what the tensors hash to could not be remembered", exc_info=True)


@contextlib.contextmanager
def shared_hashes(
    model: Model, chosen: Sequence[Sequence[ModelTensor]], options: PushOptions
) -> Iterator[SharedHashes | None]:
    """Inside: the hashes for targets that want ``chosen``, or None if no cache is to be asked."""
    if options.cache == "never":
        yield None
        return
    wanted = {tensor.name for tensors in chosen for tensor in tensors}
    with options.opened_index() as index:
        hashes = TensorHashes.of((t for name, t in model.tensors.items() if name in wanted), options, index)
        feeds = [hashes.feed(tensors, len(chosen)) for tensors in chosen]
        try:
            yield SharedHashes(model, hashes, feeds)
        finally:
            hashes.close()


def visit_all(
    model: Model,
    targets: Sequence[Target],
    chosen: Sequence[Sequence[ModelTensor]],
    options: PushOptions,
    summed: SummedProgress,
    connect: Reach,
    work: Callable[[int, Connection, SharedHashes | None, Claim | None], _R],
) -> list[Member[_R]]:
    """`run_all` for ``targets`` that want ``chosen`` of ``model``.

    For each there is ``work(number, connection, hashes, claim)``. The hashes are those of `shared_hashes`, the claim is
    None unless files are dropped behind; both are let go of when that is over, and where ``connect`` makes no
    connection. What ``summed`` was stopped by ends all, and so does ConfigError where two endpoints lead to one server.
    What was found out goes into the index if one of them has succeeded.
    """
    peers = Peers([target.endpoint for target in targets])
    with dropping(options.drop_behind) as drop, shared_hashes(model, chosen, options) as shared:
        claims = claims_for(drop, chosen)

        def leave(number: int) -> None:
            if shared is not None:
                shared.leave(number)
            claim = claims[number]
            if claim is not None:
                claim.close()

        def reach(target: Target) -> Connection:
            number = targets.index(target)
            try:
                return connect(target.endpoint, partial(peers.connected, number))
            except BaseException:
                leave(number)
                raise
            finally:
                peers.gone(number)

        def visit(number: int, connection: Connection) -> _R:
            try:
                result = work(number, connection, shared, claims[number])
            finally:
                leave(number)
            summed.finish(number)
            return result

        members = run_all(targets, reach, visit, lambda: summed.error or peers.error)
        try:
            if shared is not None and any(member.result is not None for member in members):
                shared.record()
        except BaseException:
            for member in members:
                if member.connection is not None:
                    member.connection.close()
            raise
    return members
