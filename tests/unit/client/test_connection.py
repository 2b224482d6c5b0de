"""A connection: what it says about itself and its server, and how it ends."""

from __future__ import annotations

import pytest
from support.scripted import ScriptedServer, StandIn

from weightwire import Connection, Server, connect
from weightwire.errors import TransportError
from weightwire.wire import CACHE_BIT


def test_what_it_says() -> None:
    with ScriptedServer(StandIn(version=(7, 0, 5))) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        assert connection.endpoint == scripted.endpoint
        assert connection.protocol == "7.0.5"
        assert connection.dialect.text == "7.0"
        assert connection.server_has_cache is False
        assert connection.closed is False
        assert repr(connection) == f"<weightwire.Connection to {scripted.endpoint}, protocol 7.0.5>"
        connection.close()
        assert repr(connection).endswith("closed>")


@pytest.mark.parametrize(("flags", "cache"), [(0, False), (CACHE_BIT, True), (0xFF & ~CACHE_BIT, False)])
def test_only_the_cache_bit_says_cache(flags: int, cache: bool) -> None:
    with ScriptedServer(StandIn(flags=flags)) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        assert connection.server_has_cache is cache


def test_the_transport_and_why() -> None:
    with ScriptedServer(StandIn()) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        transport = connection.transport
        assert transport["kind"] == "tcp"
        assert transport["reason"] == "GGML_RPC_NO_RDMA is set"
        assert transport["peer"] == scripted.endpoint
        assert str(transport["local"]).startswith("127.0.0.1:")
        with pytest.raises(TypeError):
            transport["kind"] = "rdma"  # type: ignore[index]


def test_devices_are_counted_once() -> None:
    server = StandIn()
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        assert connection.device_count() == connection.device_count() == 1
        assert [device.device for device in connection.devices()] == [0]
        connection.alignment()
        connection.max_size()
    assert len(server.of(15)) == 1


def test_the_barrier_asks_for_the_alignment() -> None:
    server = StandIn()
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        connection.barrier()
    assert server.commands == [1]


@pytest.mark.parametrize(
    "call",
    [
        Connection.device_count,
        Connection.device_memory,
        Connection.devices,
        Connection.alignment,
        Connection.max_size,
        Connection.barrier,
        lambda connection: connection.allocate(64),
        lambda connection: connection.push({}),
    ],
)
def test_every_call_on_a_closed_connection_says_so(call) -> None:
    with Server(port=0) as server, connect(server.endpoints[0], timeout=20) as connection:
        connection.close()
        connection.close()
        assert connection.closed
        with pytest.raises(TransportError, match="is closed") as caught:
            call(connection)
        assert "connect again" in caught.value.hint
