"""Servers that close, die, stall or lie, at every stage of a push: the error says which, and with what tensor."""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.leaks import LeakCheck
from support.scripted import Message, Peer, ScriptedServer, StandIn, serve_hello

from weightwire import connect, open_model
from weightwire.errors import PeerClosed, ProtocolError, TransferTimeout, TransportError, WeightwireError

MIB = 1 << 20
SMALL = {"a": np.arange(30, dtype="f4"), "b": np.arange(7, dtype="i4")}
LARGE = {"norm": np.ones(16, "f4"), "big": np.arange(40 * MIB, dtype="u1")}

Act = Callable[[Peer, Message], None]


class Until(StandIn):
    """A proper server up to the ``count``-th request of ``command``, which ``act`` answers instead and which ends the
    script.

    A request with ``unread`` set is only acted on by its head: its payload stays in the socket.
    """

    def __init__(
        self,
        command: int,
        act: Act,
        *,
        version: tuple[int, int, int] = (7, 0, 0),
        flags: int = 0,
        unread: bool = False,
        count: int = 1,
    ) -> None:
        super().__init__(version, flags=flags)
        self.command = command
        self.act = act
        self.unread = unread
        self.count = count

    def __call__(self, peer: Peer) -> None:
        if not serve_hello(peer, self.version, flags=self.flags):
            return
        while True:
            command, size = peer.head()
            if command == self.command:
                self.count -= 1
            if command == self.command and self.count == 0:
                self.act(peer, Message(command, b"" if self.unread else peer.take(size)))
                return
            message = Message(command, peer.take(size))
            self.requests.append(message)
            answer = self.serve(message)
            if answer is not None:
                peer.answer(answer)


def close(peer: Peer, message: Message) -> None:
    """Leave in good order."""


def reset(peer: Peer, message: Message) -> None:
    peer.reset()


STALLED = 2.0
"""Seconds after which a peer has stalled: what is to be answered before is answered within them, on a busy machine."""


def stall(peer: Peer, message: Message) -> None:
    peer.rest()


def half(peer: Peer, message: Message) -> None:
    peer.send(struct.pack("<Q", 8)[:5])


def wrong_size(peer: Peer, message: Message) -> None:
    peer.send(struct.pack("<Q", 7) + bytes(7))
    peer.rest()


def huge(peer: Peer, message: Message) -> None:
    peer.send(struct.pack("<Q", 2**64 - 1))
    peer.rest()


def push(server: StandIn, model: object, *, timeout: float = 20.0, **options: object) -> WeightwireError:
    """Push to a server that fails, and return the error; the connection must be closed and say so afterwards."""
    scripts = [server] * (2 if server.version[0] < 4 else 1)
    with ScriptedServer(*scripts) as scripted, connect(scripted.endpoint, timeout=timeout) as connection:
        with pytest.raises(WeightwireError) as caught:
            connection.push(model, **options)  # type: ignore[arg-type]
        assert connection.closed
        with pytest.raises(TransportError, match="given up after") as again:
            connection.barrier()
        assert caught.value.detail in again.value.detail
    return caught.value


def counts(error: WeightwireError) -> list[tuple[int, int]]:
    """Each "so many of so many bytes" that a message tells: there must be one, of the tensor."""
    return [(int(done), int(nbytes)) for done, nbytes in re.findall(r"(\d+) of (\d+) bytes", str(error))]


answered = pytest.mark.parametrize("command", [15, 1, 2, 13, 0, 3, 7], ids=lambda number: f"command {number}")


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """A GGUF file with a tensor servers are asked about (q4_0, 96 elements a row) and one worth hashing."""
    infos = b""
    for name, kind, ne, offset in (("padded", 2, (96, 2), 0), ("big", 24, (11 * MIB,), 128)):
        infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(ne))
        infos += struct.pack(f"<{len(ne)}Q", *ne) + struct.pack("<IQ", kind, offset)
    head = struct.pack("<4sIQQ", b"GGUF", 3, 2, 0) + infos
    path = tmp_path / "model.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(128) + bytes(11 * MIB))
    return path


@answered
def test_closing_instead_of_answering(command: int, padded: Path, no_leaks: LeakCheck) -> None:
    error = push(Until(command, close), padded, cache="always")
    assert isinstance(error, PeerClosed)
    assert error.position == "after"
    assert "its log says why" in error.hint
    assert error.tensor == {13: "padded", 7: "big"}.get(command)
    assert counts(error) == []


