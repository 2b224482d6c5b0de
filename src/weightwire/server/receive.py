"""The streaming receive path: a request's header first, its payload straight to where it belongs.

Everything a header says is checked before a byte of the payload is read or any memory is taken for it.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from weightwire.cache.store import CacheWriter, TensorCache
from weightwire.errors import WeightwireError
from weightwire.hashing import FNV_OFFSET, fnv1a64, hash_payload
from weightwire.ranges import FileRange
from weightwire.server.buffers import Block, BufferTable, Located
from weightwire.server.destinations import Destination
from weightwire.server.errors import BadRequest
from weightwire.server.staging import STAGING_BYTES, Staging, rows_of
from weightwire.transport.base import ByteStream
from weightwire.wire import Command, Dialect
from weightwire.wire.messages import Tensor2D
from weightwire.wire.tensor import RpcTensor

__all__ = ["DIRECT_ROW", "Receiver", "check_rows"]

logger = logging.getLogger(__name__)

_PIECE: Final = 8 << 20
"""Bytes received between two looks at how far the memory ahead has been populated."""

_READ_PIECE: Final = 4 << 20

DIRECT_ROW: Final = 32 << 10
"""Rows of at least this many bytes are worth a system call each; shorter ones are gathered."""


class Receiver:
    """Takes in the payloads of one client. ``tensor`` is the name of the one at hand, for messages; ``stream``
    may be exchanged between requests."""

    def __init__(
        self,
        stream: ByteStream,
        dialect: Dialect,
        buffers: BufferTable,
        staging: Staging,
        cache: TensorCache | None,
    ) -> None:
        self.tensor: str | None = None
        self.stream = stream
        self._dialect = dialect
        self._buffers = buffers
        self._staging = staging
        self._cache = cache
        self._head_bytes = dialect.set_tensor_header_bytes

    def set_tensor(self, size: int) -> None:
        """SET_TENSOR of a declared ``size`` bytes: read the header, check it, then take the data in."""
        nbytes = size - self._head_bytes
        if nbytes < 0:
            raise BadRequest(f"{size} bytes declared, and its header alone has {self._head_bytes}")
        request = self._dialect.decode_set_tensor(self.stream.recv(self._head_bytes))
        located = self._locate(request.tensor)
        start = located.range(request.offset, nbytes)
        buffer = located.buffer
        placed = buffer.begin(located)
        if not nbytes:
            buffer.wrote(placed, located, request.offset, 0)
            return
        block = buffer.memory
        keep = self._cache if self._cache and self._dialect.saves_to_cache(nbytes, request.cache_flag) else None
        try:
            if block.direct is not None:
                window = block.direct.window(start, nbytes)
                digest = self._into_memory(block, window, start, hashed=keep is not None)
            elif keep is not None:
                with keep.writer() as writer:
                    digest = self._into_hook(block.destination, start, nbytes, writer)
                    writer.commit(digest)
            else:
                self._into_hook(block.destination, start, nbytes, None)
        except BaseException:
            buffer.spoil(placed)
            raise
        buffer.wrote(placed, located, request.offset, nbytes)
        if keep is not None and block.direct is not None and not keep.holds(digest, window):
            keep.save(digest, [window])

    def set_tensor_2d(self, size: int) -> None:
        """SET_TENSOR_2D of a declared ``size`` bytes: packed rows that go a stride apart."""
        head_bytes = self._dialect.min_request_bytes(Command.SET_TENSOR_2D)
        if size < head_bytes:
            raise BadRequest(f"{size} bytes declared, and its header alone has {head_bytes}")
        request = self._dialect.decode_set_tensor_2d(self.stream.recv(head_bytes))
        located = self._locate(request.tensor)
        row, rows, stride = request.nbytes, request.n_copies, request.stride
        start = check_rows(located, request)
        if size - head_bytes != row * rows:
            raise BadRequest(f"{size - head_bytes} bytes of data for {rows} rows of {row} bytes")
        buffer = located.buffer
        placed = buffer.begin(located)
        if row and rows:
            block = buffer.memory
            try:
                if rows == 1 or stride == row:
                    self._range(block, start, row * rows)
                elif row >= DIRECT_ROW:
                    for index in range(rows):
                        self._range(block, start + index * stride, row)
                else:
                    self._short_rows(block, start, row, rows, stride)
            except BaseException:
                buffer.spoil(placed)
                raise
        buffer.wrote_rows(placed, located, request.offset, row, rows, stride)

    def set_tensor_hash(self, body: bytes) -> bool:
        """SET_TENSOR_HASH: fill the tensor from the cache. True only if the entry was whole and its content proved
        right.
        """
        request = self._dialect.decode_set_tensor_hash(body)
        located = self._locate(request.tensor)
        start = located.range(request.offset, 0)
        nbytes = located.nbytes - request.offset
        if self._cache is None or not nbytes:
            return False
        fd = self._cache.lookup(request.hash, nbytes)
        if fd is None:
            self._look_into(self._cache, request.hash, nbytes)
            return False
        buffer = located.buffer
        block = buffer.memory
        try:
            if block.direct is None and not self._proved(self._cache, fd, request.hash, nbytes):
                return False
            placed = buffer.begin(located)
            filled = False
            try:
                if block.direct is not None:
                    window = block.direct.window(start, nbytes)
                    filled = self._file_into_memory(block, fd, window, start) == request.hash
                else:
                    filled = self._file_into_hook(block.destination, fd, start, nbytes) == request.hash
            finally:
                if not filled:
                    buffer.spoil(placed)
        except OSError as error:
            logger.warning("cache entry %s cannot be read: %s", self._cache.path_for(request.hash), error)
            return False
        finally:
            os.close(fd)
        if not filled:
            self._cache.discard(request.hash, "its content is not what its name says")
            return False
        buffer.wrote(placed, located, request.offset, nbytes)
        return True

    def _locate(self, tensor: RpcTensor) -> Located:
        self.tensor = tensor.label
        return self._buffers.locate(tensor)

    # From the stream.

    def _range(self, block: Block, start: int, nbytes: int) -> None:
        if block.direct is not None:
            self._into_memory(block, block.direct.window(start, nbytes), start, hashed=False)
        else:
            self._into_hook(block.destination, start, nbytes, None)

    def _into_memory(self, block: Block, window: memoryview, start: int, *, hashed: bool) -> int:
        """Receive into memory itself; the FNV-1a 64 of what came if ``hashed``."""
        digest = FNV_OFFSET
        nbytes = window.nbytes
        for done in range(0, nbytes, _PIECE):
            piece = window[done : done + _PIECE]
            block.reached(start + done + piece.nbytes)
            self.stream.recv_into(piece)
            if hashed:
                # Now, while the piece is still warm in the processor's cache.
                digest = fnv1a64(piece, digest)
        return digest

    def _into_hook(self, destination: Destination, start: int, nbytes: int, writer: CacheWriter | None) -> int:
        """Receive through the staging buffer; with a ``writer`` the bytes are hashed and cached as they pass."""
        digest = FNV_OFFSET
        for done in range(0, nbytes, STAGING_BYTES):
            piece = self._staging.take(min(nbytes - done, STAGING_BYTES))
            self.stream.recv_into(piece)
            if writer is not None:
                digest = fnv1a64(piece, digest)
                writer.write(piece)
            destination.write(start + done, piece.toreadonly())
        return digest

    def _short_rows(self, block: Block, start: int, row: int, rows: int, stride: int) -> None:
        batch = STAGING_BYTES // row
        for first in range(0, rows, batch):
            count = min(batch, rows - first)
            packed = self._staging.take(count * row)
            self.stream.recv_into(packed)
            at = start + first * stride
            if block.direct is not None:
                extent = (count - 1) * stride + row
                block.reached(at + extent)
                rows_of(block.direct.window(at, extent), row, count, stride)[:] = rows_of(packed, row, count, row)
                continue
            for index in range(count):
                block.destination.write(at + index * stride, packed[index * row : (index + 1) * row].toreadonly())

    # From the cache.

    def _file_into_memory(self, block: Block, fd: int, window: memoryview, start: int) -> int:
        """Read the file straight into memory; the FNV-1a 64 of what is there now."""
        digest = FNV_OFFSET
        for done in range(0, window.nbytes, _READ_PIECE):
            piece = window[done : done + _READ_PIECE]
            block.reached(start + done + piece.nbytes)
            _read_exactly(fd, piece, done)
            digest = fnv1a64(piece, digest)
        return digest

    def _file_into_hook(self, destination: Destination, fd: int, start: int, nbytes: int) -> int:
        digest = FNV_OFFSET
        for done in range(0, nbytes, STAGING_BYTES):
            piece = self._staging.take(min(nbytes - done, STAGING_BYTES))
            _read_exactly(fd, piece, done)
            digest = fnv1a64(piece, digest)
            destination.write(start + done, piece.toreadonly())
        return digest

    @staticmethod
    def _proved(cache: TensorCache, fd: int, content_hash: int, nbytes: int) -> bool:
        """Whether the file's content is what its name says; a hook must not be shown anything else."""
        try:
            actual = hash_payload(FileRange(fd, 0, nbytes, str(cache.path_for(content_hash))))
        except (OSError, WeightwireError) as error:
            logger.warning("cache entry %s cannot be read: %s", cache.path_for(content_hash), error)
            return False
        if actual != content_hash:
            cache.discard(content_hash, "its content is not what its name says")
        return actual == content_hash

    def _look_into(self, cache: TensorCache, content_hash: int, nbytes: int) -> None:
        """A miss: if there is an entry of another size, find out whether it is a bad one, which would be missed for
        ever.
        """
        size = cache.size_of(content_hash)
        if size is None or size == nbytes:
            return
        fd = cache.lookup(content_hash, size)
        if fd is None:
            return
        try:
            self._proved(cache, fd, content_hash, size)
        finally:
            os.close(fd)


def check_rows(located: Located, request: Tensor2D) -> int:
    """Where in the buffer the first row starts. BadRequest if rows overlap or are not within the tensor."""
    row, rows, stride = request.nbytes, request.n_copies, request.stride
    if not row or not rows:
        return located.range(request.offset, 0)
    if rows > 1 and stride < row:
        raise BadRequest(f"rows of {row} bytes that overlap, {stride} bytes apart")
    return located.range(request.offset, (rows - 1) * stride + row)


def _read_exactly(fd: int, piece: memoryview, offset: int) -> None:
    done = 0
    while done < piece.nbytes:
        got = os.preadv(fd, [piece[done:]], offset + done)
        if not got:
            raise OSError(f"it ends at byte {offset + done}, shorter than when it was opened")
        done += got
