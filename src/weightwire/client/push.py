"""The push pipeline: hash, ask, send, confirm, in the model's order."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from weightwire.client.channel import MAX_OUTSTANDING, Channel
from weightwire.client.device import barrier, release_all
from weightwire.client.lookahead import GROUP, HashAhead
from weightwire.client.plan import compile_include, place, select
from weightwire.client.remote import RemoteBuffer, RemoteTensor
from weightwire.client.result import PushResult, PushSummary
from weightwire.client.small import SMALL, WINDOW, SmallReader
from weightwire.client.verify import verify_tensors
from weightwire.config import CACHE_MODES
from weightwire.errors import ConfigError, ProtocolError, WeightwireError
from weightwire.model import Model, ModelTensor, open_model
from weightwire.profile import LoadRecorder, Stage
from weightwire.ranges import FileRange
from weightwire.wire.answers import decode_u8_answer
from weightwire.wire.commands import CACHE_THRESHOLD, Command
from weightwire.wire.framing import request_header

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ModelSource", "ProgressCallback", "push"]

SLICE: Final = 64 * 1024 * 1024
"""Bytes of a large payload between two reports of progress."""

_BATCH: Final = 256
"""Most small messages gathered into one send."""

ModelSource = str | os.PathLike[str] | Mapping[str, object] | Model
ProgressCallback = Callable[[str, int, int], object]


def push(
    channel: Channel,
    server_has_cache: bool,
    source: ModelSource,
    *,
    cache: str,
    verify: bool,
    include: str | None,
    progress: ProgressCallback | None,
    device: int,
) -> PushResult:
    """See `Connection.push`."""
    recorder = LoadRecorder()
    if cache not in CACHE_MODES:
        raise ConfigError(f"cache: {cache!r} is not one of {', '.join(CACHE_MODES)}")
    if progress is not None and not callable(progress):
        raise ConfigError("progress: it cannot be called", hint="give a function of (name, done, total)")
    use_cache = cache == "always" or (cache == "auto" and server_has_cache)
    pattern = compile_include(include)
    channel.check_open("push")
    model = source if isinstance(source, Model) else open_model(source)
    try:
        tensors = select(model, pattern)
        model.check_unchanged()
        with channel.exclusive("push"):
            owned: list[RemoteBuffer] = []
            try:
                return _push(channel, recorder, model, tensors, owned, use_cache, verify, progress, device)
            except BaseException as error:
                if channel.survives(error):
                    release_all(channel, owned)
                raise
    finally:
        if model is not source:
            model.close()


def _push(
    channel: Channel,
    recorder: LoadRecorder,
    model: Model,
    tensors: Sequence[ModelTensor],
    owned: list[RemoteBuffer],
    use_cache: bool,
    verify: bool,
    progress: ProgressCallback | None,
    device: int,
) -> PushResult:
    calls, copies = channel.calls, channel.copies
    recorder.switch(Stage.ALLOC)
    placed = place(channel, tensors, device, owned)
    recorder.switch(Stage.OTHER)
    payloads = [tensor.payload for tensor in tensors]
    sender = _Sender(channel, recorder, placed, payloads, use_cache, progress)
    try:
        sender.run()
    finally:
        sender.close()
    recorder.switch(Stage.WAIT)
    barrier(channel, device)
    recorder.switch(Stage.OTHER)
    model.check_unchanged()
    if verify:
        recorder.switch(Stage.VERIFY)
        try:
            verify_tensors(channel, placed, payloads, hint=sender.blame, tell=sender.tell if progress else None)
        except WeightwireError:
            # A source that changed meanwhile explains the difference better than the difference does.
            if not channel.closed:
                model.check_unchanged()
            raise
        model.check_unchanged()
        recorder.switch(Stage.OTHER)
    recorder.calls = channel.calls - calls
    recorder.direct_bytes, recorder.copied_bytes = (
        max(now - before, 0) for now, before in zip(channel.copies, copies, strict=True)
    )
    profile = recorder.finish()
    summary = PushSummary(
        tensors=len(placed),
        bytes=recorder.bytes,
        sent=recorder.bytes - recorder.bytes_saved,
        hits=recorder.hits,
        misses=recorder.misses,
        verified=verify,
        seconds=profile.span_ns / 1e9,
        profile=profile,
    )
    return PushResult({tensor.name: tensor for tensor in placed}, summary)


class _Sender:
    """Sends placed tensors in order; small ones are gathered, large ones asked for first when the cache is used."""

    def __init__(
        self,
        channel: Channel,
        recorder: LoadRecorder,
        placed: Sequence[RemoteTensor],
        payloads: Sequence[FileRange | memoryview],
        use_cache: bool,
        progress: ProgressCallback | None,
    ) -> None:
        self._channel = channel
        self._dialect = channel.dialect
        self._recorder = recorder
        self._placed = placed
        self._payloads = payloads
        self._progress = progress
        self._total = sum(tensor.nbytes for tensor in placed)
        self._done = 0
        recorder.bytes = self._total
        self._answered = self._dialect.answered(Command.SET_TENSOR)
        self._reader = SmallReader(payloads)
        self._batch: list[int] = []
        self._batch_ends: list[int] = []
        self._batch_parts: list[Buffer] = []
        self._batch_limit = MAX_OUTSTANDING if self._answered else _BATCH
        large = [i for i, tensor in enumerate(placed) if tensor.nbytes > CACHE_THRESHOLD] if use_cache else []
        self._cached = frozenset(large)
        self._large = large
        self._asked = 0
        self._asked_ahead = 0
        self._hashes: dict[int, int] = {}
        self._answers: dict[int, bool] = {}
        self._sent_hashes: set[int] = set()
        self._hits: set[str] = set()
        self._ahead = HashAhead([payloads[index] for index in large]) if large else None

    def close(self) -> None:
        """Stop hashing."""
        if self._ahead is not None:
            self._ahead.close()

    def blame(self, tensor: RemoteTensor) -> str:
        """What to do if ``tensor`` turns out wrong on the server."""
        if tensor.name in self._hits:
            index = next(i for i, placed in enumerate(self._placed) if placed is tensor)
            return (
                f"the server filled it from its cache, where {self._hashes[index]:016x} is damaged: "
                "remove that entry there, or push with cache='never'"
            )
        return "the server or the way to it changes bytes; push again, and suspect its memory if it stays so"

    def run(self) -> None:
        """Send everything; answers may be outstanding afterwards. `close` must follow, however this ends."""
        if self._ahead is not None:
            self._ahead.start()
        for index, tensor in enumerate(self._placed):
            if tensor.nbytes < SMALL:
                self._gather(index, tensor)
                continue
            self._flush()
            if index in self._cached and self._hit(index):
                self._recorder.hits += 1
                self._recorder.bytes_saved += tensor.nbytes
                self._hits.add(tensor.name)
                self._report(tensor)
            else:
                self._send_large(index, tensor)
        self._flush()

    # Small tensors.

    def _gather(self, index: int, tensor: RemoteTensor) -> None:
        if not tensor.nbytes:
            self._batch.append(index)
            self._batch_ends.append(self._batch_ends[-1] if self._batch_ends else 0)
            return
        payload = self._payloads[index]
        if isinstance(payload, FileRange):
            data = self._reader.get(payload)
            if data is None:
                self._flush()  # its parts lie in the window that is filled anew
                self._reader.fill(index)
                data = self._reader.get(payload)
                assert data is not None
        else:
            data = payload
        head = self._head(tensor, 0)
        end = (self._batch_ends[-1] if self._batch_ends else 0) + len(head) + tensor.nbytes
        self._batch_parts += (head, data)
        self._batch.append(index)
        self._batch_ends.append(end)
        if end >= WINDOW or len(self._batch_parts) >= 2 * self._batch_limit:
            self._flush()

    def _flush(self) -> None:
        if not self._batch:
            return
        channel = self._channel
        count = len(self._batch_parts) // 2
        if count:
            self._hear_out()
            previous = self._recorder.switch(Stage.SEND)
            try:
                channel.send(*self._batch_parts, messages=count)
            except WeightwireError as error:
                raise self._locate(error) from error.__cause__
            self._recorder.switch(previous)
        batch = [self._placed[index] for index in self._batch]
        self._batch.clear()
        self._batch_ends.clear()
        self._batch_parts.clear()
        if self._answered:
            for tensor in batch:
                if tensor.nbytes:
                    channel.expect(Command.SET_TENSOR, 0, tensor=tensor.name)
            self._drain()
        for tensor in batch:
            self._report(tensor)

    def _locate(self, error: WeightwireError) -> WeightwireError:
        """``error`` of a gathered send, told of the tensor it stopped in."""
        done = int(getattr(error, "bytes_done", 0))
        last = len(self._batch) - 1
        at = next((i for i, end in enumerate(self._batch_ends) if done < end), last)
        tensor = self._placed[self._batch[at]]
        in_message = done - (self._batch_ends[at - 1] if at else 0)
        in_tensor = min(max(in_message - self._head_bytes, 0), tensor.nbytes)
        position = "inside" if in_message > 0 else "before"
        return self._channel.explain(
            error, "SET_TENSOR", tensor=tensor.name, position=position, bytes_done=in_tensor, nbytes=tensor.nbytes
        )

    # Large tensors.

    def _send_large(self, index: int, tensor: RemoteTensor) -> None:
        channel = self._channel
        self._hear_out()
        payload = self._payloads[index]
        head = self._head(tensor, 1 if index in self._cached else 0)
        position = 0
        while True:
            size = min(SLICE, tensor.nbytes - position)
            part = _part(payload, position, size)
            previous = self._recorder.switch(Stage.SEND)
            try:
                if position:
                    channel.more(part)
                else:
                    channel.begin(head, part)
            except WeightwireError as error:
                done = int(getattr(error, "bytes_done", 0))
                sent = position + (done if position else max(done - len(head), 0))
                where = "inside" if position or done else "before"
                raise channel.explain(
                    error, "SET_TENSOR", tensor=tensor.name, position=where, bytes_done=sent, nbytes=tensor.nbytes
                ) from error.__cause__
            self._recorder.switch(previous)
            position += size
            if position == tensor.nbytes:
                break
            self.tell(tensor.name, self._done + position)
        channel.end()
        if self._answered:
            channel.expect(Command.SET_TENSOR, 0, tensor=tensor.name)
            self._drain()
        self._report(tensor)

    @property
    def _head_bytes(self) -> int:
        return 9 + self._dialect.set_tensor_header_bytes

    def _head(self, tensor: RemoteTensor, cache_flag: int) -> bytes:
        head = self._dialect.encode_set_tensor(tensor.wire(), 0, cache_flag)
        return request_header(Command.SET_TENSOR, len(head) + tensor.nbytes) + head

    # The server's cache.

    def _hit(self, index: int) -> bool:
        """Whether the server has filled tensor ``index`` from its cache; asks for later ones while at it."""
        channel = self._channel
        previous = self._recorder.switch(Stage.ASK)
        while index not in self._answers:
            if index not in self._hashes:
                self._ask_group()
            else:
                channel.read_answer()
        self._asked_ahead -= 1
        value = self._hashes[index]
        if not self._answers[index] and value in self._sent_hashes:
            # Its double was asked for at the same time and has been sent since.
            self._ask(index, value)
            channel.settle()
        hit = self._answers[index]
        if not hit:
            self._sent_hashes.add(value)
            self._recorder.misses += 1
        # The questions go out before this tensor is dealt with, so that a server with a warm cache never waits for us.
        if self._ahead is not None and self._asked_ahead < GROUP and self._ahead.ready():
            self._ask_group()
        self._recorder.switch(previous)
        return hit

    def _ask_group(self) -> None:
        assert self._ahead is not None
        previous = self._recorder.switch(Stage.HASH)
        hashes = self._ahead.next(self._watch)
        self._recorder.switch(previous)
        for value in hashes:
            index = self._large[self._asked]
            self._asked += 1
            self._hashes[index] = value
            self._ask(index, value)
            self._asked_ahead += 1
        self._channel.settle(MAX_OUTSTANDING)

    def _hear_out(self) -> None:
        """Wait for the answers to questions already asked, before bytes follow them.

        The server reads and hashes each entry it has, and takes no bytes meanwhile. Seen from a send, several entries
        in a row are one long stall; each answer is a sign of life.
        """
        if len(self._answers) == self._asked:
            return
        previous = self._recorder.switch(Stage.ASK)
        while len(self._answers) < self._asked:
            self._channel.read_answer()
        self._recorder.switch(previous)

    def _watch(self) -> None:
        tensor = self._placed[self._large[self._asked]].name
        self._channel.check_peer("hashing for the server's cache", tensor=tensor)

    def _ask(self, index: int, value: int) -> None:
        tensor = self._placed[index]

        def keep(answer: bytes) -> None:
            said = decode_u8_answer(answer, "SET_TENSOR_HASH")
            if said > 1:
                raise ProtocolError(f"{self._channel.endpoint} answered SET_TENSOR_HASH of {tensor.name!r} with {said}")
            self._answers[index] = said == 1

        payload = self._dialect.encode_set_tensor_hash(tensor.wire(), 0, value)
        self._channel.post(Command.SET_TENSOR_HASH, payload, tensor=tensor.name, then=keep)

    # Waiting and telling.

    def _drain(self) -> None:
        previous = self._recorder.switch(Stage.WAIT)
        self._channel.settle(MAX_OUTSTANDING)
        self._recorder.switch(previous)

    def _report(self, tensor: RemoteTensor) -> None:
        self._done += tensor.nbytes
        self.tell(tensor.name, self._done)

    def tell(self, name: str, done: int) -> None:
        """Report progress: ``done`` bytes of the whole, the last of them of tensor ``name``."""
        if self._progress is not None:
            self._progress(name, done, self._total)
            if self._channel.closed:
                self._channel.check_open("push")


def _part(payload: FileRange | memoryview, position: int, size: int) -> FileRange | memoryview:
    if isinstance(payload, memoryview):
        return payload[position : position + size]
    if position == 0 and size == payload.nbytes:
        return payload
    return FileRange(payload.fd, payload.offset + position, size, payload.path)
