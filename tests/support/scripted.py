"""Stand-in ggml RPC servers: each connection runs a script that says exactly what the server does, mistakes included.

The bytes are taken apart and put together here by hand, so that nothing the client encodes is checked with its own
encoder.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

__all__ = ["Message", "Peer", "ScriptedServer", "StandIn", "hello_answer", "serve_hello"]

TIMEOUT = 30.0


@dataclass(frozen=True)
class Message:
    """One request as it arrived: command, and payload without its 9-byte head."""

    command: int
    payload: bytes


class Peer:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(TIMEOUT)
        self.requests: list[Message] = []

    def take(self, nbytes: int) -> bytes:
        """Exactly so many bytes; ConnectionError if the client leaves before."""
        data = bytearray()
        while len(data) < nbytes:
            part = self.socket.recv(min(nbytes - len(data), 1 << 20))
            if not part:
                raise ConnectionError(f"the client left after {len(data)} of {nbytes} bytes")
            data += part
        return bytes(data)

    def head(self) -> tuple[int, int]:
        """Command and declared size of the next request."""
        command, size = struct.unpack("<BQ", self.take(9))
        return command, size

    def request(self) -> Message:
        """The next request, whole."""
        command, size = self.head()
        message = Message(command, self.take(size))
        self.requests.append(message)
        return message

    def answer(self, payload: bytes = b"") -> None:
        self.send(struct.pack("<Q", len(payload)) + payload)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def rest(self) -> bytes:
        """Everything the client still sends until it closes."""
        data = bytearray()
        try:
            while part := self.socket.recv(1 << 20):
                data += part
        except ConnectionResetError:
            pass
        return bytes(data)

    def reset(self) -> None:
        """Close with a reset instead of a good end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


Script = Callable[[Peer], None]


class ScriptedServer:
    """Listens on loopback and gives each connection the next script; after the last it accepts no more.

    A context manager; leaving it joins its thread and raises what a script raised.
    """

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(TIMEOUT)
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._open: socket.socket | None = None
        self._error: BaseException | None = None
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="scripted-server", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for script in self._scripts:
                connection, _ = self._listener.accept()
                self.connections += 1
                with connection:
                    self._open = connection
                    script(Peer(connection))
        except BaseException as error:
            if not self._leaving:
                self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A script that still waits for a client is woken; one that is on its way out is given the time it needs.
        self._thread.join(1.0 if error is None and self.connections == len(self._scripts) else 0.0)
        self._leaving = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which closing would not
        self._listener.close()
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        if error is None and self._error is not None:
            raise AssertionError(f"the scripted server failed: {self._error!r}") from self._error


def hello_answer(version: tuple[int, int, int], *, flags: int = 0, caps: bytes = bytes(24)) -> bytes:
    """The payload with which a server of ``version`` answers HELLO."""
    return bytes(version) if version[0] < 4 else bytes((*version, flags)) + caps


def serve_hello(peer: Peer, version: tuple[int, int, int] = (7, 0, 0), *, flags: int = 0) -> bool:
    """Answer HELLO as a server of ``version`` does: False if it refuses the form and closes."""
    command, size = peer.head()
    assert command == 14
    if size != (0 if version[0] < 4 else 24):
        return False
    assert peer.take(size) == bytes(size)
    peer.answer(hello_answer(version, flags=flags))
    return True


