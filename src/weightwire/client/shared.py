"""What pushes of one model to several servers share: each tensor's hash is found out once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from weightwire.client.hashes import TensorHashes
from weightwire.errors import ModelError

if TYPE_CHECKING:
    from weightwire.client.dropping import DropBehind
    from weightwire.client.hashpool import HashFeed
    from weightwire.client.options import PushOptions
    from weightwire.model import Model, ModelTensor

__all__ = ["SharedHashes", "shared_hashes"]


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
        """Put what was found out into the index. A model that has changed since is none to be remembered."""
        if self._started:
            with contextlib.suppress(ModelError):
                self._hashes.record(self._model, lambda: None)


@contextlib.contextmanager
def shared_hashes(
    model: Model, chosen: Sequence[Sequence[ModelTensor]], options: PushOptions, drop: DropBehind | None
) -> Iterator[SharedHashes | None]:
    """Inside: the hashes for targets that want ``chosen``, or None if no cache is to be asked."""
    if options.cache == "never":
        yield None
        return
    wanted = {tensor.name for tensors in chosen for tensor in tensors}
    index = options.open_index()
    try:
        hashes = TensorHashes(
            [tensor for name, tensor in model.tensors.items() if name in wanted],
            threads=options.load.threads,
            in_flight=options.load.in_flight,
            index=index,
            read=options.read,
            drop=drop,
            plain=not options.optimized,
        )
        feeds = [hashes.feed(tensors, len(chosen)) for tensors in chosen]
        try:
            yield SharedHashes(model, hashes, feeds)
        finally:
            hashes.close()
    finally:
        if index is not None and index is not options.index:
            index.close()
