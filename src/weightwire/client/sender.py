"""Send placed tensors: small ones gathered, large ones in slices, and none that the server's cache has filled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from weightwire.client.asking import Questions
from weightwire.client.channel import MAX_OUTSTANDING, Channel
from weightwire.client.options import ProgressCallback
from weightwire.client.remote import RemoteTensor
from weightwire.client.small import SMALL, WINDOW, SmallReader
from weightwire.client.sources import BLOCK, Sources
from weightwire.errors import WeightwireError
from weightwire.profile import Stage
from weightwire.ranges import FileRange
from weightwire.wire.commands import Command
from weightwire.wire.framing import request_header

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Sender"]

SLICE: Final = 64 * 1024 * 1024
"""Bytes of a large payload between two reports of progress."""

_BATCH: Final = 256
"""Most small messages gathered into one send."""

_PUT_OFF: Final = 32 << 20
"""Bytes of tensors no cache is asked for that wait while hits follow each other."""


class Sender:
    """Sends placed tensors in order; those that ``questions`` names only if the server's cache has not filled them."""

    def __init__(
        self,
        channel: Channel,
        placed: Sequence[RemoteTensor],
        payloads: Sequence[FileRange | memoryview],
        questions: Questions | None,
        progress: ProgressCallback | None,
        sources: Sources | None = None,
    ) -> None:
        self._channel = channel
        self._dialect = channel.dialect
        self._recorder = channel.recorder
        self._placed = placed
        self._payloads = payloads
        self._questions = questions
        self._progress = progress
        self._sources = sources or Sources(payloads)
        self._total = sum(tensor.nbytes for tensor in placed)
        self._done = 0
        self._answered = self._dialect.answered(Command.SET_TENSOR)
        self._reader = SmallReader(payloads)
        self._batch: list[int] = []
        self._batch_ends: list[int] = []
        self._batch_parts: list[Buffer] = []
        self._batch_limit = MAX_OUTSTANDING if self._answered else _BATCH

    def run(self) -> None:
        """Send everything; answers may be outstanding afterwards."""
        questions = self._questions
        if questions is None:
            self._send(range(len(self._placed)))
            return
        # What no cache is asked for waits while hits follow each other. Before bytes go, all questions have to be
        # answered; a server with a warm cache would have nothing to do meanwhile, at every small tensor.
        put_off: list[int] = []
        nbytes = 0
        for index, tensor in enumerate(self._placed):
            if index not in questions:
                put_off.append(index)
                nbytes += tensor.nbytes
            elif questions.hit(index):
                self._report(index)
            else:
                put_off.append(index)
                nbytes = _PUT_OFF
            if nbytes >= _PUT_OFF:
                self._send(put_off)
                put_off.clear()
                nbytes = 0
        self._send(put_off)

    def again(self, indices: Iterable[int]) -> None:
        """Send tensors in full that have been reported already. Nothing more is reported."""
        self._progress = None
        for index in indices:
            self._send_large(index, self._placed[index])

    def _send(self, indices: Iterable[int]) -> None:
        for index in indices:
            tensor = self._placed[index]
            if tensor.nbytes < SMALL:
                self._gather(index, tensor)
                continue
            self._flush()
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
                self._sources.ahead(index)
                self._flush()  # its parts lie in the window that is filled anew
                previous = self._recorder.switch(Stage.READ)
                self._reader.fill(index)
                self._recorder.switch(previous)
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
            since = self._recorder.now()
            previous = self._recorder.switch(Stage.WIRE)
            try:
                channel.send(*self._batch_parts)
            except WeightwireError as error:
                raise self._locate(error) from error.__cause__
            self._recorder.switch(previous)
            tensors = [tensor for tensor in map(self._placed.__getitem__, self._batch) if tensor.nbytes]
            channel.sent_tensors([tensor.name for tensor in tensors], sum(tensor.nbytes for tensor in tensors), since)
        batch = self._batch.copy()
        self._batch.clear()
        self._batch_ends.clear()
        self._batch_parts.clear()
        if self._answered:
            self._drain()
        for index in batch:
            self._report(index)

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
        step = BLOCK if self._sources.in_blocks(index) else SLICE
        head = self._head(tensor, 1 if self._questions is not None and index in self._questions else 0)
        position = 0
        part_of = self._parts(index, tensor, head)
        since = self._recorder.now()
        while True:
            size = min(step, tensor.nbytes - position)
            previous = self._recorder.switch(Stage.READ)
            part = part_of(position, size)
            self._recorder.switch(Stage.WIRE)
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
        channel.sent_tensors([tensor.name], tensor.nbytes, since)
        if self._answered:
            self._drain()
        self._report(index)

    def _parts(self, index: int, tensor: RemoteTensor, head: bytes) -> Callable[[int, int], FileRange | memoryview]:
        """What gives the bytes of a large tensor that start at a position and are so many."""

        def part(position: int, size: int) -> FileRange | memoryview:
            return self._sources.part(index, position, size)

        return part

    @property
    def _head_bytes(self) -> int:
        return 9 + self._dialect.set_tensor_header_bytes

    def _head(self, tensor: RemoteTensor, cache_flag: int) -> bytes:
        head = self._dialect.encode_set_tensor(tensor.wire(), 0, cache_flag)
        return request_header(Command.SET_TENSOR, len(head) + tensor.nbytes) + head

    # Waiting and telling.

    def _hear_out(self) -> None:
        if self._questions is not None:
            self._questions.hear_out()

    def _drain(self) -> None:
        previous = self._recorder.switch(Stage.WAIT)
        self._channel.settle(MAX_OUTSTANDING)
        self._recorder.switch(previous)

    def _report(self, index: int) -> None:
        tensor = self._placed[index]
        self._sources.done(index)
        self._done += tensor.nbytes
        self._recorder.mark()
        self.tell(tensor.name, self._done)

    def tell(self, name: str, done: int) -> None:
        """Report progress: ``done`` bytes of the whole, the last of them of tensor ``name``."""
        if self._progress is not None:
            self._progress(name, done, self._total)
            if self._channel.closed:
                self._channel.check_open("push")
