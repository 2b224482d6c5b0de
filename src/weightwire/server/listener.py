"""The server: accepts clients, gives each a thread, and ends them all."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Self

from weightwire.cache.saving import Saver
from weightwire.cache.store import TensorCache
from weightwire.cache.workers import Workers
from weightwire.config import RETAIN_MODES, PathConfig, checked_seconds, profile_wanted, shown
from weightwire.errors import ConfigError, RdmaUnavailable
from weightwire.profile import LoadProfile
from weightwire.server import arguments
from weightwire.server.accepting import Acceptor
from weightwire.server.capacity import MAX_PINNED, Capacity, Tally
from weightwire.server.destinations import Destination, HostMemory
from weightwire.server.ending import Ending
from weightwire.server.plain import NoPopulator, PlainSaver
from weightwire.server.populate import Populator
from weightwire.server.served import Registry, ServedTensor
from weightwire.server.session import Services, Session
from weightwire.server.stats import Ledger, ServerStats
from weightwire.server.waiting import WaitingRoom
from weightwire.threads import Thread
from weightwire.transport.address import format_sockaddr
from weightwire.transport.devices import check_environment
from weightwire.transport.memory import available_memory
from weightwire.transport.rdma import usable_address
from weightwire.transport.tcp import Address, TcpStream, listen_tcp, look_up
from weightwire.transport.upgrade import WITHOUT, check_transport
from weightwire.wire import CACHE_BIT, Greeting, described_version

__all__ = ["Server"]

logger = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 5.0
_WAIT_SECONDS: Final = 2 * _JOIN_SECONDS
"""For the whole of the end: more than all that is waited for in it takes."""
_MAX_BYTES: Final = (1 << 64) - 1
_MAX_CLIENTS: Final = 4096


class Server:
    """A ggml RPC server that stores weights, for any number of clients at once.

    ``host``, a name or address, and ``port`` say where it listens (port 0: a free one, see `port`). ``cache`` is a
    directory, made if missing, or a `TensorCache`. ``cache_verify`` is what is checked of an entry in such a
    directory before a tensor is filled from it: ``"content"`` (the default: size and hash) or ``"size"``.
    ``protocol`` is the version it speaks, one of those in docs/protocol.md, with or without a patch number.
    ``retain`` says how long `tensors` keeps what was pushed: until its ``"connection"`` ends or its buffer is freed,
    or as long as the ``"process"`` (until the same name is pushed again, `forget` or `close`). ``on_tensor`` is
    called with each `ServedTensor` when its last byte has arrived, from the thread that serves the client, which
    waits for it. ``destination``, a callable ``(nbytes, device) -> Destination``, makes the memory of each buffer; by
    default `HostMemory`. ``memory`` is how many bytes all clients together may hold, each buffer rounded up to 4096
    (default: what is available when the server starts). A client must say HELLO within ``hello_timeout`` seconds and
    may not pause longer than ``stall_timeout`` seconds within a request. Clients beyond ``max_clients`` wait
    unanswered for a place, 64 of them and each for ``hello_timeout`` seconds, and are turned away after that.
    ``transport`` is ``"auto"`` (RDMA with clients that offer it, where this machine can; TCP otherwise), ``"tcp"``,
    or ``"rdma"``: clients that do not come over RDMA are turned away. ``on_profile`` is called once for each
    connection, when it has ended, with a `LoadProfile` of what its time went on, from the thread that served it; what
    it raises is logged. With ``profile`` True (None: with GGML_RPC_LOADPROF=1) that is also printed to stderr, if
    anything was loaded. Without both nothing is measured. ``optimized=False`` (None: GGML_RPC_LOAD_OPT, else True) has
    it do what a plain server does, one message and one RDMA chunk at a time, to be measured against: it then needs
    memory for one tensor more for each client (docs/performance.md).

    Nothing happens before `start`. Raises ConfigError for arguments that cannot be used.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 50052,
        *,
        cache: str | os.PathLike[str] | TensorCache | None = None,
        cache_verify: str | None = None,
        protocol: str = "7.0.0",
        retain: str = "connection",
        on_tensor: Callable[[ServedTensor], object] | None = None,
        destination: Callable[[int, int], Destination] | None = None,
        memory: int | None = None,
        max_clients: int = 64,
        hello_timeout: float = 10.0,
        stall_timeout: float = 60.0,
        transport: str = "auto",
        profile: bool | None = None,
        on_profile: Callable[[LoadProfile], object] | None = None,
        optimized: bool | None = None,
    ) -> None:
        self._host = arguments.host_name(host)
        self._port = arguments.whole_number("port", port, 0, 65535)
        if retain not in RETAIN_MODES:
            raise ConfigError(f"retain={retain!r}", hint=f"one of {', '.join(RETAIN_MODES)}")
        if memory is not None:
            memory = arguments.whole_number("memory", memory, 1, _MAX_BYTES, hint="it is in bytes: 1 << 30, not '1GiB'")
        for name, hook in (("on_tensor", on_tensor), ("destination", destination), ("on_profile", on_profile)):
            if hook is not None and not callable(hook):
                raise ConfigError(f"{name}={hook!r} cannot be called")
        self._dialect, patch = described_version(protocol)
        self._cache_at = arguments.cache_place(cache)
        self._cache_verify = arguments.cache_check(cache, cache_verify)
        cached = CACHE_BIT if cache is not None and self._dialect.hello_flags else 0
        self._greeting = Greeting(*self._dialect.version, patch, cached)
        self._destination = destination if destination is not None else HostMemory
        self._memory = memory
        self._max_clients = arguments.whole_number("max_clients", max_clients, 1, _MAX_CLIENTS)
        self._hello_timeout = checked_seconds("hello_timeout", hello_timeout)
        self._stall_timeout = checked_seconds("stall_timeout", stall_timeout)
        self._transport = check_transport(transport)
        self._on_profile = on_profile
        self._print_profile = profile_wanted(profile) is True
        if transport == "rdma" and not self._dialect.rdma:
            raise ConfigError(
                f"transport='rdma', and protocol {self._dialect.text} has no RDMA", hint="4.0 and newer have it"
            )
        self._optimized = PathConfig.resolve(optimized=optimized).optimized
        self._registry = Registry(keep=retain == "process", on_tensor=on_tensor)

        # Reentrant, for a signal handler that closes the server.
        self._lock = threading.RLock()
        self._started = False
        self._process: int | None = None
        self._closing = False
        self._ending = Ending(self._end, _WAIT_SECONDS)
        self._endpoints: tuple[str, ...] = ()
        self._acceptor: Acceptor | None = None
        self._populator = Populator() if self._optimized else NoPopulator()
        self._workers = Workers()
        self._saver: Saver | None = None
        self._sessions: dict[Session, Thread] = {}
        self._waiting = WaitingRoom(self._hello_timeout)
        self._services: Services | None = None
        self._ledger = Ledger()

    def start(self) -> Self:
        """Listen, and accept clients on a thread of the server's own. Returns the server.

        Raises TransportError where it cannot listen there, or no name server says within 30 seconds where that is;
        RdmaUnavailable where RDMA is required and cannot be had at any of the addresses it would listen on; ConfigError
        if the cache's directory cannot be made, a variable of RDMA cannot be used, or the server has been closed or was
        started by another process. Does nothing if it has been started. An interrupt (Ctrl-C) closes the
        server if clients may have come.
        """
        if self._elsewhere():
            raise ConfigError("this server runs in the process that started it", hint="make a new one after a fork")
        # Without the lock: a name server may be waited for, and whoever closes the server meanwhile must not.
        addresses = [] if self._closing or self._started else look_up(self._host, self._port)
        acceptor: Acceptor | None = None
        made = contextlib.ExitStack()
        try:
            with self._lock:
                self._check_open()
                if self._started:
                    return self
                if self._transport != "tcp":
                    check_environment(os.environ)
                cache = self._cache_at
                if cache is not None and not isinstance(cache, TensorCache):
                    cache = TensorCache(cache, verify=self._cache_verify)
                    made.callback(cache.unmake)
                self._prepare(cache)
                acceptor = self._listen(addresses)
                acceptor.start()
                self._port = acceptor.names[0][1]
                self._endpoints = tuple(map(format_sockaddr, acceptor.names))
                self._check_open()
                self._ledger.begin(cache)
                self._started = True
                self._process = os.getpid()
            # Without the lock, which the acceptor takes: a signal's handler may close the server, and wait for it.
            self._acceptor = acceptor
            self._check_open()
            logger.info("serving protocol %s on %s", self._greeting.text, ", ".join(self._endpoints))
        except BaseException:
            known = self._acceptor is not None
            if acceptor is not None:  # nothing is called before: if this is interrupted, too, `close` knows of it
                self._acceptor = acceptor
            with made:
                self._undo(acceptor, known)
            raise
        return self

    def _undo(self, acceptor: Acceptor | None, known: bool) -> None:
        """Leave nothing of a start that failed or was interrupted. If clients may have come, the server is closed."""
        if acceptor is None:
            return
        if not known and (acceptor.thread is None or acceptor.thread.ended()):
            acceptor.close()
            self._acceptor = None
            return
        if self._closing:  # by somebody who knew nothing of the acceptor
            self._ending = Ending(self._end, _WAIT_SECONDS)
        self.close()

    def _check_open(self) -> None:
        if self._closing:
            raise ConfigError("this server has been closed", hint="make a new one")

    def _prepare(self, cache: TensorCache | None) -> None:
        make_saver = Saver if self._optimized else PlainSaver
        self._saver = make_saver(cache, self._workers) if cache is not None else None
        self._services = Services(
            dialect=self._dialect,
            greeting=self._greeting,
            cache=cache,
            saver=self._saver,
            workers=self._workers,
            capacity=Capacity(self._memory if self._memory is not None else available_memory()),
            registry=self._registry,
            populator=self._populator,
            destination=self._destination,
            hello_timeout=self._hello_timeout,
            stall_timeout=self._stall_timeout,
            transport=self._transport,
            pinned=Tally(MAX_PINNED),
            on_profile=self._on_profile,
            print_profile=self._print_profile,
            optimized=self._optimized,
        )

    def _listen(self, addresses: list[Address]) -> Acceptor:
        acceptor = Acceptor(
            listen_tcp(self._host, self._port, addresses),
            admit=self._admit,
            failed=self._failed,
            patience=self._patience,
            turn_away=self._turn_away,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(acceptor.close)
            if self._transport == "rdma":
                self._check_rdma([name[0] for name in acceptor.names])
            undo.pop_all()
        return acceptor

    @staticmethod
    def _check_rdma(addresses: list[str]) -> None:
        """RdmaUnavailable if no client could ever be served."""
        try:
            usable_address(addresses)
        except RdmaUnavailable as error:
            error.detail = f"RDMA is required, and no client could be served over it: {error.reason}"
            error.args = (error.detail,)
            error.hint = error.hint or WITHOUT
            raise

    def close(self) -> None:
        """Stop accepting, end every client, finish what is being written to the cache, and free everything.

        Idempotent, and whoever calls it while another thread does the work waits for that; some seconds at the most, at
        the price of entries that the disk does not take in time. Never raises. Who is interrupted in it (Ctrl-C) only
        waits no longer: the server is closed all the same, and calling this again, or the end of the process, waits.

        Arrays and views handed out stay valid. In a process that was forked while the server ran, this closes that
        process's descriptors and nothing else.
        """
        if self._elsewhere():
            self._close_inherited()
            return
        try:
            self._close()
        except BaseException:
            with self._lock:
                self._closing = True
            self._ending.begin()  # once more: the interrupt may have come before it had begun
            raise

    def _close(self) -> None:
        caller = threading.current_thread()
        with self._lock:
            self._closing = True  # from here on no session begins
        acceptor = self._acceptor.thread if self._acceptor is not None else None
        self._ending.run(called_back=caller in (acceptor, *list(self._sessions.values())))

    def _end(self) -> None:
        """All that closing is; done again, what is left of it. Without the lock: a signal's handler that waits for this
        may have come where the main thread holds it.
        """
        deadline = time.monotonic() + _JOIN_SECONDS
        acceptor, sessions = self._acceptor, dict(self._sessions)
        if acceptor is not None:
            acceptor.stop()
        if self._saver is not None:
            self._saver.hurry()
        for session in sessions:
            session.stop()
        if acceptor is not None:
            self._join(acceptor.thread, deadline)
            acceptor.close()
        for stream in self._waiting.everybody():
            stream.close()
        for thread in sessions.values():
            self._join(thread, deadline)
        if self._saver is not None:
            self._saver.close(max(0.0, deadline - time.monotonic()))
        self._workers.close(max(0.1, deadline - time.monotonic()))
        self._populator.close(max(0.0, deadline - time.monotonic()))
        self._registry.close()
        self._ledger.end()

    def _elsewhere(self) -> bool:
        """Whether this process is a fork of the one in which the server runs."""
        return self._process is not None and self._process != os.getpid()

    def _close_inherited(self) -> None:
        # The threads are not here, and locks they held at that moment will never be released: take none. Connections
        # belong to the other process too, so they are not shut down. Their descriptors become /dev/null, because a
        # stream that a vanished thread was using would otherwise shut its connection down when it is closed.
        self._closing = True
        if self._acceptor is not None:
            self._acceptor.close()
        streams = [session.inherited() for session in list(self._sessions)]
        streams += [stream.fileno() for stream in self._waiting.everybody()]
        self._sessions = {}
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in streams:
            if descriptor >= 0:
                os.dup2(null, descriptor, inheritable=False)
        os.close(null)
        self._ending = Ending(self._end, _WAIT_SECONDS)
        self._ending.over.set()

    @staticmethod
    def _join(thread: Thread | None, deadline: float) -> None:
        if thread is None or thread is threading.current_thread():
            return
        thread.join(max(0.0, deadline - time.monotonic()))
        if not thread.ended():
            logger.warning("thread %s did not end in time", thread.name)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def serve_forever(self) -> None:
        """Start if need be, and return when the server has been closed (from another thread, or by Ctrl-C, which
        closes it and is passed on).
        """
        self.start()
        try:
            self._ending.over.wait()
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
    def optimized(self) -> bool:
        """Whether it receives the optimized way, or the plain one."""
        return self._optimized

    @property
    def tensors(self) -> Mapping[str, ServedTensor]:
        """The complete tensors of all clients by name: live, read-only, usable from any thread.

        Where several clients have a tensor of one name, the last one completed.
        """
        return self._registry.tensors

    @property
    def clients(self) -> int:
        """How many clients are connected: to this process, so none to a fork of the server's."""
        if self._elsewhere():
            return 0
        with self._lock:
            return len(self._sessions)

    def stats(self) -> ServerStats:
        """What the server has done and holds at this moment, from any thread, before `start` and after `close` too.

        Sessions that are still there are counted in, a tensor under way up to the last piece of it that has come.
        ConfigError in a fork of the process that started the server.
        """
        if self._elsewhere():
            raise ConfigError("this server runs in the process that started it", hint="ask it there")
        with self._lock:
            services = self._services
            return self._ledger.snapshot(
                live=[session.counts() for session in self._sessions],
                waiting=len(self._waiting),
                registry=self._registry,
                capacity=services.capacity if services is not None else None,
                cache=services.cache if services is not None else None,
                saver=self._saver,
            )

    def forget(self, name: str) -> bool:
        """Take the tensors called ``name`` out of `tensors`, and free their memory if nothing else needs it.

        Whether there was one. ConfigError for what is no text, and in a process that was forked while the server ran.
        """
        if not isinstance(name, str):
            raise ConfigError(f"forget: {shown(name)} is no tensor's name", hint="names are text")
        if self._elsewhere():
            # Locks that others held at that moment would never be released.
            raise ConfigError("this server runs in the process that started it", hint="forget it there")
        return self._registry.forget(name)

    # On the acceptor's thread.

    def _patience(self) -> float | None:
        with self._lock:
            return self._waiting.patience()

    def _turn_away(self) -> None:
        """End the wait of whoever has waited long enough."""
        with self._lock:
            late = self._waiting.expired()
            self._ledger.refused += len(late)
        for stream in late:
            logger.warning("%s: turned away, no place became free in %g s", stream.endpoint, self._waiting.seconds)
            stream.close()

    def _failed(self) -> None:
        with self._lock:
            self._ledger.failed += 1

    def _admit(self, stream: TcpStream) -> str | None:
        with self._lock:
            if self._closing:
                stream.close()
                return None
            if len(self._sessions) < self._max_clients:
                return self._begin(stream)
            waits = self._waiting.add(stream)
            self._ledger.refused += not waits
        if waits:
            logger.warning("%s: waiting, %d clients are connected already", stream.endpoint, self._max_clients)
        else:
            logger.warning("%s: turned away, too many are waiting for a place already", stream.endpoint)
            stream.close()
        return None

    def _begin(self, stream: TcpStream) -> str | None:
        """Give a connection its thread, with the lock held. What went wrong, if the system has none to give."""
        assert self._services is not None
        session = Session(stream, self._services)
        thread = Thread(target=self._serve, args=(session,), name=f"weightwire-{stream.endpoint}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            stream.close()
            self._ledger.failed += 1
            return str(error)
        self._ledger.accepted += 1
        self._sessions[session] = thread
        return None

    def _serve(self, session: Session) -> None:
        try:
            session.run()
        finally:
            # In a child that a hook has forked, whose turn it is, is the parent's business.
            if not self._elsewhere():
                self._left(session)

    def _left(self, session: Session) -> None:
        """A session has ended: the next one waiting gets its place."""
        with self._lock:
            if self._sessions.pop(session, None) is not None:
                self._ledger.close(session.counts())
            waiting = None if self._closing else self._waiting.next()
            trouble = self._begin(waiting) if waiting is not None else None
        if trouble is not None:
            logger.error("a client that was waiting could not be served (%s)", trouble)
