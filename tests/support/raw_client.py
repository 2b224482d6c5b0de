"""A ggml RPC client that says exactly what a test tells it to, mistakes included, over a plain socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Self

from weightwire.wire import Command, RpcTensor, dialect_for, weight_tensor

__all__ = ["RawClient"]

TIMEOUT = 30.0


class RawClient:
    """Connected, and past HELLO unless told otherwise. Every wait ends after `TIMEOUT` seconds with an error."""

    def __init__(self, port: int, protocol: str = "7.0", *, hello: bool = True, host: str = "127.0.0.1") -> None:
        self.dialect = dialect_for(protocol)
        self.socket = socket.create_connection((host, port), timeout=TIMEOUT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.greeting = b""
        if hello:
            self.greeting = self.ask(Command.HELLO, bytes(self.dialect.hello_request_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    @property
    def name(self) -> str:
        """How the server calls this client in its log."""
        host, port = self.socket.getsockname()[:2]
        return f"{host}:{port}"

    # Bytes.

    def send(self, cmd: int, payload: bytes = b"", *, size: int | None = None) -> None:
        """A request; ``size`` is what its head declares, if that is to be a lie."""
        self.socket.sendall(struct.pack("<BQ", cmd, len(payload) if size is None else size) + payload)

    def receive(self, nbytes: int) -> bytes:
        """Exactly that many bytes. ConnectionError if the server closes before."""
        got = bytearray()
        while len(got) < nbytes:
            piece = self.socket.recv(min(1 << 20, nbytes - len(got)))
            if not piece:
                raise ConnectionError(f"the server closed after {len(got)} of {nbytes} bytes")
            got += piece
        return bytes(got)

    def answer(self) -> bytes:
        """The payload of one answer."""
        return self.receive(struct.unpack("<Q", self.receive(8))[0])

    def ask(self, cmd: int, payload: bytes = b"") -> bytes:
        """A request that is answered."""
        self.send(cmd, payload)
        return self.answer()

    def tell(self, cmd: int, payload: bytes = b"") -> None:
        """A request, and its empty answer where this version has one."""
        self.send(cmd, payload)
        if self.dialect.answered(cmd):
            assert self.answer() == b""

    def closed(self) -> bool:
        """Whether the server ends the connection without another byte. Waits for it."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def finish_sending(self) -> None:
        """Close this side only: no more bytes will come."""
        self.socket.shutdown(socket.SHUT_WR)

    # Requests as they should be.

    def barrier(self) -> tuple[int, int]:
        """(free, total) bytes of the device, after everything sent before has been served."""
        free, total = struct.unpack("<QQ", self.ask(*self._device(Command.GET_DEVICE_MEMORY)))
        return free, total

    def number(self, cmd: Command) -> int:
        """GET_ALIGNMENT or GET_MAX_SIZE."""
        return int.from_bytes(self.ask(*self._device(cmd)), "little")

    def _device(self, cmd: Command) -> tuple[int, bytes]:
        return cmd, self.dialect.encode_device(cmd, 0)

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """(handle, base) of a new buffer, which must be granted."""
        handle, size = self.try_allocate(nbytes)
        assert handle
        assert size == nbytes
        return handle, self.base(handle)

    def try_allocate(self, nbytes: int) -> tuple[int, int]:
        handle, size = struct.unpack("<QQ", self.ask(Command.ALLOC_BUFFER, self.dialect.encode_alloc_buffer(0, nbytes)))
        return handle, size

    def base(self, handle: int) -> int:
        return int.from_bytes(self.ask(Command.BUFFER_GET_BASE, self.dialect.encode_handle(handle)), "little")

    def free(self, handle: int) -> None:
        self.tell(Command.FREE_BUFFER, self.dialect.encode_handle(handle))

    def place(
        self,
        name: str,
        nbytes: int,
        at: tuple[int, int],
        offset: int = 0,
        *,
        type_code: int = 24,
        ne: Sequence[int] = (),
    ) -> RpcTensor:
        """A tensor ``offset`` bytes into the buffer ``at`` (handle and base)."""
        return weight_tensor(name, type_code, ne or (nbytes,), nbytes, buffer=at[0], data=at[1] + offset)

    def set(self, tensor: RpcTensor, data: bytes, offset: int = 0, flag: int = 0) -> None:
        self.tell(Command.SET_TENSOR, self.dialect.encode_set_tensor(tensor, offset, flag) + data)

    def set_from_cache(self, tensor: RpcTensor, content_hash: int, offset: int = 0) -> bool:
        answer = self.ask(Command.SET_TENSOR_HASH, self.dialect.encode_set_tensor_hash(tensor, offset, content_hash))
        assert answer in (b"\0", b"\1")
        return answer == b"\1"

    def get(self, tensor: RpcTensor, offset: int = 0, nbytes: int | None = None) -> bytes:
        wanted = tensor.nbytes - offset if nbytes is None else nbytes
        return self.ask(Command.GET_TENSOR, self.dialect.encode_get_tensor(tensor, offset, wanted))
