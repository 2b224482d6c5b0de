"""The server: accepts clients, gives each a thread, and ends them all."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self

from weightwire.cache.store import TensorCache
from weightwire.config import RETAIN_MODES
from weightwire.errors import ConfigError, TransportError
from weightwire.server.capacity import Capacity
from weightwire.server.destinations import Destination, HostMemory
from weightwire.server.populate import Populator
from weightwire.server.served import Registry, ServedTensor
from weightwire.server.session import Services, Session
from weightwire.transport.address import format_endpoint
from weightwire.transport.memory import available_memory
from weightwire.transport.tcp import TcpStream, listen_tcp
from weightwire.wire import CACHE_BIT, Dialect, Greeting, dialect_for

__all__ = ["Server"]

logger = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 5.0
_ACCEPT_PAUSE: Final = 0.5


class Server:
    """A ggml RPC server that stores weights, for any number of clients at once.

    ``host`` and ``port`` say where it listens (port 0: a free one, see `port`). ``cache`` is a directory, made if
    missing, or a `TensorCache`. ``protocol`` is the version it speaks, 1.0 to 8.0. ``retain`` says how long `tensors`
    keeps what was pushed: until its ``"connection"`` ends or its buffer is freed, or as long as the ``"process"``
    (until the same name is pushed again, `forget` or `close`). ``on_tensor`` is called with each `ServedTensor` when
    its last byte has arrived, from the thread that serves the client, which waits for it. ``destination``, a callable
    ``(nbytes, device) -> Destination``, makes the memory of each buffer; by default `HostMemory`. ``memory`` is how
    many bytes all clients together may hold (default: what is available when the server starts). Clients beyond
    ``max_clients`` are turned away. A client must say HELLO within ``hello_timeout`` seconds and may not pause longer
    than ``stall_timeout`` seconds within a request.

    Nothing happens before `start`. Raises ConfigError for arguments that cannot be used (VersionError for an unknown
    version).
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 50052,
        *,
        cache: str | os.PathLike[str] | TensorCache | None = None,
        protocol: str = "7.0.0",
        retain: str = "connection",
        on_tensor: Callable[[ServedTensor], object] | None = None,
        destination: Callable[[int, int], Destination] | None = None,
        memory: int | None = None,
        max_clients: int = 64,
        hello_timeout: float = 10.0,
        stall_timeout: float = 60.0,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ConfigError(f"port {port} is not between 0 and 65535")
        if retain not in RETAIN_MODES:
            raise ConfigError(f"retain={retain!r}", hint=f"one of {', '.join(RETAIN_MODES)}")
        if memory is not None and memory < 0:
            raise ConfigError(f"memory={memory} is not a number of bytes")
        if max_clients < 1:
            raise ConfigError(f"max_clients={max_clients}; at least one client must be allowed")
        for name, hook in (("on_tensor", on_tensor), ("destination", destination)):
            if hook is not None and not callable(hook):
                raise ConfigError(f"{name}={hook!r} cannot be called")
        for name, seconds in (("hello_timeout", hello_timeout), ("stall_timeout", stall_timeout)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds} is not a number of seconds above 0")
        self._dialect = dialect_for(protocol)
        self._host = host
        self._port = port
        self._cache_at = cache
        self._greeting = _greeting(self._dialect, protocol, cache is not None)
        self._destination = destination if destination is not None else HostMemory
        self._memory = memory
        self._max_clients = max_clients
        self._hello_timeout = hello_timeout
        self._stall_timeout = stall_timeout
        self._registry = Registry(keep=retain == "process", on_tensor=on_tensor)

        self._lock = threading.Lock()
        self._started = False
        self._closing = False
        self._closed = threading.Event()
        self._endpoints: tuple[str, ...] = ()
        self._wake: socket.socket | None = None
        self._unlisten = contextlib.ExitStack()
        self._acceptor: threading.Thread | None = None
        self._populator = Populator()
        self._sessions: dict[Session, threading.Thread] = {}
        self._services: Services | None = None

    def start(self) -> Self:
        """Listen, and accept clients on a thread of the server's own. Returns the server.

        Raises TransportError where it cannot listen there, ConfigError if the cache's directory cannot be made or the
        server has been closed. Does nothing if it has been started.
        """
        with self._lock:
            if self._closing:
                raise ConfigError("this server has been closed", hint="make a new one")
            if self._started:
                return self
            cache = self._cache_at
            if cache is not None and not isinstance(cache, TensorCache):
                cache = TensorCache(cache)
            self._services = Services(
                dialect=self._dialect,
                greeting=self._greeting,
                cache=cache,
                capacity=Capacity(self._memory if self._memory is not None else available_memory()),
                registry=self._registry,
                populator=self._populator,
                destination=self._destination,
                hello_timeout=self._hello_timeout,
                stall_timeout=self._stall_timeout,
            )
            self._listen()
            self._started = True
        logger.info("serving protocol %s on %s", self._greeting.text, ", ".join(self._endpoints))
        return self

    def _listen(self) -> None:
        with contextlib.ExitStack() as undo:
            listeners = listen_tcp(self._host, self._port)
            for listener in listeners:
                undo.callback(listener.close)
                listener.setblocking(False)
            try:
                wake = socket.socketpair()
            except OSError as error:
                raise TransportError(
                    f"cannot make a socket pair: {error.strerror}", operation="socketpair", errno=error.errno
                ) from error
            for end in wake:
                undo.callback(end.close)
            acceptor = threading.Thread(
                target=self._accept_all, args=(listeners, wake[0]), name="weightwire-accept", daemon=True
            )
            acceptor.start()
            self._acceptor, self._wake, self._unlisten = acceptor, wake[1], undo.pop_all()
        names = [listener.getsockname() for listener in listeners]
        self._port = names[0][1]
        self._endpoints = tuple(format_endpoint(name[0], name[1]) for name in names)

    def close(self) -> None:
        """Stop accepting, end every client, and free everything. Idempotent; waits some seconds at the most; never
        raises.

        Arrays and views handed out stay valid.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            sessions = dict(self._sessions)
            wake, acceptor = self._wake, self._acceptor
        deadline = time.monotonic() + _JOIN_SECONDS
        if wake is not None:
            with contextlib.suppress(OSError):
                wake.send(b"x")
        for session in sessions:
            session.stop()
        self._join(acceptor, deadline)
        self._unlisten.close()
        for thread in sessions.values():
            self._join(thread, deadline)
        self._populator.close(max(0.0, deadline - time.monotonic()))
        self._registry.close()
        self._closed.set()

    @staticmethod
    def _join(thread: threading.Thread | None, deadline: float) -> None:
        if thread is None or thread is threading.current_thread():
            return
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            logger.warning("thread %s did not end in time", thread.name)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def serve_forever(self) -> None:
        """Start if need be, and return when the server has been closed (from another thread, or by Ctrl-C, which
        closes it and is passed on).
        """
        self.start()
        try:
            self._closed.wait()
        finally:
            self.close()

    @property
    def port(self) -> int:
        """The port it listens on, once it has started; before, the one asked for."""
        return self._port

    @property
    def endpoints(self) -> tuple[str, ...]:
        """``host:port`` of every address it listens on; empty before it has started."""
        return self._endpoints

    @property
    def tensors(self) -> Mapping[str, ServedTensor]:
        """The complete tensors of all clients by name: live, read-only, usable from any thread.

        Where several clients have a tensor of one name, the last one completed.
        """
        return self._registry.tensors

    @property
    def clients(self) -> int:
        """How many clients are connected."""
        with self._lock:
            return len(self._sessions)

    def forget(self, name: str) -> bool:
        """Take the tensors called ``name`` out of `tensors`, and free their memory if nothing else needs it.

        Whether there was one.
        """
        return self._registry.forget(name)

    # On the acceptor's thread.

    def _accept_all(self, listeners: list[socket.socket], wake: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            for listener in listeners:
                selector.register(listener, selectors.EVENT_READ, listener)
            complained = False
            while not self._closing:
                for key, _ in selector.select():
                    if key.data is None or self._closing:
                        continue
                    trouble = self._accept(key.data)
                    if trouble is None:
                        complained = False
                        continue
                    if not complained:
                        logger.error("a client could not be accepted (%s); trying on", trouble)
                        complained = True
                    # The listener stays readable, so without a pause this would spin.
                    wake.settimeout(_ACCEPT_PAUSE)
                    with contextlib.suppress(TimeoutError):
                        wake.recv(1)

    def _accept(self, listener: socket.socket) -> str | None:
        """Take one client in. What went wrong, if the system could not give us one."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return None
        except OSError as error:
            return error.strerror or str(error)
        try:
            stream = TcpStream(connection)
        except TransportError as error:
            connection.close()
            logger.debug("a client left before it was accepted: %s", error)
            return None
        try:
            return self._admit(stream)
        except Exception as error:
            # One client that cannot be served must not keep the others out.
            stream.close()
            return str(error)

    def _admit(self, stream: TcpStream) -> str | None:
        assert self._services is not None
        with self._lock:
            full = len(self._sessions) >= self._max_clients
            if not full and not self._closing:
                session = Session(stream, self._services)
                thread = threading.Thread(
                    target=self._serve, args=(session,), name=f"weightwire-{stream.endpoint}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads
                    stream.close()
                    return str(error)
                self._sessions[session] = thread
                return None
        if full:
            logger.warning("%s: turned away, %d clients are connected already", stream.endpoint, self._max_clients)
        stream.close()
        return None

    def _serve(self, session: Session) -> None:
        try:
            session.run()
        finally:
            with self._lock:
                self._sessions.pop(session, None)


def _greeting(dialect: Dialect, protocol: str, cached: bool) -> Greeting:
    numbers = [int(part) for part in protocol.split(".")]
    major, minor, patch = (*numbers, 0, 0)[:3]
    if max(minor, patch) > 255:
        raise ConfigError(f"protocol={protocol!r}: each part of a version is a byte")
    return Greeting(major, minor, patch, CACHE_BIT if cached and dialect.version >= (4, 0) else 0)
