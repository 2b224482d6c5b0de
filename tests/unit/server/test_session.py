"""The weight path in every version, as a client sees it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.leaks import LeakCheck
from support.raw_client import RawClient

from weightwire.server import ServedTensor, Server
from weightwire.wire import DIALECTS, Command, RpcTensor

VERSIONS = [dialect.text for dialect in DIALECTS.values()]
MEMORY = 1 << 26


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    text: str = request.param
    return text


@pytest.fixture
def server(version: str, no_leaks: LeakCheck) -> Iterator[Server]:
    with Server(port=0, protocol=version, memory=MEMORY) as running:
        yield running


@pytest.fixture
def client(server: Server, version: str) -> Iterator[RawClient]:
    with RawClient(server.port, version) as connected:
        yield connected


def data(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.mark.parametrize("cached", [False, True])
def test_hello_says_the_version_and_from_4_on_whether_there_is_a_cache(
    version: str, cached: bool, tmp_path: Path, no_leaks: LeakCheck
) -> None:
    major, minor = (int(part) for part in version.split("."))
    with (
        Server(port=0, protocol=f"{version}.2", cache=tmp_path if cached else None) as server,
        RawClient(server.port, version) as client,
    ):
        expected = bytes((major, minor, 2))
        if major >= 4:
            expected += bytes((1 if cached else 0,)) + bytes(24)
        assert client.greeting == expected


def test_whole_path(server: Server, client: RawClient) -> None:
    assert client.barrier() == (MEMORY, MEMORY)
    assert client.number(Command.GET_ALIGNMENT) == 64
    assert client.number(Command.GET_MAX_SIZE) == (1 << 64) - 1
    buffer = client.allocate(1 << 20)
    assert client.barrier() == (MEMORY - (1 << 20), MEMORY)
    tensor = client.place("w", 3000, buffer, 128, type_code=0, ne=(25, 30))
    client.tell(Command.INIT_TENSOR, tensor.pack())
    payload = data(3000)
    client.set(tensor, payload)
    assert client.get(tensor) == payload
    assert client.get(tensor, 1000, 7) == payload[1000:1007]
    assert client.get(tensor, 3000, 0) == b""
    client.set(tensor, b"patch", 2995)
    assert client.get(tensor) == payload[:2995] + b"patch"
    served = server.tensors["w"]
    assert served.shape == (30, 25)
    assert served.type_name == "f32"
    assert bytes(served.view()) == payload[:2995] + b"patch"
    client.free(buffer[0])
    assert client.barrier()[1] == MEMORY
    assert "w" not in server.tensors


def test_memory_is_zero_at_first_and_can_be_cleared(client: RawClient) -> None:
    buffer = client.allocate(10_000)
    whole = client.place("w", 10_000, buffer)
    client.tell(Command.BUFFER_CLEAR, client.dialect.encode_buffer_clear(buffer[0], 0))
    assert client.get(whole) == bytes(10_000)
    client.tell(Command.BUFFER_CLEAR, client.dialect.encode_buffer_clear(buffer[0], 0x77))
    assert client.get(whole) == b"\x77" * 10_000
    client.tell(Command.BUFFER_CLEAR, client.dialect.encode_buffer_clear(buffer[0], 0))
    assert client.get(whole) == bytes(10_000)


def test_clearing_unlists(server: Server, client: RawClient) -> None:
    buffer = client.allocate(100)
    client.set(client.place("w", 100, buffer), data(100))
    client.barrier()
    assert "w" in server.tensors
    client.tell(Command.BUFFER_CLEAR, client.dialect.encode_buffer_clear(buffer[0], 0))
    client.barrier()
    assert "w" not in server.tensors


def test_an_empty_buffer(client: RawClient) -> None:
    handle, nbytes = client.try_allocate(0)
    assert handle
    assert nbytes == 0
    assert client.base(handle) == 0
    client.tell(Command.BUFFER_CLEAR, client.dialect.encode_buffer_clear(handle, 5))
    client.free(handle)
    client.barrier()


def test_no_bytes_into_a_tensor(client: RawClient) -> None:
    tensor = client.place("w", 100, client.allocate(100))
    client.set(tensor, b"", 100)
    client.set(tensor, b"")
    assert client.get(tensor) == bytes(100)


def test_a_tensor_in_the_last_bytes_of_its_buffer(client: RawClient) -> None:
    buffer = client.allocate(1000)
    tensor = client.place("end", 100, buffer, 900)
    client.set(tensor, data(100))
    assert client.get(tensor) == data(100)


@pytest.mark.parametrize(("source", "target"), [(0, 2000), (0, 300), (300, 0), (5, 5)])
def test_copy_also_where_both_overlap(client: RawClient, source: int, target: int) -> None:
    buffer = client.allocate(4096)
    src, dst = client.place("src", 1000, buffer, source), client.place("dst", 1000, buffer, target)
    client.set(src, data(1000))
    assert client.ask(Command.COPY_TENSOR, client.dialect.encode_copy_tensor(src, dst)) == b"\1"
    assert client.get(dst) == data(1000)


def test_copy_of_many_pieces_within_and_across_buffers(
    client: RawClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightwire.server.commands._COPY_PIECE", 64)
    one, two = client.allocate(4096), client.allocate(4096)
    src = client.place("src", 1000, one)
    for dst in (client.place("near", 1000, one, 100), client.place("far", 1000, two, 8)):
        client.set(src, data(1000, 9))
        assert client.ask(Command.COPY_TENSOR, client.dialect.encode_copy_tensor(src, dst)) == b"\1"
        assert client.get(dst) == data(1000, 9)
        assert dst.label in server.tensors


@pytest.mark.parametrize(
    ("code", "ne", "expected"), [(0, (10, 3), 120), (12, (256, 4), 576), (2, (32,), 18), (24, (5,), 5)]
)
def test_alloc_size_is_the_tensors_own(client: RawClient, code: int, ne: tuple[int, ...], expected: int) -> None:
    from weightwire.wire import weight_tensor

    for handle in (0, 0x4242):  # not in a buffer yet, or in another server's
        tensor = weight_tensor("w", code, ne, expected, buffer=handle, data=0)
        answer = client.ask(Command.GET_ALLOC_SIZE, client.dialect.encode_alloc_size(0, tensor))
        assert int.from_bytes(answer, "little") == expected


def test_init_of_a_tensor_without_a_buffer(client: RawClient) -> None:
    tensor = RpcTensor(id=1, type=12, buffer=0, ne=(256, 1, 1, 1), nb=(144, 144, 144, 144))
    client.tell(Command.INIT_TENSOR, tensor.pack())
    client.barrier()


def test_one_device(client: RawClient) -> None:
    if client.dialect.device_count:
        assert client.ask(Command.DEVICE_COUNT) == (1).to_bytes(4, "little")


def test_pipelined_requests_are_answered_in_order(client: RawClient) -> None:
    buffer = client.allocate(1 << 16)
    tensors = [client.place(f"t{index}", 64, buffer, index * 64) for index in range(500)]
    sent = b""
    for index, tensor in enumerate(tensors):
        for cmd, payload in (
            (Command.SET_TENSOR, client.dialect.encode_set_tensor(tensor, 0, 0) + data(64, index)),
            (Command.GET_TENSOR, client.dialect.encode_get_tensor(tensor, 0, 64)),
        ):
            sent += bytes((cmd,)) + len(payload).to_bytes(8, "little") + payload
    client.socket.sendall(sent)
    for index in range(500):
        if client.dialect.answered(Command.SET_TENSOR):
            assert client.answer() == b""
        assert client.answer() == data(64, index)


class TestMemset:
    """MEMSET_TENSOR, from protocol 5."""

    @pytest.fixture(params=["5.0", "5.1", "6.0", "7.0", "8.0"])
    def version(self, request: pytest.FixtureRequest) -> str:
        text: str = request.param
        return text

    def test_sets_counts_as_written_and_takes_no_bytes(self, server: Server, client: RawClient) -> None:
        tensor = client.place("w", 1000, client.allocate(2000), 500)
        client.tell(Command.MEMSET_TENSOR, client.dialect.encode_memset(tensor, 100, 900, 0xAA))
        assert client.get(tensor) == bytes(100) + b"\xaa" * 900
        assert "w" not in server.tensors
        client.tell(Command.MEMSET_TENSOR, client.dialect.encode_memset(tensor, 0, 100, 0))
        client.tell(Command.MEMSET_TENSOR, client.dialect.encode_memset(tensor, 1000, 0, 1))
        client.barrier()
        assert "w" in server.tensors


class TestRows:
    """SET_TENSOR_2D and GET_TENSOR_2D, protocol 8."""

    @pytest.fixture
    def version(self) -> str:
        return "8.0"

    @pytest.mark.parametrize(
        ("row", "rows", "stride"),
        [(1, 1, 0), (1, 500, 7), (3, 100, 3), (100, 30, 120), (40_000, 5, 50_000), (40_000, 1, 0), (5000, 400, 5001)],
    )
    def test_there_and_back(self, server: Server, client: RawClient, row: int, rows: int, stride: int) -> None:
        offset = 11
        nbytes = offset + (rows - 1) * stride + row + 5
        tensor = client.place("w", nbytes, client.allocate(nbytes))
        payload = data(row * rows)
        head = client.dialect.encode_set_tensor_2d(tensor, offset, row, rows, stride)
        client.tell(Command.SET_TENSOR_2D, head + payload)
        model = bytearray(nbytes)
        for index in range(rows):
            at = offset + index * stride
            model[at : at + row] = payload[index * row : (index + 1) * row]
        assert client.get(tensor) == model
        back = client.ask(Command.GET_TENSOR_2D, client.dialect.encode_get_tensor_2d(tensor, offset, row, rows, stride))
        assert back == payload

    @pytest.mark.parametrize(("row", "rows", "stride"), [(0, 5, 10), (5, 0, 10), (0, (1 << 64) - 1, 0)])
    def test_no_bytes(self, client: RawClient, row: int, rows: int, stride: int) -> None:
        tensor = client.place("w", 100, client.allocate(100))
        client.tell(Command.SET_TENSOR_2D, client.dialect.encode_set_tensor_2d(tensor, 100, row, rows, stride))
        encoded = client.dialect.encode_get_tensor_2d(tensor, 100, row, rows, stride)
        assert client.ask(Command.GET_TENSOR_2D, encoded) == b""

    def test_rows_that_fill_a_tensor_complete_it(self, server: Server, client: RawClient) -> None:
        tensor = client.place("w", 100, client.allocate(100))
        for offset in (0, 5):
            assert "w" not in server.tensors
            head = client.dialect.encode_set_tensor_2d(tensor, offset, 5, 10, 10)
            client.tell(Command.SET_TENSOR_2D, head + data(50, offset))
            client.barrier()
        assert "w" in server.tensors


def test_on_tensor_comes_once_per_tensor_and_before_the_next_answer(version: str, no_leaks: LeakCheck) -> None:
    told: list[ServedTensor] = []
    with (
        Server(port=0, protocol=version, on_tensor=told.append) as server,
        RawClient(server.port, version) as client,
    ):
        buffer = client.allocate(1 << 16)
        first, second = client.place("first", 100, buffer), client.place("second", 100, buffer, 128)
        client.set(first, data(100))
        client.barrier()
        assert [tensor.name for tensor in told] == ["first"]
        client.set(second, data(50, 1))
        client.set(second, data(50, 2), 50)
        client.set(first, data(100, 3))
        client.barrier()
        assert [tensor.name for tensor in told] == ["first", "second"]
        assert bytes(told[1].view()) == data(50, 1) + data(50, 2)
