"""The stream in step: answers go to their requests in order, and what breaks the order closes the connection."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from support.ends import sockets

from weightwire.client.channel import Channel
from weightwire.errors import ConfigError, PeerClosed, ProtocolError, TransferTimeout, TransportError
from weightwire.transport.tcp import TcpStream
from weightwire.wire import Command, dialect_for

DIALECT = dialect_for("7.0")
DEVICE = bytes(4)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the plain socket at its server's end."""
    near, far = sockets()
    far.settimeout(30)
    channel = Channel(TcpStream(near, 20.0), DIALECT)
    with far:
        yield channel, far
        channel.close()


def number(value: int) -> bytes:
    return struct.pack("<QQ", 8, value)


def test_answers_go_to_the_oldest_request(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    got: list[tuple[str, bytes]] = []
    with channel.exclusive("test"):
        channel.post(Command.GET_ALIGNMENT, DEVICE, then=lambda payload: got.append(("alignment", payload)))
        channel.post(Command.GET_MAX_SIZE, DEVICE, then=lambda payload: got.append(("max", payload)))
        channel.post(Command.FREE_BUFFER, bytes(8))
        assert channel.outstanding == 2, "FREE_BUFFER has no answer in 7.0"
        far.sendall(number(1) + number(2))
        channel.settle(limit=1)
        assert channel.outstanding == 1
        channel.settle()
    assert got == [("alignment", struct.pack("<Q", 1)), ("max", struct.pack("<Q", 2))]
    assert channel.recorder.commands().keys() == {Command.GET_ALIGNMENT, Command.GET_MAX_SIZE, Command.FREE_BUFFER}
    sent = far.recv(1 << 16)
    assert sent == b"\1" + struct.pack("<Q", 4) + DEVICE + b"\2" + struct.pack("<Q", 4) + DEVICE + b"\4" + struct.pack(
        "<QQ", 8, 0
    )


def test_a_read_fills_the_memory_it_is_for(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    into = bytearray(5)
    with channel.exclusive("test"):
        channel.post_read(bytes(312), memoryview(into), tensor="w")
        far.sendall(struct.pack("<Q", 5) + b"hello")
        assert channel.read_answer() == b""
    assert into == b"hello"


def test_an_answer_of_another_size_closes(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    far.sendall(struct.pack("<QI", 4, 1))
    with pytest.raises(ProtocolError, match="answered GET_ALIGNMENT with 4 bytes where 8"), channel.exclusive("test"):
        channel.call(Command.GET_ALIGNMENT, DEVICE)
    assert channel.closed
    with pytest.raises(TransportError, match=r"given up after: .*with 4 bytes"):
        channel.check_open("test")


def test_a_mistake_of_the_callers_between_messages_does_not_close(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    with pytest.raises(ConfigError), channel.exclusive("test"):
        raise ConfigError("a bad argument")
    far.sendall(number(64))
    with channel.exclusive("test"):
        assert channel.call(Command.GET_ALIGNMENT, DEVICE) == struct.pack("<Q", 64)


@pytest.mark.parametrize("inside", ["an answer is due", "a message is cut"])
def test_the_same_mistake_inside_a_message_closes(ends: tuple[Channel, socket.socket], inside: str) -> None:
    channel, _ = ends
    with pytest.raises(ConfigError), channel.exclusive("test"):
        if inside == "an answer is due":
            channel.post(Command.GET_ALIGNMENT, DEVICE)
        else:
            channel.begin(b"head", b"first slice")
        raise ConfigError("a bad argument")
    assert channel.closed


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_what_nobody_raised_on_purpose_closes(ends: tuple[Channel, socket.socket], kind: type[BaseException]) -> None:
    channel, _ = ends
    with pytest.raises(kind), channel.exclusive("test"):
        raise kind
    assert channel.closed


def test_a_payload_in_slices(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    with channel.exclusive("test"):
        channel.begin(b"head", b"one")
        channel.more(b"two")
        channel.end()
    assert not channel.closed
    channel.close()
    assert far.makefile("rb").read() == b"headonetwo"


def test_a_call_from_inside_a_call_is_refused(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    with channel.exclusive("push"):
        with pytest.raises(TransportError, match="from inside another call"), channel.exclusive("barrier"):
            pass
        assert not channel.closed


def test_another_thread_waits_its_turn(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    answers: list[bytes] = []

    def ask() -> None:
        with channel.exclusive("second"):
            answers.append(channel.call(Command.GET_MAX_SIZE, DEVICE))

    with channel.exclusive("first"):
        other = threading.Thread(target=ask)
        other.start()
        far.sendall(number(1) + number(2))
        assert channel.call(Command.GET_ALIGNMENT, DEVICE) == struct.pack("<Q", 1)
    other.join(30)
    assert answers == [struct.pack("<Q", 2)]


@pytest.mark.parametrize("answered", [0, 3, 12])
def test_a_server_that_closes_is_reported_with_what_was_in_flight(
    ends: tuple[Channel, socket.socket], answered: int
) -> None:
    channel, far = ends
    with channel.exclusive("test"):
        channel.post(Command.GET_ALIGNMENT, DEVICE, tensor="w")
    far.recv(1 << 16)
    far.sendall(number(64)[:answered])
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerClosed, match="the answer to GET_ALIGNMENT of tensor 'w'") as caught, channel.exclusive("t"):
        channel.read_answer()
    assert caught.value.position == "after"
    assert caught.value.tensor == "w"
    assert "log says why" in caught.value.hint
    assert channel.closed


def test_a_server_that_says_nothing(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    channel._stream.timeout = 0.05
    with pytest.raises(TransferTimeout, match="the answer to GET_ALIGNMENT") as caught, channel.exclusive("test"):
        channel.call(Command.GET_ALIGNMENT, DEVICE)
    assert "longer timeout" in caught.value.hint
    assert channel.closed


def test_a_close_of_ones_own_is_not_blamed_on_the_server(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends

    def close_when_asked() -> None:
        far.recv(1)
        channel.close()

    closer = threading.Thread(target=close_when_asked)
    closer.start()
    with pytest.raises(TransportError, match="closed by close") as caught, channel.exclusive("test"):
        channel.call(Command.GET_ALIGNMENT, DEVICE)
    closer.join(30)
    assert not isinstance(caught.value, PeerClosed)


def test_who_only_waits_can_ask_whether_the_server_is_there(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    channel.check_peer("hashing", tensor="w")
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerClosed, match="during hashing of tensor 'w'") as caught:
        for _ in range(10_000):
            channel.check_peer("hashing", tensor="w")
    assert caught.value.position == "before"
