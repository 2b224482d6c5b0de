from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scripted import ScriptedServer, StandIn

from weightwire import Connection, connect
from weightwire.client.remote import READ_CHUNK
from weightwire.errors import AllocationError, ConfigError, ModelError, ProtocolError, TransportError


@pytest.fixture
def server() -> StandIn:
    return StandIn(capacity=64 << 20)


@pytest.fixture
def connection(server: StandIn) -> Iterator[Connection]:
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        yield connection


def test_ranges_are_written_and_read(connection: Connection, server: StandIn) -> None:
    buffer = connection.allocate(4096)
    tensor = buffer.tensor("t", "f32", (10, 3), offset=256)
    tensor.write(np.arange(30, dtype="f4"))
    tensor.write(b"\xff\xff\xff\xff", offset=4)
    assert tensor.read(0, 8).tobytes() == b"\0\0\0\0\xff\xff\xff\xff"
    assert tensor.read(116).tobytes() == struct.pack("<f", 29.0)
    assert tensor.read().nbytes == 120
    assert tensor.read(120).nbytes == 0
    into = bytearray(12)
    tensor.read_into(into, 8)
    assert into == np.arange(2, 5, dtype="f4").tobytes()
    assert tensor.numpy().shape == (3, 10)
    assert tensor.numpy().dtype == np.float32
    assert all(message.payload[296] == 0 for message in server.of(6)), "ranges never go into the cache"


def test_long_reads_come_in_bounded_answers(connection: Connection, server: StandIn) -> None:
    nbytes = 3 * READ_CHUNK + 5
    tensor = connection.allocate(nbytes).tensor("t", "i8", (nbytes,))
    data = np.random.default_rng(1).bytes(nbytes)
    tensor.write(data)
    assert tensor.read().tobytes() == data
    assert tensor.read(7, 2 * READ_CHUNK).tobytes() == data[7 : 7 + 2 * READ_CHUNK]
    sizes = [struct.unpack_from("<Q", message.payload, 304)[0] for message in server.of(8)]
    assert max(sizes) == READ_CHUNK


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 1), (0, -1), (0, 121), (121, 0), (120, 1), (2**63, 1), (1, 2**64 - 1), (2**64, 0)]
)
def test_ranges_outside_the_tensor_are_never_sent(
    connection: Connection, server: StandIn, offset: int, nbytes: int
) -> None:
    """A stock server aborts on them."""
    tensor = connection.allocate(4096).tensor("t", "f32", (30,))
    before = len(server.requests)
    with pytest.raises(ConfigError, match="not inside tensor 't'"):
        tensor.read(offset, nbytes)
    connection.barrier()
    assert server.commands[before:] == [1]


def test_writes_past_the_tensor_are_never_sent(connection: Connection, server: StandIn) -> None:
    tensor = connection.allocate(4096).tensor("t", "f32", (30,))
    for data, offset in ((bytes(121), 0), (b"x", 120), (b"xx", -1)):
        with pytest.raises(ConfigError):
            tensor.write(data, offset)
    with pytest.raises(ConfigError):
        tensor.read_into(bytearray(121))
    tensor.write(b"", 120)
    connection.barrier()
    assert not server.of(6)


def test_buffers_that_cannot_be_used(connection: Connection) -> None:
    tensor = connection.allocate(4096).tensor("t", "i8", (8, 8))
    with pytest.raises(ConfigError, match="contiguous"):
        tensor.write(np.zeros((8, 8), np.uint8)[:, ::2])
    with pytest.raises(ConfigError, match="read-only"):
        tensor.read_into(bytes(8))
    with pytest.raises(ConfigError, match="no bytes"):
        tensor.write(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "ne", "offset"),
    [
        ("f32", (1025,), 0),
        ("f32", (1024,), 1),
        ("f32", (4,), -16),
        ("f32", (4,), 4096),
        ("i8", (2**63, 4), 0),
        ("q4_0", (33,), 0),
        ("q9_9", (32,), 0),
        (4, (32,), 0),
        (999, (32,), 0),
        ("f32", (-4, -4), 0),
        ("f32", (1,), 1.0),
        ("f32", (1,), "0"),
        ("f32", (1,), None),
        ("f32", (1,), True),
        ("f32", (1.0,), 0),
        ("f32", "1", 0),
        ("f32", 1, 0),
        ("f32", None, 0),
        (0.0, (1,), 0),
        (None, (1,), 0),
        ([], (1,), 0),
    ],
)
def test_tensors_that_cannot_be(connection: Connection, kind: int | str, ne: tuple[int, ...], offset: int) -> None:
    with pytest.raises(ConfigError):
        connection.allocate(4096).tensor("t", kind, ne, offset)
    connection.barrier()


