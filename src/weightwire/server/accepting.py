"""The sockets that listen, and the thread that takes connections from them."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
from collections.abc import Callable
from typing import Any, Final

from weightwire.errors import TransportError
from weightwire.threads import Thread, start
from weightwire.transport.tcp import TcpStream

__all__ = ["Acceptor"]

logger = logging.getLogger(__name__)

_ACCEPT_PAUSE: Final = 0.5


class Acceptor:
    """Takes connections from ``listeners``, which belong to it from now on, once it is started.

    On its thread are called: ``admit`` with each connection, which returns what went wrong if the system could not give
    what it needs; ``failed`` where it raised, and the connection has been closed; ``patience``, the seconds until
    ``turn_away`` is to be called, or None if it need not be; and that.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        *,
        admit: Callable[[TcpStream], str | None],
        failed: Callable[[], None],
        patience: Callable[[], float | None],
        turn_away: Callable[[], None],
    ) -> None:
        self.thread: Thread | None = None
        self.names: list[Any] = []
        """The sockets' addresses, as getsockname(2) has them."""
        self._listeners = listeners
        self._admit = admit
        self._failed = failed
        self._patience = patience
        self._turn_away = turn_away
        self._stopped = False
        self._wake: socket.socket | None = None
        self._undo = contextlib.ExitStack()
        for listener in listeners:
            self._undo.callback(listener.close)
            listener.setblocking(False)
            self.names.append(listener.getsockname())

    def start(self) -> None:
        """Accept from now on. TransportError where the system has no socket or thread for it."""
        try:
            woken, wake = socket.socketpair()
        except OSError as error:
            raise TransportError(
                f"cannot make a socket pair: {error.strerror}", operation="socketpair", errno=error.errno
            ) from error
        for end in (woken, wake):
            self._undo.callback(end.close)
        # Before it is started: an interrupt may come right after.
        self._wake = wake
        self.thread = Thread(target=self._accept_all, args=(woken,), name="weightwire-accept", daemon=True)
        start(self.thread)

    def stop(self) -> None:
        """Accept nobody any more: the thread ends soon."""
        self._stopped = True
        if self._wake is not None:
            with contextlib.suppress(OSError):
                self._wake.send(b"x")

    def close(self) -> None:
        """Close the sockets, when the thread has ended, or in a fork of the process, where it is not. Idempotent."""
        self._undo.close()

    # On the thread.

    def _accept_all(self, wake: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ, listener)
            complained = False
            while not self._stopped:
                patience = self._patience()
                if self._stopped:  # that may have waited for whoever closes all this
                    break
                for key, _ in selector.select(patience):
                    if self._stopped:
                        break
                    if key.data is None:
                        wake.recv(64)
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
                self._turn_away()

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
            self._failed()
            return str(error)