@answered
def test_resetting_instead_of_answering(command: int, padded: Path, no_leaks: LeakCheck) -> None:
    error = push(Until(command, reset), padded, cache="always")
    assert isinstance(error, PeerClosed)
    assert "reset the connection" in error.detail


@answered
def test_half_an_answer(command: int, padded: Path, no_leaks: LeakCheck) -> None:
    error = push(Until(command, half), padded, cache="always")
    assert isinstance(error, PeerClosed)
    assert error.bytes_done == 5


@answered
def test_stalling_instead_of_answering(command: int, padded: Path, no_leaks: LeakCheck) -> None:
    error = push(Until(command, stall), padded, cache="always", timeout=STALLED)
    assert isinstance(error, TransferTimeout)
    assert error.phase == "receive"
    assert error.hint
    assert error.tensor == {13: "padded", 7: "big"}.get(command)


@answered
@pytest.mark.parametrize("act", [wrong_size, huge])
def test_answers_of_a_wrong_size(command: int, act: Act, padded: Path, no_leaks: LeakCheck) -> None:
    error = push(Until(command, act), padded, cache="always")
    assert isinstance(error, ProtocolError)
    assert "were expected" in error.detail


def test_dying_inside_a_payload(no_leaks: LeakCheck) -> None:
    def die(peer: Peer, message: Message) -> None:
        peer.take(5 * MIB)
        peer.reset()

    error = push(Until(6, die, unread=True, count=2), LARGE)
    assert isinstance(error, PeerClosed)
    assert error.position == "inside"
    assert error.tensor == "big"
    assert 4 * MIB < error.bytes_done < 40 * MIB
    assert "'big'" in str(error)
    assert counts(error) == [(error.bytes_done, 40 * MIB)]


def test_dying_inside_a_payload_from_a_file(padded: Path, no_leaks: LeakCheck) -> None:
    def die(peer: Peer, message: Message) -> None:
        peer.take(MIB)
        peer.reset()

    error = push(Until(6, die, unread=True, count=2), padded)
    assert isinstance(error, PeerClosed)
    assert (error.position, error.tensor) == ("inside", "big")
    assert MIB - 512 < error.bytes_done < 11 * MIB


def test_stalling_inside_a_payload(no_leaks: LeakCheck) -> None:
    ended = threading.Event()

    def stop(peer: Peer, message: Message) -> None:
        peer.take(5 * MIB)
        ended.wait(20)

    server = Until(6, stop, unread=True, count=2)
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=STALLED) as connection:
        with pytest.raises(TransferTimeout) as caught:
            connection.push(LARGE)
        ended.set()
    error = caught.value
    assert error.phase == "send"
    assert error.tensor == "big"
    assert 4 * MIB < error.bytes_done < 40 * MIB
    assert counts(error) == [(error.bytes_done, 40 * MIB)]
    assert "nothing moved" in error.detail
    assert scripted.endpoint in error.detail
    assert "stalled" in error.hint
    assert error.elapsed >= STALLED


def test_a_stall_among_small_tensors_names_the_one_it_stopped_in(no_leaks: LeakCheck) -> None:
    ended = threading.Event()

    def stop(peer: Peer, message: Message) -> None:
        ended.wait(20)

    arrays = {f"w{i}": np.full(50_000, i % 251, "u1") for i in range(1500)}
    server = Until(6, stop, unread=True)
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=STALLED) as connection:
        with pytest.raises(TransferTimeout) as caught:
            connection.push(arrays)
        sent = connection._channel._stream.bytes_sent
        ended.set()
    error = caught.value
    assert error.tensor is not None
    # Everything before the named tensor has left whole, and this many bytes of it besides.
    at = int(error.tensor[1:])
    head = 9 + 305
    before = sent - at * (head + 50_000)
    assert max(0, before - 2 * head - 200) <= error.bytes_done + head <= before + head
    assert 0 <= error.bytes_done <= 50_000


@pytest.mark.parametrize("act", [close, stall])
def test_no_answer_to_the_barrier(act: Act, no_leaks: LeakCheck) -> None:
    error = push(Until(1, act, count=2), SMALL, timeout=20.0 if act is close else STALLED)
    assert isinstance(error, PeerClosed if act is close else TransferTimeout)
    assert "GET_ALIGNMENT" in error.detail
    if isinstance(error, PeerClosed):
        assert error.position == "after"