@pytest.mark.parametrize("name", [None, 5, b"t"])
def test_names_that_are_no_text(connection: Connection, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        connection.allocate(4096).tensor(name, "f32", (1,))


@pytest.mark.parametrize("bad", [1.0, "1", None, True])
def test_offsets_that_are_no_whole_numbers(connection: Connection, server: StandIn, bad: int) -> None:
    """Refused before anything is sent, so that the connection stays."""
    tensor = connection.allocate(4096).tensor("t", "f32", (30,))
    before = len(server.requests)
    for use in (
        lambda: tensor.read(bad),
        lambda: tensor.read(0, 1.0),  # type: ignore[arg-type]
        lambda: tensor.read_into(bytearray(1), bad),
        lambda: tensor.write(b"x", bad),
    ):
        with pytest.raises(ConfigError, match="whole number"):
            use()
    connection.barrier()
    assert server.commands[before:] == [1]


def test_whole_numbers_of_numpy(connection: Connection) -> None:
    tensor = connection.allocate(np.int64(4096)).tensor("t", np.int8(0), np.array([5, 2]), np.uint32(64))  # type: ignore[arg-type]
    assert (tensor.ne, tensor.nbytes, tensor.offset) == ((5, 2), 40, 64)
    assert type(tensor.nbytes) is int
    tensor.write(b"abc", np.int16(4))
    assert tensor.read(np.int64(5), np.uint8(2)).tobytes() == b"bc"


def test_types_without_numpy(connection: Connection) -> None:
    tensor = connection.allocate(4096).tensor("t", "q4_K", (256,))
    assert tensor.nbytes == 144
    with pytest.raises(ConfigError, match="q4_K"):
        tensor.numpy()
    assert tensor.read().nbytes == 144


def test_free_gives_memory_back_once(connection: Connection, server: StandIn) -> None:
    buffer = connection.allocate(4096)
    tensor = buffer.tensor("t", "f32", (4,))
    buffer.free()
    buffer.free()
    connection.barrier()
    assert server.freed == [buffer.handle]
    assert buffer.freed
    for use in (tensor.read, tensor.numpy, lambda: tensor.write(b"x"), lambda: buffer.tensor("u", "f32", (1,))):
        with pytest.raises(ConfigError, match="freed"):
            use()


def test_after_close_everything_says_so(connection: Connection) -> None:
    buffer = connection.allocate(4096)
    tensor = buffer.tensor("t", "f32", (4,))
    connection.close()
    connection.close()
    assert connection.closed
    buffer.free()
    for use in (
        tensor.read,
        connection.barrier,
        connection.devices,
        lambda: tensor.write(b"x"),
        lambda: connection.push({}),
    ):
        with pytest.raises(TransportError, match="is closed"):
            use()


@pytest.mark.parametrize("nbytes", [0, -1, 2**63, 2**64, 1.5, "1", None, True])
def test_sizes_that_cannot_be_allocated_are_not_asked_for(connection: Connection, server: StandIn, nbytes: int) -> None:
    with pytest.raises(ConfigError, match="nbytes"):
        connection.allocate(nbytes)
    assert 0 not in server.commands


def test_a_server_without_memory(connection: Connection, server: StandIn) -> None:
    held = connection.allocate(60 << 20)
    with pytest.raises(AllocationError, match="device 0") as caught:
        connection.allocate(5 << 20)
    assert caught.value.nbytes == 5 << 20
    assert str(4 << 20) in caught.value.hint
    assert str(64 << 20) in caught.value.hint
    held.free()
    assert connection.allocate(5 << 20).nbytes == 5 << 20


@pytest.mark.parametrize("device", [1, -1, 2**32, "0", 0.0, False, None])
def test_devices_that_are_not_there(connection: Connection, device: int) -> None:
    for use in (connection.alignment, connection.max_size, connection.device_memory):
        with pytest.raises(ConfigError, match="device"):
            use(device)
    with pytest.raises(ConfigError, match="device"):
        connection.allocate(1, device)


def devices_of(server: StandIn, count: int) -> None:
    """Make ``server`` say that it has so many devices."""
    serve = server.serve
    server.serve = lambda message: struct.pack("<I", count) if message.command == 15 else serve(message)  # type: ignore[method-assign]


def test_a_server_without_devices(connection: Connection, server: StandIn) -> None:
    """Nobody chose a device that is not there: the server has none."""
    devices_of(server, 0)
    for use in (
        connection.alignment,
        connection.device_memory,
        lambda: connection.allocate(1),
        lambda: connection.push({"w": np.ones(1)}),
    ):
        with pytest.raises(AllocationError, match="has no device") as caught:
            use()
        assert caught.value.hint
    assert connection.devices() == []
    assert set(server.commands) == {15}
    assert not connection.closed


@pytest.mark.parametrize("count", [4097, 2**32 - 1])
def test_more_devices_than_can_be(connection: Connection, server: StandIn, count: int) -> None:
    """Each would be asked about; a server must not keep us busy for ever."""
    devices_of(server, count)
    with pytest.raises(ProtocolError, match=f"{count} devices"):
        connection.devices()
    assert connection.closed
    assert server.commands == [15]


@pytest.mark.parametrize("protocol", [(2, 0, 0), (7, 0, 0)])
def test_devices(protocol: tuple[int, int, int]) -> None:
    server = StandIn(protocol, capacity=1000, alignment=32)
    with ScriptedServer(server, server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        connection.allocate(100)
        assert connection.device_count() == 1
        assert connection.devices() == [(0, 900, 1000)]
        assert connection.device_memory() == (900, 1000)
        assert connection.alignment() == 32
        assert connection.max_size() == 2**64 - 1
        assert connection.transport["kind"] == "tcp"
        assert connection.transport["peer"] == scripted.endpoint
        assert connection.transport["reason"]


@pytest.mark.parametrize("alignment", [0, 3, 2**63])
def test_alignments_that_make_no_sense(server: StandIn, connection: Connection, alignment: int) -> None:
    server.alignment = alignment
    with pytest.raises(ProtocolError, match="alignment"):
        connection.push({"w": np.ones(4, "f4")})
    assert connection.closed
    assert 0 not in server.commands


def test_a_maximum_of_zero(server: StandIn, connection: Connection) -> None:
    server.max_size = 0
    with pytest.raises(ProtocolError, match="0 bytes"):
        connection.max_size()


@pytest.mark.parametrize("dtype", ["datetime64[s]", [("O", "<f4"), ("b", "<i4")]])
def test_any_dtype_is_written_as_its_bytes(connection: Connection, dtype: object) -> None:
    array = np.arange(16, dtype="<i8").view(np.dtype(dtype))  # type: ignore[call-overload]
    tensor = connection.allocate(4096).tensor("t", "i8", (128,))
    tensor.write(array)
    assert tensor.read().tobytes() == array.tobytes()
    into = np.zeros_like(array)
    tensor.read_into(into)
    assert into.tobytes() == array.tobytes()
    with pytest.raises(ConfigError, match="not contiguous"):
        tensor.write(array[::2])


@pytest.mark.parametrize(
    "buffer",
    [
        np.arange(4, dtype=">f4"),
        np.arange(4).astype(">M8[s]"),
        np.arange(2, dtype=">c8"),
        np.arange(4, dtype="<f4").astype(">f4").data,
        (ctypes.c_uint16.__ctype_be__ * 4)(1, 2, 3, 4),
    ],
    ids=["f4", "M8", "c8", "memoryview", "ctypes"],
)
def test_big_endian_numbers_are_refused_rather_than_taken_for_others(
    connection: Connection, server: StandIn, buffer: Any
) -> None:
    tensor = connection.allocate(4096).tensor("t", "i8", (128,))
    for call in (tensor.write, tensor.read_into):
        with pytest.raises(ConfigError, match="big-endian") as caught:
            call(buffer)
        assert "astype" in caught.value.hint
    assert not server.of(6)
    bare = np.asarray(buffer).view(np.uint8)
    tensor.write(bare)
    assert tensor.read(0, bare.nbytes).tobytes() == bare.tobytes()


def test_what_has_no_byte_order_and_structs_are_bytes(connection: Connection) -> None:
    tensor = connection.allocate(4096).tensor("t", "i8", (128,))
    for array in (np.arange(4, dtype=">u1"), np.array([b"ab"]), np.array([(1, 2)], [("a", ">f4"), ("b", ">u2")])):
        tensor.write(array)
        assert tensor.read(0, array.nbytes).tobytes() == array.tobytes()


def test_objects_are_no_bytes(connection: Connection) -> None:
    tensor = connection.allocate(4096).tensor("t", "i8", (128,))
    for array in (np.zeros(16, object), np.zeros(8, [("a", object), ("b", "<i8")])):
        with pytest.raises(ConfigError, match="Python objects"):
            tensor.write(array)


@pytest.mark.parametrize("mode", ["r", "c"])
def test_what_lies_in_a_mapped_file_is_read_by_position(connection: Connection, tmp_path: Path, mode: Any) -> None:
    """So that one which is cut short is an error, and not the end of the process."""
    path = tmp_path / "bytes"
    data = np.random.default_rng(3).bytes(3 * mmap.PAGESIZE)
    path.write_bytes(data)
    mapped = np.memmap(path, np.uint8, mode)
    tensor = connection.allocate(1 << 16).tensor("t", "i8", (len(data),))
    tensor.write(mapped)
    tensor.write(mapped[:100], offset=50)
    assert tensor.read().tobytes() == data[:50] + data[:100] + data[150:]
    os.truncate(path, mmap.PAGESIZE)
    with pytest.raises((ModelError, TransportError)):
        tensor.write(mapped)
