"""The plain way of sending, which is there to be measured against: what a stock client does, and no more.

Bytes, order and questions are those of `Sender`. What differs is what it costs: every large tensor is hashed byte by
byte on the thread that sends, whether or not a cache is asked for it, and every tensor becomes one message in memory
of its own, which is cleared, filled, sent and thrown away (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weightwire.client.remote import RemoteTensor
from weightwire.client.sender import Sender
from weightwire.hashing import hash_payloads
from weightwire.model.reading import read_range
from weightwire.profile import Stage
from weightwire.ranges import FileRange
from weightwire.transport.memory import cleared_memory
from weightwire.wire.commands import CACHE_THRESHOLD

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

    def _parts(self, index: int, tensor: RemoteTensor, head: bytes) -> Callable[[int, int], FileRange | memoryview]:
        asked = self._questions is not None and index in self._questions
        if not asked and tensor.nbytes > CACHE_THRESHOLD:
            self._hash(index, tensor)
        previous = self._recorder.switch(Stage.STAGING)
        try:
            message = self._message(index, tensor, head)
        finally:
            self._recorder.switch(previous)
        self._recorder.copies += 1
        self._recorder.copied_bytes += tensor.nbytes

        def part(position: int, size: int) -> memoryview:
            # In slices all the same, so that progress is told as often as elsewhere: they lie one behind the other.
            return message[len(head) + position : len(head) + position + size]

        return part

    def _message(self, index: int, tensor: RemoteTensor, head: bytes) -> memoryview:
        """Header and payload in one piece of memory that was zero before."""
        message = cleared_memory(len(head) + tensor.nbytes, f"the message with tensor {tensor.name!r},")
        message[: len(head)] = head
        payload = self._payloads[index]
        if isinstance(payload, FileRange):
            previous = self._recorder.switch(Stage.READ)
            try:
                read_range(payload, 0, message[len(head) :])
            finally:
                self._recorder.switch(previous)
        else:
            message[len(head) :] = payload.cast("B")
        return message

    def _hash(self, index: int, tensor: RemoteTensor) -> None:
        """Hash what nobody asks for: a stock client does so before it knows whether the server has a cache."""

        def watch() -> None:
            self._channel.check_peer("hashing", tensor=tensor.name)

        previous = self._recorder.switch(Stage.HASH)
        try:
            hash_payloads([self._payloads[index]], check=watch, plain=True)
        finally:
            self._recorder.switch(previous)
