"""The plain way of sending, which is there to be measured against: what a stock client does, and no more.

Bytes, order and questions are those of `Sender`. What differs is what it costs: every large tensor is hashed byte by
byte on the thread that sends, whether or not a cache is asked for it, and every tensor becomes one message in memory
of its own, which is cleared, filled, sent and thrown away (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterable

from weightwire.client.remote import RemoteTensor
from weightwire.client.sender import SLICE, Sender
from weightwire.client.sources import read_range
from weightwire.errors import WeightwireError
from weightwire.hashing import hash_payloads
from weightwire.profile import Stage
from weightwire.ranges import FileRange
from weightwire.transport.memory import cleared_memory
from weightwire.wire.commands import CACHE_THRESHOLD, Command

__all__ = ["PlainSender"]


class PlainSender(Sender):
    """Sends placed tensors one whole message after the other. AllocationError where there is no memory for one."""

    def _send(self, indices: Iterable[int]) -> None:
        for index in indices:
            tensor = self._placed[index]
            if tensor.nbytes:
                self._send_large(index, tensor)
            else:
                self._report(index)

    def _send_large(self, index: int, tensor: RemoteTensor) -> None:
        channel = self._channel
        self._hear_out()
        asked = self._questions is not None and index in self._questions
        if not asked and tensor.nbytes > CACHE_THRESHOLD:
            self._hash(index, tensor)
        head = self._head(tensor, 1 if asked else 0)
        message = self._message(index, tensor, head)
        position = 0
        while True:
            # In slices all the same, so that progress is told as often as elsewhere: they lie one behind the other.
            size = min(SLICE, tensor.nbytes - position)
            at = len(head) + position
            previous = self._recorder.switch(Stage.SEND)
            try:
                if position:
                    channel.more(message[at : at + size])
                else:
                    channel.begin(message[:at], message[at : at + size])
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
        del message
        if self._answered:
            channel.expect(Command.SET_TENSOR, 0, tensor=tensor.name)
            self._drain()
        self._report(index)

    def _message(self, index: int, tensor: RemoteTensor, head: bytes) -> memoryview:
        """Header and payload in one piece of memory that was zero before."""
        message = cleared_memory(len(head) + tensor.nbytes, f"the message with tensor {tensor.name!r},")
        message[: len(head)] = head
        payload = self._payloads[index]
        if isinstance(payload, FileRange):
            read_range(payload, 0, message[len(head) :])
        else:
            message[len(head) :] = payload.cast("B")
        return message

    def _hash(self, index: int, tensor: RemoteTensor) -> None:
        """Hash what nobody asks for: a stock client does so before it knows whether the server has a cache."""

        def watch() -> None:
            self._channel.check_peer("hashing", tensor=tensor.name)

        previous = self._recorder.switch(Stage.HASH)
        hash_payloads([self._payloads[index]], check=watch, plain=True)
        self._recorder.switch(previous)
