"""A server whose clients offer RDMA, honestly or not. On the stand-in libibverbs, in one process."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fakeverbs import RETRY_EXC_ERR, FakeVerbs
from support.leaks import LeakCheck, eventually
from support.rdma import Offering, pair_number, request

from weightwire import Server, connect, fnv1a64
from weightwire.client.remote import RemoteTensor
from weightwire.errors import PeerClosed, TransportError
from weightwire.server import listener
from weightwire.server.filling import MAX_QUESTIONS, Filler
from weightwire.server.session import Session
from weightwire.transport.rdma import RING_BYTES, RdmaStream
from weightwire.wire import Command, dialect_for
from weightwire.wire.caps import RdmaCaps
from weightwire.wire.hello import NO_CAPS
from weightwire.wire.tensor import weight_tensor

MAX_SIZE = request(Command.GET_MAX_SIZE, bytes(4))
ANSWER = struct.pack("<QQ", 8, (1 << 64) - 1)
APPLE = struct.pack("<IHH16s", 0x1234, 9, 0, bytes(range(16)))


@pytest.fixture
def server(fake: FakeVerbs, no_leaks: LeakCheck) -> Iterator[Server]:
    with Server(port=0, memory=1 << 20) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Offering]:
    made = Offering(server)
    yield made
    made.close()


def test_both_activate(client: Offering) -> None:
    assert RdmaCaps.decode(client.theirs) is not None
    stream = client.rise()
    for _ in range(3):
        stream.send(MAX_SIZE)
        assert stream.recv(16) == ANSWER
    assert stream.counts["receives"] == 6, "size and payload are two SENDs"


def test_a_client_that_goes_on_over_tcp(client: Offering, fake: FakeVerbs, caplog: pytest.LogCaptureFixture) -> None:
    """As a stock one does whose own side failed to activate: it never says so."""
    assert any(client.theirs)
    for _ in range(3):
        client.tcp.send(MAX_SIZE)
        assert client.tcp.recv(16) == ANSWER
    assert "on TCP: the peer announced RDMA and goes on over TCP" in caplog.text
    assert fake.get("qps") == 1, "the server's is given back"


def test_it_may_take_its_time(client: Offering) -> None:
    """Half a request is enough to know."""
    client.tcp.send(MAX_SIZE[:1])
    client.tcp.send(MAX_SIZE[1:5])
    client.tcp.send(MAX_SIZE[5:])
    assert client.tcp.recv(16) == ANSWER


def test_once_over_rdma_nothing_is_read_from_tcp(client: Offering) -> None:
    stream = client.rise()
    stream.send(MAX_SIZE)
    assert stream.recv(16) == ANSWER
    client.tcp.send(MAX_SIZE)
    stream.send(MAX_SIZE)
    assert stream.recv(16) == ANSWER
    assert not client.tcp.peer_gone()


def test_a_client_that_says_nothing(fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    with Server(port=0, stall_timeout=0.2) as server:
        client = Offering(server)
        assert client.tcp.recv_or_eof(1) is None
        client.close()
    assert "the client agreed on RDMA, and sent nothing for" in caplog.text


def test_patience_is_only_short_before_the_first_request(
    fake: FakeVerbs, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = threading.Event()
    first = Session._first
    monkeypatch.setattr(Session, "_first", lambda session: sent.wait(60) and first(session))
    with Server(port=0, stall_timeout=0.2) as server:
        client = Offering(server)
        stream = client.rise()
        stream.send(MAX_SIZE)
        sent.set()  # there in time, however slow the machine
        assert stream.recv(16) == ANSWER
        with pytest.raises(TimeoutError):
            stream.recv(1, timeout=0.6)
        stream.send(MAX_SIZE)
        assert stream.recv(16) == ANSWER
        client.close()


@pytest.mark.parametrize("active", [False, True])
def test_a_client_that_leaves(client: Offering, server: Server, fake: FakeVerbs, active: bool) -> None:
    if active:
        client.rise().send(MAX_SIZE)
    client.close()
    for _ in range(200):
        if not server.clients:
            break
        with connect(server.endpoints[0], transport="tcp") as other:
            other.barrier()
    assert fake.handles() == {}


@pytest.mark.parametrize(("sent", "heard"), [(b"", 0), (MAX_SIZE[:1], 1), (request(99, b""), 1)])
def test_whom_it_has_heard_counts_as_a_connection(client: Offering, server: Server, sent: bytes, heard: int) -> None:
    """Even if nothing came of it, but not one that only agreed on RDMA."""
    stream = client.rise()
    assert eventually(lambda: server.stats().connections_open == 1)
    if sent:
        stream.send(sent)
        assert eventually(lambda: server.stats().rdma.bytes_received >= 1)
    client.close()
    assert eventually(lambda: server.stats().connections_open == 0)
    stats = server.stats()
    assert (stats.rdma.open_connections, stats.rdma.connections, stats.tcp.connections) == (0, heard, 0)


def test_the_server_closes_before_the_first_request(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    with Server(port=0) as server:
        client = Offering(server)
    assert client.tcp.recv_or_eof(1) is None
    client.close()


@pytest.mark.parametrize("part", [1, 5, 9])
def test_the_server_closes_inside_a_request(fake: FakeVerbs, no_leaks: LeakCheck, part: int) -> None:
    with Server(port=0) as server:
        client = Offering(server)
        stream = client.rise()
        stream.send(MAX_SIZE[:part])
    with pytest.raises(PeerClosed):
        stream.recv(1)
    stream.close()


def test_what_cannot_be_served(client: Offering, caplog: pytest.LogCaptureFixture) -> None:
    stream = client.rise()
    stream.send(request(99, b""))
    with pytest.raises(PeerClosed):
        stream.recv(1)
    assert "protocol 7.0 has no such command" in caplog.text


def test_a_queue_pair_that_breaks(
    client: Offering, server: Server, fake: FakeVerbs, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.rise()
    stream.send(MAX_SIZE)
    assert stream.recv(16) == ANSWER
    caps = RdmaCaps.decode(client.theirs)
    assert caps is not None
    fake.fail_pair(caps.number, RETRY_EXC_ERR)
    fake.fail_pair(pair_number(stream), RETRY_EXC_ERR)
    with pytest.raises(TransportError):
        stream.send(MAX_SIZE)
        stream.recv(16)
    stream.close()


@pytest.mark.parametrize(
    ("caps", "reason"),
    [
        (NO_CAPS, "the client does not offer RDMA"),
        (APPLE, "the peer offers RDMA in another layout"),
        (struct.pack("<II16s", 0, 0, b"\1" * 16), "in another layout"),
        (struct.pack("<II16s", 5, 5, bytes(16)), "without a GID"),
    ],
)
def test_what_is_no_offer(
    server: Server, fake: FakeVerbs, caplog: pytest.LogCaptureFixture, caps: bytes, reason: str
) -> None:
    with caplog.at_level(logging.INFO, "weightwire"):
        client = Offering(server, caps)
        client.offer.close()
        assert client.theirs == NO_CAPS
        assert fake.handles() == {}
        client.tcp.send(MAX_SIZE)
        assert client.tcp.recv(16) == ANSWER
        client.close()
    assert reason in caplog.text


def test_a_server_that_was_told_to_stay(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    with Server(port=0, transport="tcp") as server:
        client = Offering(server)
        assert client.theirs == NO_CAPS
        client.close()


# Inside a request.


def begin_a_tensor(stream: RdmaStream) -> None:
    """SET_TENSOR of 1 MiB, of which 300,000 bytes are sent."""
    dialect, nbytes = dialect_for("7.0"), 1 << 20
    stream.send(request(Command.ALLOC_BUFFER, dialect.encode_alloc_buffer(0, nbytes)))
    handle, granted = struct.unpack("<QQ", stream.recv(24)[8:])
    assert granted == nbytes
    stream.send(request(Command.BUFFER_GET_BASE, dialect.encode_handle(handle)))
    (base,) = struct.unpack("<Q", stream.recv(16)[8:])
    tensor = weight_tensor("blk.0.half", 24, (nbytes,), nbytes, buffer=handle, data=base)
    whole = request(Command.SET_TENSOR, dialect.encode_set_tensor(tensor, 0, 0) + bytes(nbytes))
    stream.send(whole[: len(whole) - nbytes + 300_000])


def ended_inside(
    server: Server, fake: FakeVerbs, client: Offering, stream: RdmaStream, caplog: pytest.LogCaptureFixture
) -> str:
    """The one line of a server that has ended this client; nothing is left of it, and later nothing at either end."""
    assert eventually(lambda: server.clients == 0, 60)
    assert "blk.0.half" not in server.tensors
    assert eventually(lambda: fake.get("qps") == 1)
    assert (fake.get("pds"), fake.get("mrs")) == (1, 2), "the client's own"
    stream.close()
    client.close()
    assert eventually(lambda: fake.handles() == {})
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "SET_TENSOR of tensor 'blk.0.half'" in line
    assert line.endswith("connection closed")
    with connect(server.endpoints[0]) as other:
        assert other.device_memory()[0] == 1 << 20, "what the client held can be had again"
    return line


def test_a_queue_pair_that_breaks_inside_a_tensor(
    client: Offering, server: Server, fake: FakeVerbs, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.rise()
    begin_a_tensor(stream)
    caps = RdmaCaps.decode(client.theirs)
    assert caps is not None
    fake.forge(caps.number, receiving=True, id=0, status=RETRY_EXC_ERR)
    with pytest.raises(TransportError):
        stream.recv(1)
    assert "a completion failed" in ended_inside(server, fake, client, stream, caplog)


def test_a_client_that_stops_inside_a_tensor(
    fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture
) -> None:
    """As one does that is stopped by a signal: its end of TCP stays open, and no SEND comes any more."""
    with Server(port=0, memory=1 << 20, stall_timeout=1.0) as server:
        client = Offering(server)
        stream = client.rise()
        begun = time.monotonic()
        begin_a_tensor(stream)
        assert stream.recv_or_eof(1) is None
        took = time.monotonic() - begun
        line = ended_inside(server, fake, client, stream, caplog)
    measured = re.search(r"nothing came for (\d+\.\d) s", line)
    assert measured is not None
    assert 1.0 <= float(measured[1]) <= took + 0.05


# Between requests.


def test_a_queue_pair_that_breaks_between_requests(
    client: Offering, server: Server, fake: FakeVerbs, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.rise()
    stream.send(MAX_SIZE)
    assert stream.recv(16) == ANSWER
    caps = RdmaCaps.decode(client.theirs)
    assert caps is not None
    fake.forge(caps.number, receiving=True, id=1, status=RETRY_EXC_ERR)
    assert eventually(lambda: server.clients == 0)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "between requests: receiving from" in line
    assert "a completion failed" in line
    assert line.endswith("connection closed")
    stream.close()


def test_senseless_sends_between_requests(
    client: Offering, server: Server, fake: FakeVerbs, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.rise()
    stream.send(MAX_SIZE)
    assert stream.recv(16) == ANSWER
    caps = RdmaCaps.decode(client.theirs)
    assert caps is not None
    fake.forge(caps.number, receiving=True, id=0, nbytes=(256 << 10) + 1)
    assert eventually(lambda: server.clients == 0)
    assert "between requests: receiving from" in caplog.text
    assert "does not fit a slot" in caplog.text or "nothing that was posted" in caplog.text
    stream.close()


def test_a_client_that_leaves_is_nothing_to_warn_of(
    client: Offering, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.rise()
    stream.send(MAX_SIZE)
    assert stream.recv(16) == ANSWER
    stream.close()
    assert eventually(lambda: server.clients == 0)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# How much is pinned.


def test_pinned_memory_is_bounded(
    fake: FakeVerbs, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "MAX_PINNED", 2 * RING_BYTES + 5)
    with Server(port=0) as server, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(connect(server.endpoints[0])) for _ in range(2))
        third = stack.enter_context(connect(server.endpoints[0]))
        assert [each.transport["kind"] for each in (first, second, third)] == ["rdma", "rdma", "tcp"]
        third.barrier()
        assert "on TCP: 2 clients are on RDMA already, which is the most" in caplog.text
        second.close()
        assert eventually(lambda: server.clients == 2)
        fourth = stack.enter_context(connect(server.endpoints[0], transport="rdma"))
        # One that agrees and goes on over TCP gives its place back, too.
        fourth.close()
        assert eventually(lambda: server.clients == 2)
        late = Offering(server)
        late.tcp.send(MAX_SIZE)
        assert late.tcp.recv(16) == ANSWER
        stack.enter_context(connect(server.endpoints[0], transport="rdma"))
        late.close()


def test_a_client_that_cannot_be_served_over_rdma_takes_no_place(
    fake: FakeVerbs, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_PINNED", RING_BYTES)
    with Server(port=0) as server:
        apple = Offering(server, APPLE)
        with connect(server.endpoints[0], transport="rdma") as connection:
            connection.barrier()
        apple.close()


@pytest.mark.parametrize("state", ["cold", "warm"])
def test_a_row_of_questions_is_taken_together(
    state: str, fake: FakeVerbs, no_leaks: LeakCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over TCP: those that have come behind the one at hand are worked on beside it. They are as many as the window
    takes while nobody reads them.
    """
    contents = [random.Random(number).randbytes(50_000) for number in range(4)]
    if state == "warm":
        for content in contents:
            (tmp_path / f"{fnv1a64(content):016x}").write_bytes(content)
    all_sent = threading.Event()
    beside: list[int] = []
    ask, answer = Filler.ask, Filler.answer

    def ask_late(self: Filler, body: bytes) -> None:
        assert all_sent.wait(60)
        ask(self, body)

    def answer_and_count(self: Filler) -> bool:
        beside.append(MAX_QUESTIONS - self.room)
        return answer(self)

    monkeypatch.setattr(Filler, "ask", ask_late)
    monkeypatch.setattr(Filler, "answer", answer_and_count)
    answers: list[bytes] = []
    with Server(port=0, cache=tmp_path) as server, connect(server.endpoints[0], transport="rdma") as connection:
        buffer = connection.allocate(len(contents) * 65_536)
        tensors = [
            RemoteTensor(f"t{number}", None, (len(content),), len(content), buffer, number * 65_536)
            for number, content in enumerate(contents)
        ]
        channel = connection._channel
        with channel.exclusive("questions"):
            for tensor, content in zip(tensors, contents, strict=True):
                question = channel.dialect.encode_set_tensor_hash(tensor.wire(), 0, fnv1a64(content))
                channel.post(Command.SET_TENSOR_HASH, question, then=answers.append)
            all_sent.set()
            channel.settle()
        assert answers == [b"\1" if state == "warm" else b"\0"] * len(contents)
        if state == "warm":
            assert [tensor.read().tobytes() for tensor in tensors] == contents
        assert connection.transport["kind"] == "rdma"
    assert beside == [4, 3, 2, 1]
