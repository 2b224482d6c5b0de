from __future__ import annotations

import errno
import logging
import os
import socket
import struct
from typing import Any

import pytest
from support.fakeverbs import FakeVerbs
from support.rdma import request

from weightwire.errors import ProtocolError, RdmaUnavailable, RegistrationError, TransportError, VerbsError
from weightwire.transport import registration
from weightwire.transport.rdma import REQUESTS, RESPONSES, offer_rdma
from weightwire.transport.registration import CHUNK
from weightwire.transport.tcp import TcpStream
from weightwire.wire.caps import RdmaCaps
from weightwire.wire.hello import CAPS_BYTES, NO_CAPS

Ends = tuple[TcpStream, TcpStream]
KIB = 1024


def test_an_offer_is_what_hello_carries(fake: FakeVerbs, tcp_pair: Ends) -> None:
    offer = offer_rdma(tcp_pair[0], {})
    assert len(offer.caps) == CAPS_BYTES
    caps = RdmaCaps.decode(offer.caps)
    assert caps is not None
    assert caps.gid == bytes(10) + b"\xff\xff" + bytes((127, 0, 0, 1))
    # Two pairs of rings, in their place before the peer can know of them.
    assert fake.handles() == {
        "contexts": 1, "pds": 1, "mrs": 2, "cqs": 2, "channels": 2, "qps": 1, "pinned": 32 * CHUNK
    }  # fmt: skip
    offer.close()
    assert fake.handles() == {}


def refusal_of(tcp: TcpStream) -> RdmaUnavailable | None:
    """Make an offer and give it back; the error if it could not be made."""
    try:
        offer_rdma(tcp, {}).close()
    except RdmaUnavailable as error:
        return error
    return None


@pytest.mark.parametrize(
    "fault",
    [
        "open_device:EIO",
        "query_port:EIO",
        "alloc_pd:ENOMEM",
        "create_comp_channel:EIO",
        "create_cq:EIO",
        "create_qp:EIO",
        "reg_mr:EIO",
        "modify_qp:INIT:EIO",
        "post_recv:EIO",
    ],
)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_whatever_fails_leaves_nothing(fake: FakeVerbs, tcp_pair: Ends, fault: str, after: int) -> None:
    fake.fault(fault, after=after)
    error = refusal_of(tcp_pair[0])
    # With enough calls that work, there may be no such call left to fail.
    assert error is not None or after
    if error is not None:
        assert "ibv_" in error.reason
        # Looking for a device passes over those that fail, and says so; after that it is the cause that counts.
        assert isinstance(error.__cause__, VerbsError) or fault.split(":")[0] in ("open_device", "query_port")
    assert fake.handles() == {}
    tcp_pair[0].send(b"on")
    assert tcp_pair[1].recv(2) == b"on"


def test_the_driver_pins_too(fake: FakeVerbs, tcp_pair: Ends, caplog: pytest.LogCaptureFixture) -> None:
    fake.set("budget", 8192 * KIB)
    fake.set("queue_cost", 64 * KIB)
    with caplog.at_level(logging.WARNING, "weightwire"):
        offer = offer_rdma(tcp_pair[0], {})
    assert [(attempt.send_slots, attempt.failed) for attempt in offer.attempts] == [(8, "receive"), (4, "")]
    assert "8 + 24 slots: the receive ring failed (ENOMEM); 4 + 24 slots: registered" in caplog.text
    offer.close()


def test_no_memory_at_all(fake: FakeVerbs, tcp_pair: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "locked_memory_limit", lambda: 64 * KIB)
    fake.set("budget", 64 * KIB)
    with pytest.raises(RdmaUnavailable) as caught:
        offer_rdma(tcp_pair[0], {})
    cause = caught.value.__cause__
    assert isinstance(cause, RegistrationError)
    assert [attempt.send_slots for attempt in cause.attempts] == [8, 4, 2, 1]
    assert caught.value.errno == errno.ENOMEM
    assert "ulimit -l" in caught.value.hint
    assert "locked memory" in caught.value.reason
    assert fake.handles() == {}


