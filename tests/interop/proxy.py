"""A recording proxy: stands between a client and a server, passes every byte on, and writes down each request."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from dataclasses import dataclass, field, replace

from weightwire.wire import REQUEST_HEADER_BYTES, RPC_TENSOR_BYTES, Command, RpcTensor, parse_request_header

_BLOCK = 1 << 18
_WITH_TENSOR = {
    Command.SET_TENSOR,
    Command.SET_TENSOR_HASH,
    Command.GET_TENSOR,
    Command.INIT_TENSOR,
    Command.MEMSET_TENSOR,
}


@dataclass(frozen=True)
class Request:
    """One request as it went by: `size` is its payload in bytes, `tensor` what it begins with, if a tensor.

    `rest`, if the proxy takes `digests`, is the SHA-256 of what follows the tensor, or of all if it begins with none.
    """

    connection: int
    command: int
    size: int
    tensor: RpcTensor | None = None
    rest: bytes = b""


@dataclass
class RecordingProxy:
    """Listens on a free port of 127.0.0.1 and connects each client to `upstream` ("host:port"); a context manager.

    Connections are numbered from 0 as they come. A server's answers are passed on unread. With `digests` a request is
    written down once it has gone by whole, without them when it begins.
    """

    upstream: str
    digests: bool = False
    requests: list[Request] = field(default_factory=list)
    #: Bytes from client to server, and from server to client.
    sent: int = 0
    received: int = 0

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._closing = False

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> RecordingProxy:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        for end in self._sockets:
            # Wakes whoever waits in it; closing alone would not.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for end in self._sockets:
            end.close()

    def of(self, command: Command, connection: int | None = None) -> list[Request]:
        """The requests of one command, of all connections or of one."""
        with self._lock:
            return [
                request
                for request in self.requests
                if request.command == command and connection in (None, request.connection)
            ]

    def _spawn(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        host, _, port = self.upstream.rpartition(":")
        number = 0
        while not self._closing:
            try:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection((host, int(port)))
            except OSError:
                continue
            self._sockets.append(server)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._spawn(self._pump_requests, number, client, server)
            self._spawn(self._pump_answers, server, client)
            number += 1

    def _pump_requests(self, connection: int, client: socket.socket, server: socket.socket) -> None:
        block = bytearray(_BLOCK)
        try:
            while head := _exactly(client, REQUEST_HEADER_BYTES):
                command, size = parse_request_header(head)
                first = (
                    _exactly(client, RPC_TENSOR_BYTES) if command in _WITH_TENSOR and size >= RPC_TENSOR_BYTES else b""
                )
                tensor = RpcTensor.unpack(first) if first else None
                if not self.digests:
                    self._note(Request(connection, command, size, tensor))
                digest = hashlib.sha256()
                server.sendall(head + first)
                left = size - len(first)
                while left:
                    got = client.recv_into(block, min(left, _BLOCK))
                    if not got:
                        raise ConnectionError("the client left inside a request")
                    if self.digests:
                        digest.update(memoryview(block)[:got])
                    server.sendall(memoryview(block)[:got])
                    left -= got
                if self.digests:
                    self._note(Request(connection, command, size, tensor, digest.digest()))
        except OSError:
            pass
        _finish(server)

    def _note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)
            self.sent += REQUEST_HEADER_BYTES + request.size

    def _pump_answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while block := server.recv(_BLOCK):
                with self._lock:
                    self.received += len(block)
                client.sendall(block)
        _finish(client)


def traffic(proxy: RecordingProxy) -> list[tuple[object, ...]]:
    """All requests, but for addresses, which another process of the server gives differently."""
    first: dict[int, int] = {}
    seen = []
    for request in proxy.requests:
        tensor = request.tensor
        if tensor is not None:
            base = first.setdefault(tensor.buffer, tensor.data)
            tensor = replace(tensor, buffer=list(first).index(tensor.buffer), data=tensor.data - base)
        # The digest of what else there is in a request, unless that is an address.
        rest = b"" if request.command in (Command.BUFFER_GET_BASE, Command.FREE_BUFFER) else request.rest
        seen.append((Command(request.command), request.size, tensor, rest))
    return seen


def _finish(end: socket.socket) -> None:
    """Tell this end that no more comes."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_WR)


def _exactly(source: socket.socket, nbytes: int) -> bytes:
    """Exactly `nbytes` bytes, or none if the peer closed before the first; ConnectionError if it closed in between."""
    data = b""
    while len(data) < nbytes:
        piece = source.recv(nbytes - len(data))
        if not piece:
            if data:
                raise ConnectionError("the client left inside a request")
            return b""
        data += piece
    return data
