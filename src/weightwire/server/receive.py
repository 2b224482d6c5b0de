"""The streaming receive path: a request's header first, its payload straight to where it belongs.

Everything a header says is checked before a byte of the payload is read or any memory is taken for it.
"""

from __future__ import annotations

from typing import Final

from weightwire.cache.kept import Save
from weightwire.cache.saving import Saver
from weightwire.cache.store import TensorCache
from weightwire.cache.writing import CacheWriter
from weightwire.hashing import FNV_OFFSET, fnv1a64
from weightwire.profile import Stage
from weightwire.server.buffers import Block, BufferTable, Located
from weightwire.server.destinations import Destination
from weightwire.server.errors import BadMessage, BadRequest
from weightwire.server.staging import STAGING_BYTES, Staging, rows_of
from weightwire.transport.base import ByteStream
from weightwire.transport.profiling import LoadRecorder
from weightwire.wire import Command, Dialect
from weightwire.wire.messages import Tensor2D
from weightwire.wire.tensor import RpcTensor

__all__ = ["DIRECT_ROW", "Receiver", "check_rows"]

_PIECE: Final = 8 << 20
"""Bytes received between two looks at how far the memory ahead has been populated."""

DIRECT_ROW: Final = 32 << 10
"""Rows of at least this many bytes are worth a system call each; shorter ones are gathered."""


