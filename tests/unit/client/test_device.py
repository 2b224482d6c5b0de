"""What a server says about its devices is believed only where it can be true."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from support.scripted import Message, ScriptedServer, StandIn

from weightwire import Connection, connect
from weightwire.client.device import MAX_BUFFER
from weightwire.errors import AllocationError, ConfigError, ProtocolError

ALLOC, ALIGNMENT, MAX_SIZE, BASE, MEMORY, DEVICE_COUNT = 0, 1, 2, 3, 11, 15


class Says(StandIn):
    """A server that answers one command as it is told, and the others as it should."""

    def telling(self, command: int, *numbers: int) -> Says:
        self.told = (command, numbers)
        return self

    def serve(self, message: Message) -> bytes | None:
        command, numbers = self.told
        if message.command == command:
            self.requests.append(message)
            layout = "<I" if command == DEVICE_COUNT else f"<{len(numbers)}Q"
            return struct.pack(layout, *numbers)
        return super().serve(message)


def with_server(server: StandIn, call: Callable[[Connection], object]) -> object:
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        return call(connection)


@pytest.mark.parametrize("value", [1, 64, 4096, 1 << 30])
def test_an_alignment(value: int) -> None:
    assert with_server(Says().telling(ALIGNMENT, value), Connection.alignment) == value


@pytest.mark.parametrize("value", [0, 3, 96, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_an_alignment_that_is_none(value: int) -> None:
    with pytest.raises(ProtocolError, match=f"alignment is {value} "):
        with_server(Says().telling(ALIGNMENT, value), Connection.alignment)


def test_a_largest_buffer_of_nothing() -> None:
    with pytest.raises(ProtocolError, match="0 bytes"):
        with_server(Says().telling(MAX_SIZE, 0), Connection.max_size)
    assert with_server(Says().telling(MAX_SIZE, 1), Connection.max_size) == 1


@pytest.mark.parametrize("count", [4097, (1 << 32) - 1])
def test_more_devices_than_anybody_has(count: int) -> None:
    with pytest.raises(ProtocolError, match=f"{count} devices"):
        with_server(Says().telling(DEVICE_COUNT, count), Connection.devices)


def test_no_device_at_all() -> None:
    server = Says().telling(DEVICE_COUNT, 0)
    assert with_server(server, Connection.devices) == []
    with pytest.raises(AllocationError, match="no device"):
        with_server(server, lambda connection: connection.allocate(64))
    assert ALLOC not in server.commands


@pytest.mark.parametrize(("count", "device", "hint"), [(1, 1, "only device 0"), (3, 3, "0 to 2"), (3, -1, "from 0")])
def test_a_device_that_is_not_there_is_not_asked(count: int, device: int, hint: str) -> None:
    server = Says().telling(DEVICE_COUNT, count)
    with pytest.raises(ConfigError) as caught:
        with_server(server, lambda connection: connection.device_memory(device))
    assert hint in caught.value.hint
    assert MEMORY not in server.commands


def test_before_protocol_3_there_is_one_and_nobody_asks() -> None:
    server = StandIn(version=(2, 0, 0))
    # It refuses the newer form of HELLO first, on a connection of its own.
    with ScriptedServer(server, server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        assert connection.device_count() == 1
    assert server.requests == []


@pytest.mark.parametrize("nbytes", [0, -1, MAX_BUFFER + 1, 1 << 64])
def test_sizes_that_are_not_asked_for(nbytes: int) -> None:
    server = StandIn()
    with pytest.raises(ConfigError, match="cannot be allocated"):
        with_server(server, lambda connection: connection.allocate(nbytes))
    assert ALLOC not in server.commands


def test_a_refusal_says_what_is_free_and_the_connection_lives_on() -> None:
    def twice(connection: Connection) -> int:
        with pytest.raises(AllocationError) as caught:
            connection.allocate(5000)
        assert caught.value.nbytes == 5000
        assert "4096 of 4096 bytes are free" in caught.value.hint
        return connection.allocate(4000).nbytes

    assert with_server(StandIn(capacity=4096), twice) == 4000


def test_a_buffer_smaller_than_asked_for() -> None:
    with pytest.raises(ProtocolError, match="asked for 100 bytes and gave a buffer of 99"):
        with_server(Says().telling(ALLOC, 7, 99), lambda connection: connection.allocate(100))


@pytest.mark.parametrize("base", [0, (1 << 64) - 99])
def test_a_base_at_which_no_buffer_can_start(base: int) -> None:
    with pytest.raises(ProtocolError, match="starts at address"):
        with_server(Says().telling(BASE, base), lambda connection: connection.allocate(100))
