"""A server whose clients offer RDMA, honestly or not. On the stand-in libibverbs, in one process."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator

import pytest
from support.fakeverbs import RETRY_EXC_ERR, FakeVerbs
from support.leaks import LeakCheck
from support.rdma import pair_number, request

from weightwire import Server, connect
from weightwire.errors import ConfigError, PeerClosed, RdmaUnavailable, TransportError, VersionError
from weightwire.transport.rdma import REQUESTS, RdmaOffer, RdmaStream, offer_rdma
from weightwire.transport.tcp import TcpStream, connect_tcp
from weightwire.wire import Command
from weightwire.wire.caps import RdmaCaps
from weightwire.wire.hello import NO_CAPS

MAX_SIZE = request(Command.GET_MAX_SIZE, bytes(4))
ANSWER = struct.pack("<QQ", 8, (1 << 64) - 1)
APPLE = struct.pack("<IHH16s", 0x1234, 9, 0, bytes(range(16)))


class Client:
    """Past HELLO, with a queue pair that has been offered; ``theirs`` is what the server answered."""

    def __init__(self, server: Server, caps: bytes | None = None) -> None:
        self.tcp: TcpStream = connect_tcp(server.endpoints[0], 20.0)
        self.offer: RdmaOffer = offer_rdma(self.tcp, {})
        self.tcp.send(request(Command.HELLO, self.offer.caps if caps is None else caps))
        answer = self.tcp.recv(36)
        assert answer[:12] == struct.pack("<QBBBB", 28, 7, 0, 0, 0)
        self.theirs = answer[12:]

    def rise(self) -> RdmaStream:
        return self.offer.activate(self.tcp, self.theirs, REQUESTS)

    def close(self) -> None:
        self.offer.close()
        self.tcp.close()


@pytest.fixture
def server(fake: FakeVerbs, no_leaks: LeakCheck) -> Iterator[Server]:
    with Server(port=0, memory=1 << 20) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    made = Client(server)
    yield made
    made.close()


def test_both_activate(client: Client) -> None:
    assert RdmaCaps.decode(client.theirs) is not None
    stream = client.rise()
    for _ in range(3):
        stream.send(MAX_SIZE)
        assert stream.recv(16) == ANSWER
    assert stream.counts["receives"] == 6, "size and payload are two SENDs"


def test_a_client_that_goes_on_over_tcp(client: Client, fake: FakeVerbs, caplog: pytest.LogCaptureFixture) -> None:
    """As a stock one does whose own side failed to activate: it never says so."""
    assert any(client.theirs)
    for _ in range(3):
        client.tcp.send(MAX_SIZE)
        assert client.tcp.recv(16) == ANSWER
    assert "on TCP: the peer announced RDMA and goes on over TCP" in caplog.text
    assert fake.get("qps") == 1, "the server's is given back"


def test_it_may_take_its_time(client: Client) -> None:
    """Half a request is enough to know."""
    client.tcp.send(MAX_SIZE[:1])
    client.tcp.send(MAX_SIZE[1:5])
    client.tcp.send(MAX_SIZE[5:])
    assert client.tcp.recv(16) == ANSWER


def test_once_over_rdma_nothing_is_read_from_tcp(client: Client) -> None:
    stream = client.rise()
    stream.send(MAX_SIZE)
    assert stream.recv(16) == ANSWER
    client.tcp.send(MAX_SIZE)
    stream.send(MAX_SIZE)
    assert stream.recv(16) == ANSWER
    assert not client.tcp.peer_gone()


def test_a_client_that_says_nothing(fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    with Server(port=0, stall_timeout=0.2) as server:
        client = Client(server)
        assert client.tcp.recv_or_eof(1) is None
        client.close()
    assert "the client agreed on RDMA, and sent nothing for" in caplog.text


def test_patience_is_only_short_before_the_first_request(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    with Server(port=0, stall_timeout=0.2) as server:
        client = Client(server)
        stream = client.rise()
        stream.send(MAX_SIZE)
        assert stream.recv(16) == ANSWER
        with pytest.raises(TimeoutError):
            stream.recv(1, timeout=0.6)
        stream.send(MAX_SIZE)
        assert stream.recv(16) == ANSWER
        client.close()


@pytest.mark.parametrize("active", [False, True])
def test_a_client_that_leaves(client: Client, server: Server, fake: FakeVerbs, active: bool) -> None:
    if active:
        client.rise().send(MAX_SIZE)
    client.close()
    for _ in range(200):
        if not server.clients:
            break
        with connect(server.endpoints[0], transport="tcp") as other:
            other.barrier()
    assert fake.handles() == {}


def test_the_server_closes_before_the_first_request(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    with Server(port=0) as server:
        client = Client(server)
    assert client.tcp.recv_or_eof(1) is None
    client.close()


@pytest.mark.parametrize("part", [1, 5, 9])
def test_the_server_closes_inside_a_request(fake: FakeVerbs, no_leaks: LeakCheck, part: int) -> None:
    with Server(port=0) as server:
        client = Client(server)
        stream = client.rise()
        stream.send(MAX_SIZE[:part])
    with pytest.raises(PeerClosed):
        stream.recv(1)
    stream.close()


def test_what_cannot_be_served(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    stream = client.rise()
    stream.send(request(99, b""))
    with pytest.raises(PeerClosed):
        stream.recv(1)
    assert "protocol 7.0 has no such command" in caplog.text


def test_a_queue_pair_that_breaks(
    client: Client, server: Server, fake: FakeVerbs, caplog: pytest.LogCaptureFixture
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
        client = Client(server, caps)
        client.offer.close()
        assert client.theirs == NO_CAPS
        assert fake.handles() == {}
        client.tcp.send(MAX_SIZE)
        assert client.tcp.recv(16) == ANSWER
        client.close()
    assert reason in caplog.text


def test_a_server_that_was_told_to_stay(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    with Server(port=0, transport="tcp") as server:
        client = Client(server)
        assert client.theirs == NO_CAPS
        client.close()


# RDMA and nothing else.


def test_required_of_the_client(fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    with Server(port=0, transport="rdma") as server:
        with connect(server.endpoints[0]) as connection:
            assert connection.transport["kind"] == "rdma"
        with pytest.raises(VersionError, match="refuses this client"):
            connect(server.endpoints[0], transport="tcp")
    assert "HELLO: RDMA is required here: the client does not offer RDMA; connection closed" in caplog.text


def test_required_and_it_goes_on_over_tcp(
    fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(port=0, transport="rdma") as server:
        client = Client(server)
        client.tcp.send(MAX_SIZE)
        with pytest.raises(PeerClosed):
            client.tcp.recv(16)
        client.close()
    assert "RDMA is required here: the peer announced RDMA and goes on over TCP" in caplog.text


def test_required_without_a_device(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    fake.set("devices", 0)
    with pytest.raises(RdmaUnavailable, match="no RDMA device"), Server(port=0, transport="rdma"):
        raise AssertionError("it started")


@pytest.mark.parametrize("protocol", ["1.0", "3.6"])
def test_required_in_a_version_that_has_none(protocol: str) -> None:
    with pytest.raises(ConfigError, match="has no RDMA"):
        Server(protocol=protocol, transport="rdma")
