"""A push that waits for hashes, which can take minutes: whatever happens meanwhile is noticed.

The tensors are 256 GiB without data. Hashed to its end, a single one would take longer than a test may.
"""

from __future__ import annotations

import os
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import raw_gguf
from support.leaks import LeakCheck, eventually
from support.scripted import Message, Peer, ScriptedServer, serve_hello

from weightwire import connect
from weightwire.errors import PeerClosed, TransportError

NBYTES = 1 << 38
BASE = 1 << 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "huge.gguf"
    tensors = [raw_gguf.tensor(f"t{at}", (1 << 30, 256), 24, at * NBYTES) for at in range(4)]
    with path.open("wb") as file:
        file.write(raw_gguf.build(tensors=tensors))
        file.truncate(file.tell() + 4 * NBYTES)
    return path


class Placed:
    """A server that gives out memory it has not got, and calls ``then`` once the tensors have their places.

    ``then`` is called on a server's thread with the connection, which stays open until the client leaves.
    """

    def __init__(self, then: Callable[[Peer], object]) -> None:
        self.then = then
        self.placed = threading.Event()
        self.commands: list[int] = []

    def __call__(self, peer: Peer) -> None:
        assert serve_hello(peer)
        message = Message(0, b"")
        while message.command != 3:
            message = peer.request()
            self.commands.append(message.command)
            peer.answer(
                {
                    15: struct.pack("<I", 1),
                    1: struct.pack("<Q", 64),
                    2: struct.pack("<Q", (1 << 64) - 1),
                    0: struct.pack("<QQ", 1, 4 * NBYTES),
                    3: struct.pack("<Q", BASE),
                }[message.command]
            )
        self.placed.set()
        self.then(peer)


@pytest.mark.parametrize("end", ["closes", "resets"])
def test_a_server_that_goes_is_noticed(end: str, model: Path, no_leaks: LeakCheck) -> None:
    server = Placed(lambda peer: peer.reset() if end == "resets" else None)
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=100) as connection:
        with pytest.raises(PeerClosed, match="hashing for the server's cache of tensor 't0'") as caught:
            connection.push(model, cache="always")
        assert (caught.value.tensor, caught.value.position) == ("t0", "before")
        with pytest.raises(TransportError, match="given up after"):
            connection.barrier()


def test_an_interrupt_ends_it(model: Path, no_leaks: LeakCheck) -> None:
    def interrupt(peer: Peer) -> None:
        assert eventually(lambda: any(t.name.startswith("weightwire-hash") for t in threading.enumerate()))
        os.kill(os.getpid(), signal.SIGINT)
        peer.rest()

    server = Placed(interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=100) as connection:
            with pytest.raises(KeyboardInterrupt):
                connection.push(model, cache="always")
            assert connection.closed
    finally:
        signal.signal(signal.SIGINT, before)


def test_close_from_another_thread_ends_it(model: Path, no_leaks: LeakCheck) -> None:
    server = Placed(Peer.rest)
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=100) as connection:

        def close() -> None:
            assert server.placed.wait(20)
            connection.close()

        thread = threading.Thread(target=close)
        thread.start()
        with pytest.raises(TransportError, match=r"closed by close\(\)") as caught:
            connection.push(model, cache="always")
        thread.join()
    assert not isinstance(caught.value, PeerClosed)
