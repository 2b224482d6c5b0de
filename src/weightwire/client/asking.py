"""Ask the server's cache about large tensors, some of them ahead of the one that is dealt with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from weightwire.client.channel import MAX_OUTSTANDING, Channel, Request
from weightwire.client.hashpool import HashFeed
from weightwire.client.probe import Edge, edges_of
from weightwire.client.remote import RemoteTensor
from weightwire.errors import ProtocolError
from weightwire.profile import Stage
from weightwire.ranges import FileRange
from weightwire.wire.answers import decode_u8_answer
from weightwire.wire.commands import Command

__all__ = ["Questions"]

_log = logging.getLogger(__name__)

WINDOW_TENSORS: Final = 16
WINDOW_BYTES: Final = 128 << 20
"""Most tensors, and bytes of tensors, asked about from the one that is dealt with on."""


class _Question:
    """What was asked about one tensor, and what has been answered of it."""

    __slots__ = ("edges", "hit", "intact", "left", "value")

    def __init__(self, value: int, edges: Sequence[Edge]) -> None:
        self.value = value
        self.edges = edges
        self.left = 1 + len(edges)
        self.hit = False
        self.intact = True


class Questions:
    """Which of the tensors numbered ``cached`` the server has filled from its cache.

    How far ahead is asked depends on the tensors and answers alone: at first two of them, then up to `WINDOW_TENSORS`
    and `WINDOW_BYTES` (after a hit two, however large, as far as so many bytes may be in flight), and more only when
    half of that is used up. So the order on the wire does not depend on how fast anything is. With ``probe``, the first
    and last bytes are made wrong before the question and read back behind it:
    a server that fills a tensor from a file that is too short says that it has filled it. ``doubt`` is told the names
    of tensors that were filled wrongly.
    """

    def __init__(
        self,
        channel: Channel,
        placed: Sequence[RemoteTensor],
        payloads: Sequence[FileRange | memoryview],
        cached: Sequence[int],
        feed: HashFeed,
        probe: bool,
        doubt: Callable[[str], object],
    ) -> None:
        self._channel = channel
        self._recorder = channel.recorder
        self._placed = placed
        self._payloads = payloads
        self._cached = cached
        self._positions = {index: position for position, index in enumerate(cached)}
        self._feed = feed
        self._probe = probe
        self._doubt = doubt
        self._bytes = min(WINDOW_BYTES, feed.in_flight // 2)
        self._target = 1
        self._last_hit = False
        self._asked = 0
        self._asked_bytes = 0  # of those from the one dealt with on
        self._open = 0
        self._questions: dict[int, _Question] = {}
        self._sent_hashes: set[int] = set()
        self._filled: set[int] = set()

    def __contains__(self, index: int) -> bool:
        return index in self._positions

    @property
    def filled(self) -> frozenset[int]:
        """The tensors that were hits and have not been found wrong."""
        return frozenset(self._filled)

    def reject(self, index: int) -> None:
        """Note that the server filled tensor ``index`` wrongly, so that it has to be sent."""
        tensor = self._placed[index]
        if index in self._filled:
            self._filled.remove(index)
            self._recorder.hits -= 1
            self._recorder.bytes_saved -= tensor.nbytes
        self._recorder.corrupt_hits += 1
        self._doubt(tensor.name)
        _log.warning(
            "%s filled tensor %r wrongly from its cache: the entry %016x there is damaged, or not what its name says; "
            "the tensor is sent instead",
            self._channel.endpoint, tensor.name, self._questions[index].value,
        )  # fmt: skip

    def hit(self, index: int) -> bool:
        """Whether the server has filled tensor ``index`` rightly, as far as can be seen; asks about later ones, too.

        Tensors are asked for in the order of ``cached``, each once. ModelError where one cannot be read.
        """
        previous = self._recorder.switch(Stage.ASK)
        position = self._positions[index]
        self._ask_ahead(position)
        question = self._questions[index]
        self._hear(question)
        if not (question.hit and question.intact) and question.value in self._sent_hashes:
            # Its double was asked for at the same time and has been sent since.
            question = self._ask(position)
            self._hear(question)
        good = self._last_hit = question.hit and question.intact
        if good:
            self._filled.add(index)
            self._recorder.hits += 1
            self._recorder.bytes_saved += self._placed[index].nbytes
        else:
            self._sent_hashes.add(question.value)
            if question.hit:
                self.reject(index)
            else:
                self._recorder.misses += 1
        self._asked_bytes -= self._placed[index].nbytes
        self._feed.release(position)
        self._recorder.switch(previous)
        return good

    def ask_again(self, index: int) -> tuple[bool, bool]:
        """Whether the server has tensor ``index`` now, which was sent since, and whether its ends are right."""
        self.hear_out()
        question = self._ask(self._positions[index])
        self._hear(question)
        return question.hit, question.intact

    def check(self) -> None:
        """Raise what hashing ahead has failed with, if it did."""
        self._feed.pool.check()

    def hear_out(self) -> None:
        """Wait for the answers to all questions, before bytes follow them.

        The server reads and hashes each entry it has, and takes no bytes meanwhile. Seen from a send, several entries
        in a row are one long stall; each answer is a sign of life. Raises as `check` does.
        """
        self.check()
        if not self._open:
            return
        previous = self._recorder.switch(Stage.ASK)
        with self._channel.watched(self.check):
            while self._open:
                self._channel.read_answer()
        self._recorder.switch(previous)

    def _hear(self, question: _Question) -> None:
        if question.left:
            with self._channel.watched(self.check):
                while question.left:
                    self._channel.read_answer()

    def _ask_ahead(self, position: int) -> None:
        ahead = self._asked - position
        if ahead > 1 and (2 * ahead > self._target or 2 * self._asked_bytes > self._bytes):
            return
        self._target = min(2 * self._target, WINDOW_TENSORS)
        while self._asked < len(self._cached):
            nbytes = self._placed[self._cached[self._asked]].nbytes
            ahead = self._asked - position
            # While hits follow each other two questions are on their way, however large the tensors are. Otherwise
            # bytes would wait for the hash of what comes after them.
            most = max(self._bytes, self._feed.in_flight) if ahead == 1 and self._last_hit else self._bytes
            if ahead > 0 and (ahead >= self._target or self._asked_bytes + nbytes > most):
                break
            self._ask(self._asked)
            self._asked += 1
            self._asked_bytes += nbytes

    def _ask(self, position: int) -> _Question:
        index = self._cached[position]
        tensor = self._placed[index]
        channel, dialect = self._channel, self._channel.dialect

        def watch() -> None:
            channel.check_peer("hashing for the server's cache", tensor=tensor.name)

        previous = self._recorder.switch(Stage.HASH)
        value = self._feed.get(position, watch)
        self._recorder.switch(Stage.READ)
        edges = edges_of(self._payloads[index]) if self._probe else ()
        self._recorder.switch(previous)
        question = self._questions[index] = _Question(value, edges)
        self._open += 1

        def heard() -> None:
            question.left -= 1
            if not question.left:
                self._open -= 1

        def keep(answer: bytes) -> None:
            said = decode_u8_answer(answer, "SET_TENSOR_HASH")
            if said > 1:
                raise ProtocolError(f"{channel.endpoint} answered SET_TENSOR_HASH of {tensor.name!r} with {said}")
            question.hit = said == 1
            heard()

        wire = tensor.wire()
        requests = [
            Request(Command.SET_TENSOR, dialect.encode_set_tensor(wire, edge.offset, 0) + edge.inverse)
            for edge in edges
        ]
        requests.append(Request(Command.SET_TENSOR_HASH, dialect.encode_set_tensor_hash(wire, 0, value), then=keep))
        for edge in edges:

            def compare(answer: bytes, edge: Edge = edge) -> None:
                question.intact = question.intact and answer == edge.expected
                heard()

            payload = dialect.encode_get_tensor(wire, edge.offset, len(edge.expected))
            requests.append(Request(Command.GET_TENSOR, payload, len(edge.expected), compare))
        channel.post_all(requests, tensor=tensor.name)
        channel.settle(MAX_OUTSTANDING)
        return question