@dataclass
class StandIn:
    """A script that serves the weight path of one version from plain bytearrays and keeps every request.

    ``padding`` is added to what GET_ALLOC_SIZE says; ``cache`` maps hashes to bytes; ``capacity`` is what
    ALLOC_BUFFER can give in all. Bytes past a tensor or a buffer fail the test, as they would kill a stock server.
    """

    version: tuple[int, int, int] = (7, 0, 0)
    alignment: int = 64
    max_size: int = (1 << 64) - 1
    padding: int = 0
    flags: int = 0
    capacity: int = 1 << 40
    cache: dict[int, bytes] = field(default_factory=dict)
    requests: list[Message] = field(default_factory=list)
    buffers: dict[int, bytearray] = field(default_factory=dict)
    bases: dict[int, int] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)

    def __call__(self, peer: Peer) -> None:
        if not serve_hello(peer, self.version, flags=self.flags):
            return
        try:
            while True:
                message = peer.request()
                self.requests.append(message)
                answer = self.serve(message)
                if answer is not None:
                    peer.answer(answer)
        except (ConnectionError, OSError):
            return

    @property
    def commands(self) -> list[int]:
        return [message.command for message in self.requests]

    def of(self, command: int) -> list[Message]:
        return [message for message in self.requests if message.command == command]

    def serve(self, message: Message) -> bytes | None:
        major, minor, _ = self.version
        command, payload = message.command, message.payload
        if major >= 3 and command in (0, 1, 2, 11, 13):
            (device,) = struct.unpack_from("<I", payload)
            assert device == 0
            payload = payload[4:]
        match command:
            case 0:
                (nbytes,) = struct.unpack("<Q", payload)
                if nbytes > self.capacity - sum(map(len, self.buffers.values())):
                    return bytes(16)
                handle = 0x1000 + len(self.bases)
                self.bases[handle] = (len(self.bases) + 1) << 40
                self.buffers[handle] = bytearray(b"\xee") * nbytes
                return struct.pack("<QQ", handle, nbytes)
            case 1:
                assert payload == b""
                return struct.pack("<Q", self.alignment)
            case 2:
                assert payload == b""
                return struct.pack("<Q", self.max_size)
            case 3:
                return struct.pack("<Q", self.bases[struct.unpack("<Q", payload)[0]])
            case 4:
                (handle,) = struct.unpack("<Q", payload)
                del self.buffers[handle]
                self.freed.append(handle)
                return b"" if major <= 5 else None
            case 6:
                self._set(payload[:296], payload[296:])
                return b"" if major <= 1 else None
            case 7:
                assert len(payload) == 312
                offset, value = struct.unpack("<QQ", payload[296:])
                assert offset == 0
                if value not in self.cache:
                    return b"\0"
                assert len(self.cache[value]) == _span(payload)
                self._store(payload, 0, self.cache[value])
                return b"\1"
            case 8:
                assert len(payload) == 312
                offset, nbytes = struct.unpack("<QQ", payload[296:])
                memory, start = self._find(payload, offset, nbytes)
                return bytes(memory[start : start + nbytes])
            case 11:
                return struct.pack("<QQ", self.capacity - sum(map(len, self.buffers.values())), self.capacity)
            case 12:
                assert len(payload) == 296
                self._find(payload, 0, _span(payload))
                return b"" if major <= 5 else None
            case 13:
                assert len(payload) == (296 if (major, minor) < (3, 6) else 296 * 11)
                return struct.pack("<Q", _span(payload) + self.padding)
            case 15:
                assert major >= 3
                assert payload == b""
                return struct.pack("<I", 1)
        raise AssertionError(f"command {command} is none a pusher sends")

    def _set(self, tensor: bytes, rest: bytes) -> None:
        from weightwire.hashing import fnv1a64

        flag = None
        if self.version[0] >= 7:
            flag, rest = rest[0], rest[1:]
        (offset,) = struct.unpack_from("<Q", rest)
        data = rest[8:]
        self._store(tensor, offset, data)
        if flag if flag is not None else len(data) > 10 << 20:
            self.cache[fnv1a64(data)] = data

    def _store(self, tensor: bytes, offset: int, data: bytes) -> None:
        memory, start = self._find(tensor, offset, len(data))
        memory[start : start + len(data)] = data

    def _find(self, tensor: bytes, offset: int, nbytes: int) -> tuple[bytearray, int]:
        (handle,) = struct.unpack_from("<Q", tensor, 12)
        (data,) = struct.unpack_from("<Q", tensor, 220)
        memory, base = self.buffers[handle], self.bases[handle]
        assert offset + nbytes <= _span(tensor), "past the tensor: a stock server aborts"
        inside = base <= data and data + _span(tensor) <= base + len(memory)
        assert inside, "tensor past the buffer: a stock server aborts"
        return memory, data - base + offset


_BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    8: (32, 34),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    24: (1, 1),
    26: (1, 4),
    28: (1, 8),
    30: (1, 2),
    39: (32, 17),
}
"""Elements and bytes of a block by ggml type."""


def _span(tensor: bytes) -> int:
    """Bytes of the tensor as ggml_nbytes has it."""
    (kind,) = struct.unpack_from("<I", tensor, 8)
    ne = struct.unpack_from("<4I", tensor, 20)
    nb = struct.unpack_from("<4I", tensor, 36)
    block, nbytes = _BLOCKS[kind]
    if 0 in ne:
        return 0
    first = nbytes if block == 1 else ne[0] * nb[0] // block
    start = 0 if block == 1 else 1
    return first + sum((ne[i] - 1) * nb[i] for i in range(start, 4))
