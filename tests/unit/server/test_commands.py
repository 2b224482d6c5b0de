"""The small commands without a session around them: answers, refusals, and what must not be touched."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from weightwire.errors import ProtocolError
from weightwire.server import commands as module
from weightwire.server.buffers import Buffer, BufferTable
from weightwire.server.capacity import Capacity
from weightwire.server.commands import ALIGNMENT, Commands
from weightwire.server.destinations import Destination, HostMemory
from weightwire.server.errors import BadRequest
from weightwire.server.populate import Populator
from weightwire.server.served import Registry
from weightwire.server.staging import Staging
from weightwire.wire import COMPUTE_COMMANDS, Command, RpcTensor, dialect_for, weight_tensor

DIALECT = dialect_for("8.0")
TOTAL = 1 << 20
ELSEWHERE = (Command.HELLO, Command.SET_TENSOR, Command.SET_TENSOR_2D, Command.SET_TENSOR_HASH)


class Sent:
    """The one thing that `Commands` does with a stream."""

    def __init__(self) -> None:
        self.data = b""

    def send(self, *parts: Any) -> None:
        self.data += b"".join(map(bytes, parts))


class Plain(Destination):
    """Memory that the server cannot reach but through its methods."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.data = bytearray(nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        self.data[offset : offset + view.nbytes] = view

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = self.data[offset : offset + view.nbytes]


class Setup:
    def __init__(self, kind: type[Destination]) -> None:
        self.sent = Sent()
        self.capacity = Capacity(TOTAL)
        self.populator = Populator()
        self.registry = Registry(keep=False, on_tensor=None)
        self.table = BufferTable(
            capacity=self.capacity,
            registry=self.registry,
            populator=self.populator,
            destination=lambda nbytes, device: kind(nbytes),  # type: ignore[call-arg]
        )
        self.commands = Commands(self.sent, DIALECT, self.table, Staging(), self.capacity)  # type: ignore[arg-type]

    def ask(self, command: Command, body: bytes = b"") -> bytes | None:
        return self.commands.handlers[command](body)

    def buffer(self, nbytes: int) -> Buffer:
        made = self.table.allocate(nbytes, 0)
        assert made is not None
        return made

    @staticmethod
    def tensor(buffer: Buffer, name: str, start: int, nbytes: int) -> RpcTensor:
        return weight_tensor(name, 24, (nbytes,), nbytes, buffer=buffer.handle, data=buffer.base + start)

    def fill(self, buffer: Buffer, start: int, data: bytes) -> None:
        buffer.memory.destination.write(start, memoryview(data))

    def content(self, buffer: Buffer) -> bytes:
        into = bytearray(buffer.nbytes)
        buffer.memory.destination.read(0, memoryview(into))
        return bytes(into)


@pytest.fixture(params=[HostMemory, Plain])
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    made = Setup(request.param)
    yield made
    made.table.free_all()
    made.populator.close(5)
    made.registry.close()


def test_every_command_has_a_handler_or_a_place_elsewhere() -> None:
    handlers = set(Setup(HostMemory).commands.handlers)
    assert handlers | set(ELSEWHERE) | COMPUTE_COMMANDS == DIALECT.commands
    assert not handlers & {*ELSEWHERE, *COMPUTE_COMMANDS}


def test_numbers(setup: Setup) -> None:
    assert setup.ask(Command.DEVICE_COUNT) == struct.pack("<I", 1)
    assert setup.ask(Command.GET_ALIGNMENT, bytes(4)) == struct.pack("<Q", ALIGNMENT)
    assert setup.ask(Command.GET_MAX_SIZE, bytes(4)) == b"\xff" * 8
    setup.buffer(4096)
    assert setup.ask(Command.GET_DEVICE_MEMORY, bytes(4)) == struct.pack("<QQ", TOTAL - 4096, TOTAL)


@pytest.mark.parametrize("command", [Command.GET_ALIGNMENT, Command.GET_MAX_SIZE, Command.GET_DEVICE_MEMORY])
@pytest.mark.parametrize("device", [1, (1 << 32) - 1])
def test_there_is_one_device(setup: Setup, command: Command, device: int) -> None:
    with pytest.raises(BadRequest, match=f"device {device}, "):
        setup.ask(command, DIALECT.encode_device(command, device))
    with pytest.raises(BadRequest, match=f"device {device}, "):
        setup.ask(Command.ALLOC_BUFFER, DIALECT.encode_alloc_buffer(device, 64))


def test_what_does_not_fit_is_answered_with_nulls(setup: Setup) -> None:
    for nbytes in (TOTAL + 1, 1 << 63, (1 << 64) - 1):
        assert setup.ask(Command.ALLOC_BUFFER, DIALECT.encode_alloc_buffer(0, nbytes)) == bytes(16)
    assert setup.capacity.free == TOTAL


@pytest.mark.parametrize("command", sorted(Setup(HostMemory).commands.handlers))
def test_a_body_cut_short_is_refused(setup: Setup, command: Command) -> None:
    size = DIALECT.request_bytes(command)
    assert size is not None
    if size:
        with pytest.raises(ProtocolError):
            setup.ask(command, bytes(size - 1))