@pytest.mark.parametrize("step", ["RTR", "RTS"])
def test_a_peer_that_cannot_be_connected(fake: FakeVerbs, tcp_pair: Ends, step: str) -> None:
    offers = [offer_rdma(end, {}) for end in tcp_pair]
    fake.fault(f"modify_qp:{step}:ETIMEDOUT")
    for offer, other, end in zip(offers, reversed(offers), tcp_pair, strict=True):
        with pytest.raises(VerbsError) as caught:
            offer.activate(end, other.caps, REQUESTS)
        assert (caught.value.operation, caught.value.errno) == (f"ibv_modify_qp to {step}", errno.ETIMEDOUT)
    assert fake.handles() == {}
    tcp_pair[0].send(b"on")
    assert tcp_pair[1].recv(2) == b"on"


@pytest.mark.parametrize(
    ("caps", "error"),
    [
        (NO_CAPS, RdmaUnavailable),
        (struct.pack("<IHH16s", 9, 1, 0, b"g" * 16), ProtocolError),
        (bytes(23), ProtocolError),
    ],
)
def test_what_a_peer_may_answer(fake: FakeVerbs, tcp_pair: Ends, caps: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        offer_rdma(tcp_pair[0], {}).activate(tcp_pair[0], caps, REQUESTS)
    assert fake.handles() == {}
    assert not tcp_pair[0].closed


def test_the_framing_has_a_name(fake: FakeVerbs, tcp_pair: Ends) -> None:
    offers = [offer_rdma(end, {}) for end in tcp_pair]
    with pytest.raises(KeyError):
        offers[0].activate(tcp_pair[0], offers[1].caps, "letters")
    assert fake.get("qps") == 1
    offers[1].close()


def test_a_device_gone_between_choice_and_opening(
    fake: FakeVerbs, tcp_pair: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightwire.transport import rdma

    real = rdma.choose

    def choose(address: str, environ: Any) -> Any:
        found = real(address, environ)
        fake.set("devices", 0)
        return found

    monkeypatch.setattr(rdma, "choose", choose)
    with pytest.raises(RdmaUnavailable, match="fake0 has gone"):
        offer_rdma(tcp_pair[0], {})


def test_only_over_ip(fake: FakeVerbs) -> None:
    one, other = socket.socketpair()
    with TcpStream(one) as stream, other, pytest.raises(RdmaUnavailable, match="no IP connection"):
        offer_rdma(stream, {})


def test_a_closed_connection(fake: FakeVerbs, tcp_pair: Ends) -> None:
    tcp_pair[0].close()
    with pytest.raises(TransportError, match="no local address"):
        offer_rdma(tcp_pair[0], {})


def test_a_connection_closed_after_the_offer(fake: FakeVerbs, tcp_pair: Ends) -> None:
    offers = [offer_rdma(end, {}) for end in tcp_pair]
    tcp_pair[0].close()
    with pytest.raises(TransportError, match="is closed") as caught:
        offers[0].activate(tcp_pair[0], offers[1].caps, REQUESTS)
    assert caught.value.errno == errno.EBADF
    assert fake.get("qps") == 1
    offers[1].close()


def test_the_environment_of_the_process(fake: FakeVerbs, tcp_pair: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_RPC_NO_RDMA", "1")
    with pytest.raises(RdmaUnavailable, match="GGML_RPC_NO_RDMA"):
        offer_rdma(tcp_pair[0])
    monkeypatch.delenv("GGML_RPC_NO_RDMA")
    offer_rdma(tcp_pair[0]).close()


def test_the_stream_owns_everything(fake: FakeVerbs, tcp_pair: Ends, caplog: pytest.LogCaptureFixture) -> None:
    offers = [offer_rdma(end, {}) for end in tcp_pair]
    with caplog.at_level(logging.INFO, "weightwire"):
        client = offers[0].activate(tcp_pair[0], offers[1].caps, REQUESTS)
    assert "RDMA on fake0, GID ::ffff:127.0.0.1 (RoCE v2), mtu 1024, 8 SENDs in flight" in caplog.text
    server = offers[1].activate(tcp_pair[1], offers[0].caps, RESPONSES)
    with client, server:
        client.send(request(1, b""))
        server.recv(9)
    assert tcp_pair[0].closed
    assert tcp_pair[1].closed
    assert fake.handles() == {}


def test_dropped_without_closing(fake: FakeVerbs, tcp_pair: Ends) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    offers = [offer_rdma(end, {}) for end in tcp_pair]
    streams = [offers[0].activate(tcp_pair[0], offers[1].caps, REQUESTS)]
    del offers, streams
    assert fake.handles() == {}
    assert len(os.listdir("/proc/self/fd")) <= descriptors
