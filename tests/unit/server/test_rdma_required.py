"""A server that requires RDMA. On the stand-in libibverbs, in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from support.fakeverbs import FakeVerbs
from support.leaks import LeakCheck
from support.rdma import Offering, request

from weightwire import Server, connect
from weightwire.errors import ConfigError, PeerClosed, RdmaUnavailable, VersionError
from weightwire.transport.tcp import connect_tcp
from weightwire.wire import Command

MAX_SIZE = request(Command.GET_MAX_SIZE, bytes(4))


def test_required_of_the_client(
    fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(port=0, transport="rdma") as server:
        with connect(server.endpoints[0]) as connection:
            assert connection.transport["kind"] == "rdma"
        with pytest.raises(VersionError, match=r"requires RDMA, which was not offered \(TCP was asked for\)"):
            connect(server.endpoints[0], transport="tcp")
        with pytest.raises(VersionError, match=r"not offered \(protocol 3\.6 has no RDMA\)"):
            connect(server.endpoints[0], protocol="3.6")
        monkeypatch.setenv("GGML_RPC_NO_RDMA", "1")
        with pytest.raises(VersionError, match=r"not offered \(GGML_RPC_NO_RDMA is set\)"):
            connect(server.endpoints[0])
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 3, "one for each"
    for line in lines:
        assert "HELLO: RDMA is required here: the client does not offer RDMA; connection closed" in line


def test_a_client_of_an_old_protocol_is_told_of_as_ever(
    fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(port=0, transport="rdma") as server, connect_tcp(server.endpoints[0], 20.0) as tcp:
        tcp.send(request(Command.HELLO, b""))
        assert tcp.recv_or_eof(1) is None
    assert "0 bytes declared, and protocol 7.0 has 24" in caplog.text


def test_required_and_it_goes_on_over_tcp(
    fake: FakeVerbs, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(port=0, transport="rdma") as server:
        client = Offering(server)
        client.tcp.send(MAX_SIZE)
        with pytest.raises(PeerClosed):
            client.tcp.recv(16)
        client.close()
    assert "RDMA is required here: the peer announced RDMA and goes on over TCP" in caplog.text


def without_devices(fake: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.set("devices", 0)


def with_its_port_down(fake: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.set("port_state", 1)


def without_memory(fake: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.set("budget", 64 << 10)


def without_addresses(fake: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in (1, 2, 4):
        fake.gid(index, None)


def switched_off(fake: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_RPC_NO_RDMA", "1")


def with_another_device_named(fake: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_RDMA_DEV", "mlx5_0")


def with_a_gid_named_that_is_empty(fake: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_RDMA_GID", "9")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "localhost"])
@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (without_devices, "this machine has no RDMA device"),
        (with_its_port_down, "port 1 of fake0 is down"),
        (without_memory, "no rings fit"),
        (without_addresses, "no GID of fake0 is the local address"),
        (switched_off, "GGML_RPC_NO_RDMA is set"),
        (with_another_device_named, "no RDMA device 'mlx5_0'"),
        (with_a_gid_named_that_is_empty, "no device has GID 9"),
    ],
)
def test_required_where_nobody_could_be_served(
    fake: FakeVerbs,
    no_leaks: LeakCheck,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    arrange: Callable[[FakeVerbs, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    arrange(fake, monkeypatch)
    with pytest.raises(RdmaUnavailable, match="RDMA is required, and no client could be served") as caught:
        Server(host, 0, transport="rdma").start()
    assert reason in caught.value.reason
    assert caught.value.hint
    assert fake.handles() == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_required_where_somebody_can(fake: FakeVerbs, no_leaks: LeakCheck, host: str) -> None:
    with Server(host, 0, transport="rdma") as server, connect(f"127.0.0.1:{server.port}") as connection:
        assert connection.transport["kind"] == "rdma"


def test_one_address_with_a_device_is_enough(fake: FakeVerbs, no_leaks: LeakCheck) -> None:
    for index in (1, 2):
        fake.gid(index, None)
    with Server("::", 0, transport="rdma") as server:
        with connect(f"[::1]:{server.port}") as connection:
            assert connection.transport["gid"] == "::1"
        with pytest.raises(VersionError, match="requires RDMA"):
            connect(f"127.0.0.1:{server.port}")


@pytest.mark.parametrize("transport", ["auto", "rdma"])
def test_a_variable_that_cannot_be_used(fake: FakeVerbs, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.setenv("GGML_RDMA_GID", "abc")
    with pytest.raises(ConfigError, match="environment variable GGML_RDMA_GID"):
        Server(port=0, transport=transport).start()
    with Server(port=0, transport="tcp") as server:
        with pytest.raises(ConfigError, match="environment variable GGML_RDMA_GID"):
            connect(server.endpoints[0], transport=transport)
        with connect(server.endpoints[0], transport="tcp") as connection:
            connection.barrier()


@pytest.mark.parametrize("protocol", ["1.0", "3.6"])
def test_required_in_a_version_that_has_none(protocol: str) -> None:
    with pytest.raises(ConfigError, match="has no RDMA"):
        Server(protocol=protocol, transport="rdma")