@pytest.mark.parametrize("command", [Command.BUFFER_GET_BASE, Command.FREE_BUFFER])
def test_handles_nobody_gave(setup: Setup, command: Command) -> None:
    setup.buffer(64)
    for handle in (0, 1, (1 << 64) - 1):
        with pytest.raises(BadRequest):
            setup.ask(command, DIALECT.encode_handle(handle))


def test_reading_sends_head_and_bytes(setup: Setup) -> None:
    buffer = setup.buffer(4096)
    setup.fill(buffer, 100, b"0123456789")
    tensor = setup.tensor(buffer, "w", 100, 10)
    assert setup.ask(Command.GET_TENSOR, DIALECT.encode_get_tensor(tensor, 3, 4)) is None
    assert setup.sent.data == struct.pack("<Q", 4) + b"3456"
    assert setup.commands.tensor == "w"


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 11), (10, 1), (11, 0), (1, (1 << 64) - 1), ((1 << 64) - 1, 1)])
def test_reading_past_the_tensor_sends_nothing(setup: Setup, offset: int, nbytes: int) -> None:
    tensor = setup.tensor(setup.buffer(4096), "w", 100, 10)
    with pytest.raises(BadRequest):
        setup.ask(Command.GET_TENSOR, DIALECT.encode_get_tensor(tensor, offset, nbytes))
    assert setup.sent.data == b""


@pytest.mark.parametrize("stride", [3, 5])
def test_reading_rows(setup: Setup, stride: int) -> None:
    buffer = setup.buffer(4096)
    setup.fill(buffer, 0, bytes(range(20)))
    request = DIALECT.encode_get_tensor_2d(setup.tensor(buffer, "w", 0, 20), 1, 3, 4, stride)
    assert setup.ask(Command.GET_TENSOR_2D, request) is None
    rows = b"".join(bytes(range(1 + stride * row, 4 + stride * row)) for row in range(4))
    assert setup.sent.data == struct.pack("<Q", 12) + rows


@pytest.mark.parametrize(("source", "target"), [(0, 7), (7, 0), (0, 50), (3, 3)])
def test_copying_is_as_if_all_at_once(setup: Setup, monkeypatch: pytest.MonkeyPatch, source: int, target: int) -> None:
    monkeypatch.setattr(module, "_COPY_PIECE", 4)
    monkeypatch.setattr(module, "STAGING_BYTES", 4)
    buffer = setup.buffer(100)
    expected = bytearray(range(100))
    setup.fill(buffer, 0, bytes(expected))
    expected[target : target + 30] = expected[source : source + 30]
    src, dst = setup.tensor(buffer, "src", source, 30), setup.tensor(buffer, "dst", target, 30)
    assert setup.ask(Command.COPY_TENSOR, DIALECT.encode_copy_tensor(src, dst)) == b"\1"
    assert setup.content(buffer) == bytes(expected)


def test_copying_into_less_is_refused_and_changes_nothing(setup: Setup) -> None:
    buffer = setup.buffer(100)
    setup.fill(buffer, 0, bytes(range(100)))
    src, dst = setup.tensor(buffer, "src", 0, 30), setup.tensor(buffer, "dst", 50, 29)
    with pytest.raises(BadRequest, match="'src' of 30 bytes copied to 'dst' of 29"):
        setup.ask(Command.COPY_TENSOR, DIALECT.encode_copy_tensor(src, dst))
    assert setup.content(buffer) == bytes(range(100))


def test_setting_a_range_to_one_value(setup: Setup) -> None:
    buffer = setup.buffer(100)
    setup.fill(buffer, 0, bytes(range(100)))
    tensor = setup.tensor(buffer, "w", 10, 50)
    assert setup.ask(Command.MEMSET_TENSOR, DIALECT.encode_memset(tensor, 5, 20, 0xAB)) == b""
    assert setup.content(buffer) == bytes(range(15)) + b"\xab" * 20 + bytes(range(35, 100))


def test_clearing_a_buffer(setup: Setup) -> None:
    buffer = setup.buffer(100)
    assert setup.ask(Command.BUFFER_CLEAR, DIALECT.encode_buffer_clear(buffer.handle, 7)) == b""
    assert setup.content(buffer) == b"\7" * 100


def test_sizes_of_tensors_that_no_memory_could_hold(setup: Setup) -> None:
    """They can be asked for as far as 64 bits count; nothing is allocated for it."""
    most = (1 << 32) - 1
    one = (most - 1) * most  # what each dimension adds to the four bytes of an element

    def ask(ne: tuple[int, int, int, int]) -> bytes | None:
        tensor = RpcTensor(id=1, type=0, buffer=0, ne=ne, nb=(most,) * 4, name=b"w")
        return setup.ask(Command.GET_ALLOC_SIZE, DIALECT.encode_alloc_size(0, tensor))

    assert ask((most, 1, 1, 1)) == struct.pack("<Q", one + 4)
    with pytest.raises(BadRequest, match=f"'w' spans {2 * one + 4} bytes"):
        ask((most, most, 1, 1))
    assert setup.capacity.free == TOTAL