class Receiver:
    """Takes in the payloads of one client. ``tensor`` is the name of the one at hand, for messages; ``stream``
    may be exchanged between requests. ``recorder`` stands in STAGING outside of what is told to it here.
    """

    def __init__(
        self,
        stream: ByteStream,
        dialect: Dialect,
        buffers: BufferTable,
        staging: Staging,
        cache: TensorCache | None,
        saver: Saver | None,
        recorder: LoadRecorder,
    ) -> None:
        self.tensor: str | None = None
        self.stream = stream
        self._dialect = dialect
        self._buffers = buffers
        self._staging = staging
        self._cache = cache
        self._saver = saver
        self._recorder = recorder
        self._head_bytes = dialect.set_tensor_header_bytes

    def set_tensor(self, size: int) -> None:
        """SET_TENSOR of a declared ``size`` bytes: read the header, check it, then take the data in."""
        nbytes = size - self._head_bytes
        if nbytes < 0:
            raise BadMessage(f"{size} bytes declared, and its header alone has {self._head_bytes}")
        request = self._dialect.decode_set_tensor(self.stream.recv(self._head_bytes))
        located = self._locate(request.tensor)
        start = located.range(request.offset, nbytes)
        buffer = located.buffer
        placed = buffer.begin(located)
        if not nbytes:
            buffer.wrote(placed, located, request.offset, 0)
            return
        block = buffer.memory
        kept = self._cache is not None and self._dialect.saves_to_cache(nbytes, request.cache_flag)
        save: Save | None = None
        try:
            if block.direct is not None:
                window = block.direct.window(start, nbytes)
                if kept and self._saver is not None:
                    save = self._saver.begin(window)
                self._into_memory(block, window, start, save)
            elif kept and self._cache is not None and self._saver is not None:
                self._through_hook(block.destination, start, nbytes, self._cache.writer(), self._saver)
            else:
                self._into_hook(block.destination, start, nbytes, None)
        except BaseException:
            if save is not None:
                save.abandon()
            buffer.spoil(placed)
            raise
        if save is not None:
            block.keep(start, save)
            save.complete()
        self._recorder.set_tensor_bytes += nbytes
        buffer.wrote(placed, located, request.offset, nbytes)

    def set_tensor_2d(self, size: int) -> None:
        """SET_TENSOR_2D of a declared ``size`` bytes: packed rows that go a stride apart."""
        head_bytes = self._dialect.min_request_bytes(Command.SET_TENSOR_2D)
        if size < head_bytes:
            raise BadMessage(f"{size} bytes declared, and its header alone has {head_bytes}")
        request = self._dialect.decode_set_tensor_2d(self.stream.recv(head_bytes))
        located = self._locate(request.tensor)
        row, rows, stride = request.nbytes, request.n_copies, request.stride
        start = check_rows(located, request)
        if size - head_bytes != row * rows:
            raise BadMessage(f"{size - head_bytes} bytes of data for {rows} rows of {row} bytes")
        buffer = located.buffer
        if row and rows:
            buffer.memory.about_to_write(start, (rows - 1) * stride + row)
        placed = buffer.begin(located)
        if row and rows:
            block = buffer.memory
            try:
                self._rows(block, start, row, rows, stride)
            except BaseException:
                buffer.spoil(placed)
                raise
        self._recorder.set_tensor_bytes += row * rows
        buffer.wrote_rows(placed, located, request.offset, row, rows, stride)

    def _recv_into(self, piece: memoryview) -> None:
        previous = self._recorder.switch(Stage.WIRE)
        self.stream.recv_into(piece)
        self._recorder.switch(previous)

    def _copied(self, piece: memoryview) -> None:
        """``piece`` is on its way through the staging buffer."""
        self._recorder.copies += 1
        self._recorder.copied_bytes += piece.nbytes

    def _locate(self, tensor: RpcTensor) -> Located:
        self.tensor = tensor.label
        return self._buffers.locate(tensor)

    # From the stream.

    def _rows(self, block: Block, start: int, row: int, rows: int, stride: int) -> None:
        if rows == 1 or stride == row:
            self._range(block, start, row * rows)
        elif row >= DIRECT_ROW:
            for index in range(rows):
                self._range(block, start + index * stride, row)
        else:
            self._short_rows(block, start, row, rows, stride)

    def _range(self, block: Block, start: int, nbytes: int) -> None:
        if block.direct is not None:
            self._into_memory(block, block.direct.window(start, nbytes), start, None)
        else:
            self._into_hook(block.destination, start, nbytes, None)

    def _into_memory(self, block: Block, window: memoryview, start: int, save: Save | None) -> None:
        """Receive into memory itself; ``save`` follows."""
        nbytes = window.nbytes
        # In pieces: a client that overwrites what was just sent goes on as fast as the disk, and never stands still.
        needed = block.needed(start, nbytes)
        for done in range(0, nbytes, _PIECE):
            piece = window[done : done + _PIECE]
            block.settle(needed, start + done + piece.nbytes)
            block.reached(start + done + piece.nbytes)
            self._recv_into(piece)
            if save is not None:
                save.landed(done + piece.nbytes)

    def _through_hook(
        self, destination: Destination, start: int, nbytes: int, writer: CacheWriter, saver: Saver
    ) -> None:
        """Receive through the staging buffer, and keep what passes."""
        try:
            digest = self._into_hook(destination, start, nbytes, writer)
        except BaseException:
            writer.abort()
            raise
        saver.put(writer, digest, nbytes)

    def _into_hook(self, destination: Destination, start: int, nbytes: int, writer: CacheWriter | None) -> int:
        """Receive through the staging buffer; with a ``writer`` the bytes are hashed and cached as they pass."""
        digest = FNV_OFFSET
        for done in range(0, nbytes, STAGING_BYTES):
            piece = self._staging.take(min(nbytes - done, STAGING_BYTES))
            self._recv_into(piece)
            self._copied(piece)
            if writer is not None:
                previous = self._recorder.switch(Stage.HASH)
                digest = fnv1a64(piece, digest)
                self._recorder.switch(previous)
                writer.write(piece)
            destination.write(start + done, piece.toreadonly())
        return digest

    def _short_rows(self, block: Block, start: int, row: int, rows: int, stride: int) -> None:
        batch = STAGING_BYTES // row
        for first in range(0, rows, batch):
            count = min(batch, rows - first)
            packed = self._staging.take(count * row)
            self._recv_into(packed)
            self._copied(packed)
            at = start + first * stride
            if block.direct is not None:
                extent = (count - 1) * stride + row
                block.reached(at + extent)
                rows_of(block.direct.window(at, extent), row, count, stride)[:] = rows_of(packed, row, count, row)
                continue
            for index in range(count):
                block.destination.write(at + index * stride, packed[index * row : (index + 1) * row].toreadonly())


def check_rows(located: Located, request: Tensor2D) -> int:
    """Where in the buffer the first row starts. BadRequest if rows overlap or are not within the tensor."""
    row, rows, stride = request.nbytes, request.n_copies, request.stride
    if not row or not rows:
        return located.range(request.offset, 0)
    if rows > 1 and stride < row:
        raise BadRequest(f"rows of {row} bytes that overlap, {stride} bytes apart")
    return located.range(request.offset, (rows - 1) * stride + row)