@pytest.mark.parametrize("command", [6, 12])
@pytest.mark.parametrize("act", [close, stall, wrong_size])
def test_answers_only_old_servers_give(command: int, act: Act, padded: Path, no_leaks: LeakCheck) -> None:
    """Protocol 1 answers SET_TENSOR, and up to 5 INIT_TENSOR is answered; each is waited for."""
    error = push(Until(command, act, version=(1, 0, 0)), padded, timeout=STALLED if act is stall else 20.0)
    expected = {close: PeerClosed, stall: TransferTimeout, wrong_size: ProtocolError}[act]
    assert isinstance(error, expected)
    if isinstance(error, (PeerClosed, TransferTimeout)):
        assert error.tensor in ("padded", "big")


@pytest.mark.parametrize("act", [close, stall, wrong_size])
def test_failing_while_tensors_are_read_back(act: Act, no_leaks: LeakCheck) -> None:
    # Long enough for the peer to take the tensor in, on a busy machine.
    error = push(Until(8, act, count=2), LARGE, verify=True, timeout=3.0 if act is stall else 20.0)
    expected = {close: PeerClosed, stall: TransferTimeout, wrong_size: ProtocolError}[act]
    assert isinstance(error, expected)
    if isinstance(error, (PeerClosed, TransferTimeout)):
        assert error.tensor == "big"


def test_dying_inside_what_is_read_back(no_leaks: LeakCheck) -> None:
    def die(peer: Peer, message: Message) -> None:
        (nbytes,) = struct.unpack_from("<Q", message.payload, 304)
        peer.send(struct.pack("<Q", nbytes) + bytes(1000))

    error = push(Until(8, die, count=2), LARGE, verify=True)
    assert isinstance(error, PeerClosed)
    assert error.tensor == "big"
    assert error.bytes_done == 1000


@pytest.mark.parametrize(
    ("command", "payload", "said"),
    [
        (0, struct.pack("<QQ", 0x1000, 8), "gave a buffer of 8"),
        (3, struct.pack("<Q", 0), "address 0x0"),
        (3, struct.pack("<Q", 2**64 - 64), "address 0xffffffffffffffc0"),
        (3, struct.pack("<Q", (1 << 40) + 1), "multiple of its own alignment"),
        (13, struct.pack("<Q", 107), "takes 107"),
        (13, struct.pack("<Q", 2**64 - 1), "takes"),
        (7, b"\2", "with 2"),
    ],
)
def test_answers_that_make_no_sense(command: int, payload: bytes, said: str, padded: Path, no_leaks: LeakCheck) -> None:
    after: list[bytes] = []

    def lie(peer: Peer, message: Message) -> None:
        peer.answer(payload)
        after.append(peer.rest())

    # Without the probe: its requests leave together with the question.
    error = push(Until(command, lie), padded, cache="always", probe=False)
    assert isinstance(error, ProtocolError)
    assert said in error.detail
    assert after == [b""], "nothing is sent to a server that cannot be believed"


def test_a_server_that_dies_between_two_calls(no_leaks: LeakCheck) -> None:
    gone = threading.Event()

    def serve(peer: Peer) -> None:
        assert serve_hello(peer)
        peer.reset()
        gone.set()

    with ScriptedServer(serve) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        assert gone.wait(20)
        with pytest.raises(TransportError):
            connection.barrier()
        assert connection.closed


def test_a_model_outlives_a_failed_push(padded: Path) -> None:
    """What the caller opened stays open, so that it can be pushed again elsewhere."""
    with open_model(padded) as model:
        push(Until(6, close, unread=True), model)
        server = StandIn()
        with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
            assert connection.push(model, verify=True).summary.verified


def test_an_answer_nobody_asked_for(no_leaks: LeakCheck) -> None:
    """A server that answers SET_TENSOR though its version does not: the next answer has the wrong size."""

    def extra(peer: Peer, message: Message) -> None:
        peer.answer(b"")
        peer.rest()

    error = push(Until(6, extra), SMALL)
    assert isinstance(error, ProtocolError)
    assert "protocol 7.0" in error.hint
