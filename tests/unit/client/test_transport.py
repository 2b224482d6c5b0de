"""What carries a connection, and why: client and server in one process, on the stand-in libibverbs."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.fakeverbs import RETRY_EXC_ERR, FakeVerbs
from support.leaks import LeakCheck
from support.rdma import pair_number
from support.scripted import Peer, ScriptedServer, StandIn, hello_answer

import weightwire
from weightwire import Server, connect
from weightwire.errors import (
    CompletionError,
    ConfigError,
    PeerClosed,
    ProtocolError,
    RdmaUnavailable,
    ServerBusy,
    TransferTimeout,
    VersionError,
)
from weightwire.transport import negotiate, registration
from weightwire.transport.rdma import RdmaOffer, RdmaStream, offer_rdma
from weightwire.transport.tcp import TcpStream

KIB = 1024
NOT_TAKEN_UP = "the server did not take up the offer of RDMA: it does without, or could not and logs why"
TCP_MEMBERS = {"kind", "device", "gid", "send_depth", "reason", "registration", "local", "peer"}
ARRAYS = {
    "large": np.arange(3 << 20, dtype=np.uint8),
    **{f"small.{index}": np.full(100 + index, index, np.float32) for index in range(40)},
}


def test_both_ends_can(fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weightwire"), Server(port=0) as server:
        with connect(server.endpoints[0], timeout=20) as connection:
            found = connection.transport
            assert found["kind"] == "rdma"
            assert (found["device"], found["gid"], found["send_depth"]) == ("fake0", "::ffff:127.0.0.1", 8)
            assert found["reason"] == "GID 2 is the local address"
            assert found["registration"] == [{"send_slots": 8, "receive_slots": 24, "failed": "", "errno": 0}]
            assert found["peer"] == server.endpoints[0]
            assert found.keys() > TCP_MEMBERS
            result = connection.push(ARRAYS, verify=True)
            assert {name: server.tensors[name].view() for name in ARRAYS} == {
                name: memoryview(array).cast("B") for name, array in ARRAYS.items()
            }
            assert np.array_equal(result["small.7"].numpy(), ARRAYS["small.7"])
            profile = result.summary.profile
            assert profile.direct_bytes == 0
            assert profile.copied_bytes > profile.set_tensor_bytes > 0
            assert connection.devices()
            assert fake.get("qps") == 2
        connection.close()
    lines = [record.getMessage() for record in caplog.records if "RDMA on fake0" in record.getMessage()]
    assert len(lines) == 2, "one at each end"
    assert all("GID ::ffff:127.0.0.1" in line and "is the local address" in line for line in lines)
    assert fake.handles() == {}


@pytest.mark.parametrize("protocol", ["4.0", "5.1", "6.0", "8.0"])
def test_every_version_that_has_it(fake: FakeVerbs, protocol: str) -> None:
    with Server(port=0, protocol=protocol) as server, connect(server.endpoints[0], transport="rdma") as connection:
        assert connection.transport["kind"] == "rdma"
        connection.push(ARRAYS, verify=True)


def test_a_version_that_has_none(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    with Server(port=0, protocol="3.6") as server:
        with connect(server.endpoints[0]) as connection:
            assert connection.transport["reason"] == "protocol 3.6 has no RDMA"
            assert connection.transport.keys() == TCP_MEMBERS
        with pytest.raises(RdmaUnavailable, match=r"protocol 3\.6 has no RDMA"):
            connect(server.endpoints[0], transport="rdma")


def test_a_version_the_user_names_decides(fake: FakeVerbs) -> None:
    """What is spoken as if the server were older offers it nothing newer."""
    with Server(port=0, protocol="4.0") as server, connect(server.endpoints[0], protocol="3.6") as connection:
        assert connection.transport["reason"] == "protocol 3.6 has no RDMA"
        assert connection.device_count() == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ("tcp", "auto", "TCP was asked for"),
        ("tcp", "tcp", "TCP was asked for"),
        ("auto", "tcp", NOT_TAKEN_UP),
    ],
)
def test_one_end_wants_tcp(fake: FakeVerbs, no_leaks: LeakCheck, ours: str, theirs: str, reason: str) -> None:
    with Server(port=0, transport=theirs) as server, connect(server.endpoints[0], transport=ours) as connection:
        assert connection.transport["kind"] == "tcp"
        assert connection.transport["reason"] == reason
        assert (connection.transport["device"], connection.transport["registration"]) == (None, [])
        assert fake.handles() == {}, "what was offered in vain is given back at once"
        connection.push(ARRAYS, verify=True)


def test_required_and_not_offered(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    with Server(port=0, transport="tcp") as server, pytest.raises(RdmaUnavailable) as caught:
        connect(server.endpoints[0], transport="rdma")
    assert caught.value.reason == NOT_TAKEN_UP


@pytest.mark.parametrize("wrong", ["", "RDMA", "udp", None, 7])
def test_a_transport_that_is_none(wrong: str) -> None:
    with pytest.raises(ConfigError, match="transport"):
        connect("127.0.0.1:1", transport=wrong)
    with pytest.raises(ConfigError, match="transport"):
        Server(transport=wrong)


def break_device(fake: FakeVerbs, environ: pytest.MonkeyPatch) -> None:
    fake.set("devices", 0)


def turn_off(fake: FakeVerbs, environ: pytest.MonkeyPatch) -> None:
    environ.setenv("GGML_RPC_NO_RDMA", "")


def name_another(fake: FakeVerbs, environ: pytest.MonkeyPatch) -> None:
    environ.setenv("GGML_RDMA_DEV", "mlx5_7")


def name_a_hole(fake: FakeVerbs, environ: pytest.MonkeyPatch) -> None:
    environ.setenv("GGML_RDMA_GID", "200")


def take_gid(fake: FakeVerbs, environ: pytest.MonkeyPatch) -> None:
    for index in range(8):
        fake.gid(index, None)


def break_listing(fake: FakeVerbs, environ: pytest.MonkeyPatch) -> None:
    fake.fault("get_device_list:EPERM")


def stop_opening(fake: FakeVerbs, environ: pytest.MonkeyPatch) -> None:
    fake.fault("open_device:EACCES")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (break_device, "no RDMA device"),
        (turn_off, "GGML_RPC_NO_RDMA is set"),
        (name_another, "no RDMA device 'mlx5_7', which GGML_RDMA_DEV names"),
        (name_a_hole, "no device has GID 200"),
        (take_gid, "is the local address 127.0.0.1"),
        (break_listing, "ibv_get_device_list"),
        (stop_opening, "ibv_open_device"),
    ],
)
def test_what_this_machine_lacks(
    fake: FakeVerbs,
    no_leaks: LeakCheck,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[FakeVerbs, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    with Server(port=0) as server:
        spoil(fake, monkeypatch)
        with connect(server.endpoints[0]) as connection:
            assert connection.transport["kind"] == "tcp"
            assert reason in str(connection.transport["reason"])
            connection.push(ARRAYS, verify=True)
        with pytest.raises(RdmaUnavailable) as caught:
            connect(server.endpoints[0], transport="rdma")
        assert reason in caught.value.reason


def test_the_stock_variables_choose(fake: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.set("devices", 2)
    monkeypatch.setenv("GGML_RDMA_DEV", "fake1")
    monkeypatch.setenv("GGML_RDMA_GID", "1")
    with Server(port=0) as server, connect(server.endpoints[0], transport="rdma") as connection:
        assert connection.transport["device"] == "fake1"
        assert connection.transport["reason"] == "GGML_RDMA_DEV names the device, GGML_RDMA_GID names it"
        connection.barrier()


# Memory.


def test_a_limit_of_64_kib(
    fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "locked_memory_limit", lambda: 64 * KIB)
    fake.set("budget", 64 * KIB)
    with (
        caplog.at_level(logging.WARNING, "weightwire"),
        Server(port=0) as server,
        connect(server.endpoints[0]) as connection,
    ):
        found = connection.transport
        assert found["kind"] == "tcp"
        assert "locked memory" in str(found["reason"])
        assert "ulimit -l" in str(found["reason"])
        rungs = found["registration"]
        assert isinstance(rungs, list)
        assert [(rung["send_slots"], rung["failed"]) for rung in rungs] == [(n, "send") for n in (8, 4, 2, 1)]
        connection.push(ARRAYS, verify=True)
        with pytest.raises(RdmaUnavailable) as caught:
            connect(server.endpoints[0], transport="rdma")
        assert "ulimit -l" in caught.value.hint
    assert "on TCP: no rings fit" in caplog.text


def test_fewer_slots(fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    """The client takes 8 + 24 slots of what both share, which leaves 2 + 24 to the server."""
    fake.set("budget", (32 + 26) * 256 * KIB)
    with Server(port=0) as server, caplog.at_level(logging.INFO, "weightwire"):
        with connect(server.endpoints[0]) as connection:
            assert (connection.transport["kind"], connection.transport["send_depth"]) == ("rdma", 8)
            connection.push(ARRAYS, verify=True)
        assert "2 SENDs in flight" in caplog.text


def test_no_memory_at_the_server(fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    fake.set("budget", 33 * 256 * KIB)
    with Server(port=0) as server, connect(server.endpoints[0]) as connection:
        assert connection.transport["reason"] == NOT_TAKEN_UP
        connection.push(ARRAYS, verify=True)
    assert "on TCP: no rings fit" in caplog.text


# Activation.


@pytest.mark.parametrize("step", ["RTR", "RTS"])
def test_the_server_cannot_activate(
    fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    fake.fault(f"modify_qp:{step}:ETIMEDOUT", times=1)
    with Server(port=0) as server, connect(server.endpoints[0]) as connection:
        assert connection.transport["reason"] == NOT_TAKEN_UP
        connection.push(ARRAYS, verify=True)
    assert f"on TCP: ibv_modify_qp to {step}: Connection timed out" in caplog.text


@pytest.mark.parametrize("step", ["RTR", "RTS"])
@pytest.mark.parametrize("required", [False, True])
def test_the_client_cannot_activate(fake: FakeVerbs, no_leaks: LeakCheck, step: str, required: bool) -> None:
    """The server has moved by then: the client comes again, on TCP."""
    fake.fault(f"modify_qp:{step}:ETIMEDOUT", after=1, times=1)
    with Server(port=0) as server:
        if required:
            with pytest.raises(RdmaUnavailable, match=f"ibv_modify_qp to {step}") as caught:
                connect(server.endpoints[0], transport="rdma")
            assert isinstance(caught.value.__cause__, weightwire.WeightwireError)
            return
        with connect(server.endpoints[0]) as connection:
            assert connection.transport["kind"] == "tcp"
            assert f"does not work: ibv_modify_qp to {step}" in str(connection.transport["reason"])
            connection.push(ARRAYS, verify=True)


def server_that_announces(caps: Callable[[], bytes], heard: list[bytes]) -> Callable[[Peer], None]:
    """A server that answers HELLO with ``caps`` and says nothing more, on whatever transport."""

    def script(peer: Peer) -> None:
        assert peer.head() == (14, 24)
        heard.append(peer.take(24))
        peer.answer(hello_answer((7, 0, 0), caps=caps()))
        assert peer.rest() == b"", "after HELLO nothing goes over TCP"

    return script


@pytest.fixture
def bystander(fake: FakeVerbs, tcp_pair: tuple[TcpStream, TcpStream]) -> Iterator[RdmaOffer]:
    """A queue pair that is never activated."""
    offered = offer_rdma(tcp_pair[0])
    yield offered
    offered.close()


def nothing(caps: bytes) -> bytes:
    return struct.pack("<II", 4242, 4242) + bytes(10) + b"\xff\xff\x7f\0\0\1"


def apple(caps: bytes) -> bytes:
    return struct.pack("<IHH16s", 77, 3, 0, bytes(range(16)))


def no_gid(caps: bytes) -> bytes:
    return struct.pack("<II16s", 77, 77, bytes(16))


def itself(caps: bytes) -> bytes:
    return caps


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (nothing, "completion failed"),
        (itself, "the first request was not answered within"),
        (apple, "another layout"),
        (no_gid, "without a GID"),
    ],
)
def test_a_server_that_announces_and_never_activates(
    fake: FakeVerbs,
    bystander: RdmaOffer,
    no_leaks: LeakCheck,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: Callable[[bytes], bytes],
    reason: str,
) -> None:
    monkeypatch.setattr(negotiate, "_TRIAL", 0.3)
    heard: list[bytes] = []
    if answer is itself:
        fake.set("stall", 1)
    again = StandIn()
    with (
        ScriptedServer(server_that_announces(lambda: answer(bystander.caps), heard), again) as scripted,
        connect(scripted.endpoint, timeout=20) as connection,
    ):
        assert any(heard[0])
        assert connection.transport["kind"] == "tcp"
        assert reason in str(connection.transport["reason"])
        lines = [record.getMessage() for record in caplog.records if "does not work" in record.getMessage()]
        assert len(lines) == 1, "said once"
        assert "connecting again on TCP" in lines[0]
        assert fake.get("qps") == 1, "the bystander's"
        connection.push({"a": np.ones(9, np.float32)}, verify=True)
    fake.set("stall", 0)


@pytest.mark.parametrize("answer", [nothing, apple])
def test_required_of_a_server_that_never_activates(
    fake: FakeVerbs, bystander: RdmaOffer, no_leaks: LeakCheck, answer: Callable[[bytes], bytes]
) -> None:
    heard: list[bytes] = []
    with ScriptedServer(server_that_announces(lambda: answer(bystander.caps), heard)) as scripted:
        with pytest.raises(RdmaUnavailable, match="does not work") as caught:
            connect(scripted.endpoint, timeout=20, transport="rdma")
        assert caught.value.__cause__ is not None
    assert len(heard) == 1


def test_a_server_that_goes_on_waiting_there(
    fake: FakeVerbs, bystander: RdmaOffer, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture
) -> None:
    """Stock ones of 4 and 5 do not see that the client has left, and serve nobody else."""
    script = server_that_announces(lambda: nothing(bystander.caps), [])
    with (
        ScriptedServer(script, lambda peer: peer.rest() and None) as scripted,
        pytest.raises(ServerBusy, match=r"does not work: .*; the server may still wait there"),
    ):
        connect(scripted.endpoint, timeout=2.0)  # in which the first answer comes, on a busy machine
    assert "connecting again on TCP" in caplog.text


def test_a_server_that_closes_instead(fake: FakeVerbs, bystander: RdmaOffer, no_leaks: LeakCheck) -> None:
    """Announced, then gone: once more on TCP, and what is wrong there is what is told."""

    def leave(peer: Peer) -> None:
        peer.take(33)
        peer.answer(hello_answer((7, 0, 0), caps=bystander.caps))

    fake.set("stall", 1)
    with ScriptedServer(leave, leave) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        assert "closed the connection" in str(connection.transport["reason"])
        with pytest.raises(PeerClosed):
            connection.barrier()
    fake.set("stall", 0)


# The stock server's refusals, while RDMA is offered.


def test_an_old_server_refuses_the_offer_too(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    heard: list[tuple[int, int]] = []

    def refuse(peer: Peer) -> None:
        heard.append(peer.head())

    with ScriptedServer(refuse, refuse) as scripted, pytest.raises(VersionError):
        connect(scripted.endpoint, timeout=20)
    assert heard == [(14, 24), (14, 0)]


@pytest.mark.parametrize(
    ("answer", "error"), [(b"", TransferTimeout), (bytes(8), ProtocolError), (b"\x1c" + bytes(9), TransferTimeout)]
)
@pytest.mark.usefixtures("connected_at_once")
def test_whatever_hello_brings_the_offer_is_closed(
    fake: FakeVerbs, no_leaks: LeakCheck, answer: bytes, error: type[Exception]
) -> None:
    def script(peer: Peer) -> None:
        peer.take(33)
        peer.send(answer)
        peer.rest()

    with ScriptedServer(script) as scripted, pytest.raises(error):
        connect(scripted.endpoint, timeout=0.3 if error is TransferTimeout else 20)
    assert fake.handles() == {}


# Ends.


def test_the_server_goes(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    with Server(port=0) as server:
        connection = connect(server.endpoints[0], timeout=20, transport="rdma")
    with connection, pytest.raises(PeerClosed):
        connection.barrier()
    assert fake.handles() == {}


def test_a_device_that_vanishes(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    with Server(port=0) as server, connect(server.endpoints[0], timeout=20, transport="rdma") as connection:
        fake.fault("post_send:ENODEV")
        with pytest.raises(weightwire.WeightwireError):
            connection.barrier()
        assert connection.closed


def test_a_queue_pair_that_breaks_names_the_tensor(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    with Server(port=0) as server, connect(server.endpoints[0], timeout=20, transport="rdma") as connection:
        stream = connection._stream
        assert isinstance(stream, RdmaStream)

        def cut(name: str, done: int, total: int) -> None:
            fake.fail_pair(pair_number(stream), RETRY_EXC_ERR)

        with pytest.raises(CompletionError) as caught:
            connection.push({"first": np.ones(1 << 20, np.uint8), "second": np.ones(16 << 20, np.uint8)}, progress=cut)
        assert caught.value.tensor == "second"
        assert 0 < caught.value.bytes_done < 16 << 20
        assert "during SET_TENSOR of tensor 'second'" in caught.value.detail


def test_a_fork_leaves_the_connection_alone(fake: FakeVerbs) -> None:
    with Server(port=0) as server, connect(server.endpoints[0], timeout=20, transport="rdma") as connection:
        before = fake.handles()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                connection.close()
                server.close()
                code = 0 if fake.handles() == before else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        connection.push(ARRAYS, verify=True)


def test_a_wait_ends_with_close(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    """HELLO's stream is watched too: nothing that was opened for it stays behind."""
    before = len(os.listdir("/proc/self/fd"))
    with Server(port=0) as server:
        for _ in range(3):
            with connect(server.endpoints[0], transport="rdma") as connection:
                connection.barrier()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_no_ip_connection_is_offered_nothing() -> None:
    one, other = socket.socketpair()
    with other, TcpStream(one) as stream, pytest.raises(RdmaUnavailable):
        offer_rdma(stream)
