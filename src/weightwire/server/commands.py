"""The small commands: everything but the data that comes in. Source: docs/protocol.md, section 5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from weightwire.server.buffers import BufferTable, Located, span
from weightwire.server.capacity import Capacity
from weightwire.server.destinations import Destination
from weightwire.server.errors import BadRequest
from weightwire.server.receive import DIRECT_ROW, check_rows
from weightwire.server.staging import STAGING_BYTES, Staging, rows_of
from weightwire.transport.base import ByteStream
from weightwire.wire import Command, Dialect, RpcTensor, response_header
from weightwire.wire.answers import (
    encode_alloc_answer,
    encode_memory_answer,
    encode_u8_answer,
    encode_u32_answer,
    encode_u64_answer,
)

__all__ = ["ALIGNMENT", "Commands"]

ALIGNMENT: Final = 64
"""What GET_ALIGNMENT says, in bytes: a cache line, so that what embeds the server can use vector loads."""

_MAX_SIZE: Final = (1 << 64) - 1
_COPY_PIECE: Final = 4 << 20


class Commands:
    """Answers the requests of one client that have no payload of data.

    ``handlers`` maps a command to the method that serves it: it takes the request's payload and returns the answer's,
    or None where it has sent the answer itself. ``tensor`` is the name of the tensor at hand, for messages.
    ``stream`` may be exchanged between requests.
    """

    def __init__(
        self, stream: ByteStream, dialect: Dialect, buffers: BufferTable, staging: Staging, capacity: Capacity
    ) -> None:
        self.tensor: str | None = None
        self.stream = stream
        self._dialect = dialect
        self._buffers = buffers
        self._staging = staging
        self._capacity = capacity
        self.handlers: dict[Command, Callable[[bytes], bytes | None]] = {
            Command.DEVICE_COUNT: self._device_count,
            Command.ALLOC_BUFFER: self._alloc_buffer,
            Command.GET_ALIGNMENT: self._alignment,
            Command.GET_MAX_SIZE: self._max_size,
            Command.GET_DEVICE_MEMORY: self._device_memory,
            Command.BUFFER_GET_BASE: self._get_base,
            Command.FREE_BUFFER: self._free_buffer,
            Command.BUFFER_CLEAR: self._buffer_clear,
            Command.INIT_TENSOR: self._init_tensor,
            Command.GET_ALLOC_SIZE: self._alloc_size,
            Command.GET_TENSOR: self._get_tensor,
            Command.GET_TENSOR_2D: self._get_tensor_2d,
            Command.COPY_TENSOR: self._copy_tensor,
            Command.MEMSET_TENSOR: self._memset_tensor,
        }

    # Device.

    def _device_count(self, body: bytes) -> bytes:
        return encode_u32_answer(1)

    def _alignment(self, body: bytes) -> bytes:
        self._device(self._dialect.decode_device(Command.GET_ALIGNMENT, body).device)
        return encode_u64_answer(ALIGNMENT)

    def _max_size(self, body: bytes) -> bytes:
        self._device(self._dialect.decode_device(Command.GET_MAX_SIZE, body).device)
        return encode_u64_answer(_MAX_SIZE)

    def _device_memory(self, body: bytes) -> bytes:
        self._device(self._dialect.decode_device(Command.GET_DEVICE_MEMORY, body).device)
        return encode_memory_answer(min(self._buffers.free_bytes, _MAX_SIZE), min(self._capacity.total, _MAX_SIZE))

    @staticmethod
    def _device(device: int) -> None:
        if device:
            raise BadRequest(f"device {device}, and there is device 0 only")

    # Buffers.

    def _alloc_buffer(self, body: bytes) -> bytes:
        request = self._dialect.decode_alloc_buffer(body)
        self._device(request.device)
        buffer = self._buffers.allocate(request.nbytes, request.device)
        return encode_alloc_answer(buffer.handle, buffer.nbytes) if buffer is not None else encode_alloc_answer(0, 0)

    def _get_base(self, body: bytes) -> bytes:
        return encode_u64_answer(self._buffers.get(self._dialect.decode_handle(body).handle).base)

    def _free_buffer(self, body: bytes) -> bytes:
        self._buffers.free(self._dialect.decode_handle(body).handle)
        return b""

    def _buffer_clear(self, body: bytes) -> bytes:
        request = self._dialect.decode_buffer_clear(body)
        buffer = self._buffers.get(request.handle)
        if buffer.block is not None:
            buffer.block.about_to_write(0, buffer.nbytes)
            buffer.forget_all()
            buffer.block.destination.fill(0, buffer.nbytes, request.value)
        return b""

    # Tensors.

    def _locate(self, tensor: RpcTensor) -> Located:
        self.tensor = tensor.label
        return self._buffers.locate(tensor)

    def _init_tensor(self, body: bytes) -> bytes:
        tensor = self._dialect.decode_init_tensor(body).tensor
        # Nothing to do for memory without padding; a tensor that no buffer holds yet is no mistake of the client's.
        if tensor.buffer:
            self._locate(tensor)
        else:
            span(tensor)
        return b""

    def _alloc_size(self, body: bytes) -> bytes:
        request = self._dialect.decode_alloc_size(body)
        self._device(request.device)
        self.tensor = request.tensor.label
        nbytes = span(request.tensor)
        if nbytes > _MAX_SIZE:
            raise BadRequest(f"tensor {self.tensor!r} spans {nbytes} bytes")
        return encode_u64_answer(nbytes)

    def _get_tensor(self, body: bytes) -> None:
        request = self._dialect.decode_get_tensor(body)
        located = self._locate(request.tensor)
        start = located.range(request.offset, request.nbytes)
        head = response_header(request.nbytes)
        if not request.nbytes:
            self.stream.send(head)
            return
        block = located.buffer.memory
        if block.direct is not None:
            self.stream.send(head, block.direct.look(start, request.nbytes))
        else:
            self.stream.send(head)
            self._send_read(block.destination, start, request.nbytes)

    def _get_tensor_2d(self, body: bytes) -> None:
        request = self._dialect.decode_get_tensor_2d(body)
        located = self._locate(request.tensor)
        start = check_rows(located, request)
        row, rows, stride = request.nbytes, request.n_copies, request.stride
        self.stream.send(response_header(row * rows))
        if not row or not rows:
            return
        block = located.buffer.memory
        if stride == row:
            row, rows = row * rows, 1
        if row >= DIRECT_ROW or rows == 1:
            for at in range(start, start + rows * max(stride, 1), max(stride, 1)):
                if block.direct is not None:
                    self.stream.send(block.direct.look(at, row))
                else:
                    self._send_read(block.destination, at, row)
            return
        batch = STAGING_BYTES // row
        for first in range(0, rows, batch):
            count = min(batch, rows - first)
            packed = self._staging.take(count * row)
            at = start + first * stride
            if block.direct is not None:
                window = block.direct.look(at, (count - 1) * stride + row)
                rows_of(packed, row, count, row)[:] = rows_of(window, row, count, stride)
            else:
                for index in range(count):
                    block.destination.read(at + index * stride, packed[index * row : (index + 1) * row])
            self.stream.send(packed)

    def _send_read(self, destination: Destination, start: int, nbytes: int) -> None:
        for done in range(0, nbytes, STAGING_BYTES):
            piece = self._staging.take(min(nbytes - done, STAGING_BYTES))
            destination.read(start + done, piece)
            self.stream.send(piece)

    def _copy_tensor(self, body: bytes) -> bytes:
        request = self._dialect.decode_copy_tensor(body)
        src = self._locate(request.src)
        dst = self._locate(request.dst)
        nbytes = src.nbytes
        if nbytes > dst.nbytes:
            raise BadRequest(
                f"tensor {src.tensor.label!r} of {nbytes} bytes copied to {dst.tensor.label!r} of {dst.nbytes}"
            )
        if nbytes:
            dst.buffer.memory.about_to_write(dst.start, nbytes)
        placed = dst.buffer.begin(dst)
        if nbytes:
            try:
                self._copy(src, dst)
            except BaseException:
                dst.buffer.spoil(placed)
                raise
        dst.buffer.wrote(placed, dst, 0, nbytes)
        return encode_u8_answer(1)

    def _copy(self, src: Located, dst: Located) -> None:
        source, target = src.buffer.memory, dst.buffer.memory
        size = _COPY_PIECE if source.direct is not None else STAGING_BYTES
        offsets = range(0, src.nbytes, size)
        # In pieces, so that other threads get a turn; from the far end where a tensor moves up onto itself.
        backwards = source is target and src.start < dst.start < src.start + src.nbytes
        for done in reversed(offsets) if backwards else offsets:
            nbytes = min(size, src.nbytes - done)
            if source.direct is not None:
                piece = source.direct.look(src.start + done, nbytes)
            else:
                piece = self._staging.take(nbytes)
                source.destination.read(src.start + done, piece)
            if target.direct is not None:
                target.direct.window(dst.start + done, nbytes)[:] = piece
            else:
                target.destination.write(dst.start + done, piece.toreadonly())

    def _memset_tensor(self, body: bytes) -> bytes:
        request = self._dialect.decode_memset(body)
        located = self._locate(request.tensor)
        start = located.range(request.offset, request.nbytes)
        if request.nbytes:
            located.buffer.memory.about_to_write(start, request.nbytes)
        placed = located.buffer.begin(located)
        if request.nbytes:
            try:
                located.buffer.memory.destination.fill(start, request.nbytes, request.value)
            except BaseException:
                located.buffer.spoil(placed)
                raise
        located.buffer.wrote(placed, located, request.offset, request.nbytes)
        return b""
