"""SET_TENSOR_HASH: tensors filled from the cache, the files of further questions read ahead."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import Final

from weightwire.cache.reading import Fill, Reader, ReadingStopped, advise, read_exactly
from weightwire.cache.saving import Saver
from weightwire.cache.store import NOT_ITS_NAME, TensorCache
from weightwire.cache.workers import Workers
from weightwire.hashing import FNV_OFFSET, fnv1a64
from weightwire.profile import Stage
from weightwire.server.buffers import BufferTable, Located, Placed
from weightwire.server.destinations import Destination
from weightwire.server.errors import BadRequest
from weightwire.server.staging import STAGING_BYTES, Staging
from weightwire.transport.profiling import LoadRecorder
from weightwire.wire import Dialect
from weightwire.wire.messages import SetTensorHash

__all__ = ["MAX_AHEAD", "MAX_QUESTIONS", "Filler", "Question"]

MAX_QUESTIONS: Final = 8
"""Questions of one client that are being worked on at once."""

MAX_AHEAD: Final = 512 << 20
"""Bytes of the entries behind the first question of a client that are read ahead; a larger one waits for its turn."""

_HOOK_AHEAD: Final = 64 << 20


@dataclass(slots=True)
class Question:
    """A tensor, a hash, and how far the answer has come."""

    located: Located
    content_hash: int
    offset: int
    start: int
    nbytes: int
    fill: Fill | None = None
    placed: Placed | None = None
    fd: int = -1


class Filler:
    """Answers the questions of one client in order, up to `MAX_QUESTIONS` at a time.

    Whatever it starts early is what the client would see anyway: a question is only taken in behind others if it is in
    order and touches no tensor that they touch. ``tensor`` is the name of the one at hand, for messages; ``hits`` and
    ``misses`` count the answers, ``filled_bytes`` what the hits filled; ``recorder`` stands in ASK outside of what is
    told to it here. `stop` may be called from any thread.
    """

    def __init__(
        self,
        dialect: Dialect,
        buffers: BufferTable,
        staging: Staging,
        cache: TensorCache | None,
        workers: Workers,
        saver: Saver | None,
        recorder: LoadRecorder,
    ) -> None:
        self.tensor: str | None = None
        self.hits = 0
        self.misses = 0
        self.filled_bytes = 0
        self._dialect = dialect
        self._buffers = buffers
        self._staging = staging
        self._cache = cache
        self._saver = saver
        self._recorder = recorder
        self._reader = Reader(workers, recorder.switch)
        self._stopped = False
        self._questions: deque[Question] = deque()

    def __bool__(self) -> bool:
        return bool(self._questions)

    @property
    def room(self) -> int:
        """How many more questions could be taken in."""
        if self._cache is None:
            return 0
        return MAX_QUESTIONS - len(self._questions)

    def ask(self, body: bytes) -> None:
        """Take in a question that must be answered. BadRequest if it is not in order."""
        self._begin(self._understood(self._dialect.decode_set_tensor_hash(body), named=True))

    def ask_ahead(self, body: bytes) -> bool:
        """Take in a question behind others, if it can be worked on beside them; otherwise it is to be asked again when
        they have been answered.
        """
        try:
            question = self._understood(self._dialect.decode_set_tensor_hash(body), named=False)
        except BadRequest:
            return False
        ahead = sum(other.nbytes for other in self._questions) - self._questions[0].nbytes
        if ahead + question.nbytes > MAX_AHEAD or any(_touch(question.located, q.located) for q in self._questions):
            return False
        if question.nbytes and question.located.buffer.memory.kept(question.start, question.nbytes):
            return False
        self._begin(question)
        return True

    def answer(self) -> bool:
        """Whether the first question's tensor has been filled with what was asked for. Waits for that."""
        question = self._questions[0]
        self.tensor = question.located.tensor.label
        filled = self._cache is not None and question.nbytes > 0 and self._settle(question, self._cache)
        if filled:
            self._recorder.hits += 1
            self._recorder.bytes_saved += question.nbytes
            previous = self._recorder.switch(Stage.STAGING)
            question.located.buffer.wrote(question.placed, question.located, question.offset, question.nbytes)
            self._recorder.switch(previous)
            self.hits += 1
            self.filled_bytes += question.nbytes
        else:
            self._recorder.misses += 1
            self.misses += 1
        self._questions.popleft()
        return filled

    def stop(self) -> None:
        """Whoever is inside `answer` gets ReadingStopped."""
        self._stopped = True
        self._reader.stop()

    def _check(self) -> None:
        if self._stopped:
            raise ReadingStopped

    def close(self) -> None:
        """The client has gone: drop what was begun."""
        while self._questions:
            question = self._questions.popleft()
            if question.fill is not None:
                question.located.buffer.spoil(question.placed)
                question.fill.drop()
            if question.fd >= 0:
                os.close(question.fd)
        self._reader.close()

    def _understood(self, request: SetTensorHash, *, named: bool) -> Question:
        if named:
            self.tensor = request.tensor.label
        located = self._buffers.locate(request.tensor)
        start = located.range(request.offset, 0)
        return Question(located, request.hash, request.offset, start, located.nbytes - request.offset)

    def _begin(self, question: Question) -> None:
        self._questions.append(question)
        if self._cache is not None and question.nbytes:
            self._look_up(question, self._cache)

    def _look_up(self, question: Question, cache: TensorCache) -> bool:
        """Find the entry, and begin to read it. Whether there is one."""
        fd = cache.lookup(question.content_hash, question.nbytes)
        if fd is None:
            return False
        block = question.located.buffer.memory
        if block.direct is None:
            question.fd = fd
            advise(fd, 0, min(question.nbytes, _HOOK_AHEAD))
            return True
        try:
            block.about_to_write(question.start, question.nbytes)
            question.placed = question.located.buffer.begin(question.located)
            # Fresh pages are touched by whoever reads into them, while they are in that processor's cache; and a thread
            # that touched the next question's would only take a processor from who answers this one.
            block.reached(question.start + question.nbytes, ahead=False)
            window = block.direct.window(question.start, question.nbytes)
            hashed = cache.verify == "content"
            question.fill = self._reader.start(fd, window, question.start, hashed=hashed)
        except BaseException:
            os.close(fd)
            raise
        return True

    def _settle(self, question: Question, cache: TensorCache) -> bool:
        if question.fill is None and question.fd < 0:
            if self._saver is not None:
                self._saver.settled(question.content_hash, question.nbytes)
            if not self._look_up(question, cache):
                cache.look_into(question.content_hash, question.nbytes, self._check)
                return False
        if question.fill is not None:
            return self._finish(question, question.fill, cache)
        try:
            return self._through_hook(question, cache)
        finally:
            os.close(question.fd)
            question.fd = -1

    def _finish(self, question: Question, fill: Fill, cache: TensorCache) -> bool:
        filled = False
        try:
            filled = fill.finish() in (None, question.content_hash)
            if filled:
                cache.used(fill.fd)
            else:
                self._recorder.corrupt_hits += 1
                cache.quarantine(question.content_hash, NOT_ITS_NAME, fill.fd)
        except OSError as error:
            cache.failed(question.content_hash, fill.fd, error)
        finally:
            if not filled:
                question.located.buffer.spoil(question.placed)
            fill.drop()
            question.fill = None
        return filled

    def _through_hook(self, question: Question, cache: TensorCache) -> bool:
        """Hand the entry to a destination's hook, which must not be shown anything that has not been proved."""
        fd, located = question.fd, question.located
        hashed = cache.verify == "content"
        if hashed:
            previous = self._recorder.switch(Stage.HASH)
            try:
                proved = cache.proved(question.content_hash, fd, question.nbytes, self._check)
            finally:
                self._recorder.switch(previous)
            if not proved:
                self._recorder.corrupt_hits += proved is False  # one that cannot be read is none
                return False
        question.placed = located.buffer.begin(located)
        filled = False
        try:
            digest = self._file_into_hook(located.buffer.memory.destination, fd, question.start, question.nbytes)
            filled = not hashed or digest == question.content_hash
            if filled:
                cache.used(fd)
            else:
                self._recorder.corrupt_hits += 1
                cache.quarantine(question.content_hash, NOT_ITS_NAME, fd)
        except EntryUnreadable as error:
            cache.failed(question.content_hash, fd, error.cause)
        finally:
            if not filled:
                located.buffer.spoil(question.placed)
        return filled

    def _file_into_hook(self, destination: Destination, fd: int, start: int, nbytes: int) -> int:
        digest = FNV_OFFSET
        for done in range(0, nbytes, STAGING_BYTES):
            self._check()
            piece = self._staging.take(min(nbytes - done, STAGING_BYTES))
            previous = self._recorder.switch(Stage.READ)
            try:
                read_exactly(fd, piece, done)
            except OSError as error:
                raise EntryUnreadable(error) from error
            finally:
                self._recorder.switch(previous)
            self._recorder.copies += 1
            self._recorder.copied_bytes += piece.nbytes
            self._recorder.switch(Stage.HASH)
            digest = fnv1a64(piece, digest)
            self._recorder.switch(Stage.STAGING)
            destination.write(start + done, piece.toreadonly())
            self._recorder.switch(previous)
        return digest


class EntryUnreadable(Exception):
    """Not to be taken for an OSError of the hook's own."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _touch(one: Located, other: Located) -> bool:
    """Whether two tensors share a byte."""
    if one.buffer is not other.buffer:
        return False
    return one.start < other.start + other.nbytes and other.start < one.start + one.nbytes
