from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.leaks import eventually

from weightwire.transport.tcp import TcpStream


class Background:
    """A call on another thread; ``result()`` gives what it returned or raises what it raised."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self._value: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._value = call(*args)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @property
    def native_id(self) -> int:
        """The thread's number in /proc."""
        assert self._thread.native_id is not None
        return self._thread.native_id

    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the call did not come back"
        if self._error is not None:
            raise self._error
        return self._value


@pytest.fixture
def background() -> type[Background]:
    return Background


@pytest.fixture
def narrow() -> Iterator[tuple[TcpStream, TcpStream]]:
    """Two ends of a local socket pair with the smallest buffers there are: every transfer is many short ones."""
    one, other = socket.socketpair()
    for sock in (one, other):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    a, b = TcpStream(one, 30.0), TcpStream(other, 30.0)
    yield a, b
    a.close()
    b.close()


@pytest.fixture
def no_fd_leak() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    # A thread that looks up a name ends when the system is done with it.
    assert eventually(lambda: set(os.listdir("/proc/self/fd")) <= before)


@contextmanager
def _alarm(handler: Callable[[int, Any], None], seconds: float) -> Iterator[None]:
    # While a handler runs, after one that has raised, and at the end: another would interrupt what is no test's call.
    quiet = False

    def ring(number: int, frame: Any) -> None:
        nonlocal quiet
        if not quiet:
            quiet = True
            handler(number, frame)
            quiet = False

    old_handler = signal.getsignal(signal.SIGALRM)
    old_timer = signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
            yield
        finally:
            quiet = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
        signal.setitimer(signal.ITIMER_REAL, *old_timer)


@pytest.fixture
def alarm() -> Callable[[Callable[[int, Any], None], float], Any]:
    """``with alarm(handler, seconds)``: SIGALRM again and again, until a handler raises; pytest-timeout's own comes
    back afterwards. It may come before what is in the block has begun: whoever expects what the handler raises does so
    around the ``with``.
    """
    return _alarm
