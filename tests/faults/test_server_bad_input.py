"""Every malformed request ends the client that sent it, with one line in the log, and nobody else."""

from __future__ import annotations

import dataclasses
import logging
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from support.leaks import LeakCheck, eventually
from support.raw_client import RawClient

from weightwire.server import Server
from weightwire.wire import COMPUTE_COMMANDS, Command, RpcTensor, dialect_for
from weightwire.wire.types import REMOVED_TYPES

PROTOCOLS = ("2.0", "5.0", "7.0", "8.0")
NBYTES = 1 << 20


@dataclass
class Case:
    """One client about to misbehave: it has a buffer of `NBYTES` bytes and a tensor of 4096 in it."""

    client: RawClient
    buffer: tuple[int, int]
    tensor: RpcTensor

    @property
    def head(self) -> int:
        return self.client.dialect.set_tensor_header_bytes

    def set_head(self, tensor: RpcTensor, offset: int = 0) -> bytes:
        return self.client.dialect.encode_set_tensor(tensor, offset, 0)

    def altered(self, **fields: object) -> RpcTensor:
        return dataclasses.replace(self.tensor, **fields)  # type: ignore[arg-type]


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    text: str = request.param
    return text


@pytest.fixture(params=[True, False], ids=["optimized", "plain"])
def optimized(request: pytest.FixtureRequest) -> bool:
    """Which way the server receives: what is refused is the same."""
    return bool(request.param)


@pytest.fixture
def server(protocol: str, optimized: bool, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> Iterator[Server]:
    caplog.set_level(logging.WARNING, "weightwire")
    with Server(port=0, protocol=protocol, memory=1 << 30, optimized=optimized) as running:
        yield running


Misdeed = Callable[[Case], None]


def check_ends_only_that_client(
    server: Server, protocol: str, misdeed: Misdeed, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with RawClient(server.port, protocol) as other, RawClient(server.port, protocol) as client:
        buffer = client.allocate(NBYTES)
        tensor = client.place("blk.0.weight", 4096, buffer, 8192)
        others = other.allocate(4096)
        kept = other.place("kept", 4096, others)
        other.set(kept, b"\x5a" * 4096)

        misdeed(Case(client, buffer, tensor))
        assert client.closed()

        complaints = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(complaints) == 1, complaints
        assert complaints[0].startswith(f"{client.name}: ")
        assert re.search(expected, complaints[0]), complaints[0]
        # The one that was there goes on, a new one is let in, and the culprit's memory comes back.
        assert other.get(kept) == b"\x5a" * 4096
        with RawClient(server.port, protocol) as fresh:
            assert eventually(lambda: fresh.barrier()[0] == (1 << 30) - 4096)
            again = fresh.place("again", 64, fresh.allocate(64))
            fresh.set(again, bytes(range(64)))
            assert fresh.get(again) == bytes(range(64))
    assert len(caplog.records) == 1


def _double_free(case: Case) -> None:
    case.client.free(case.buffer[0])
    case.client.send(Command.FREE_BUFFER, case.client.dialect.encode_handle(case.buffer[0]))


def _use_after_free(case: Case) -> None:
    case.client.free(case.buffer[0])
    case.client.send(Command.SET_TENSOR, case.set_head(case.tensor), size=case.head + 4096)


def _cut_short(case: Case) -> None:
    case.client.send(Command.SET_TENSOR, case.set_head(case.tensor) + bytes(1000), size=case.head + 4096)
    case.client.finish_sending()


def _head_cut_short(case: Case) -> None:
    case.client.socket.sendall(struct.pack("<BI", Command.SET_TENSOR, 0))
    case.client.finish_sending()


def _wrong_alloc_device(case: Case) -> None:
    case.client.send(Command.ALLOC_BUFFER, struct.pack("<IQ", 1, 64))


def _set(**fields: object) -> Misdeed:
    def misdeed(case: Case) -> None:
        case.client.send(Command.SET_TENSOR, case.set_head(case.altered(**fields)), size=case.head + 4096)

    return misdeed


def _set_range(offset: int, nbytes: int) -> Misdeed:
    def misdeed(case: Case) -> None:
        case.client.send(Command.SET_TENSOR, case.set_head(case.tensor, offset), size=case.head + nbytes)

    return misdeed


def _get_range(offset: int, nbytes: int) -> Misdeed:
    def misdeed(case: Case) -> None:
        case.client.send(Command.GET_TENSOR, case.client.dialect.encode_get_tensor(case.tensor, offset, nbytes))

    return misdeed


def _declared(cmd: Command, size: int, payload: bytes = b"") -> Misdeed:
    return lambda case: case.client.send(cmd, payload, size=size)


def _beyond(before_end: int) -> Misdeed:
    """A tensor of 4096 bytes that starts so many bytes before its buffer's end."""

    def misdeed(case: Case) -> None:
        tensor = case.altered(data=case.buffer[1] + NBYTES - before_end)
        case.client.send(Command.SET_TENSOR, case.set_head(tensor), size=case.head + 1)

    return misdeed


ALL_VERSIONS: dict[str, tuple[Misdeed, str]] = {
    "unknown handle": (_set(buffer=0x1234), r"SET_TENSOR of tensor 'blk.0.weight': no buffer has the handle 0x1234"),
    "null handle": (_set(buffer=0), r"SET_TENSOR .*no buffer has the handle 0x0"),
    "unknown type": (_set(type=250), r"SET_TENSOR of tensor 'blk.0.weight': .*unknown ggml type 250"),
    "type 2^32-1": (_set(type=0xFFFF_FFFF), r"unknown ggml type 4294967295"),
    "removed type": (_set(type=min(REMOVED_TYPES)), r"removed from ggml"),
    "tensor ends past the buffer": (_beyond(4095), r"SET_TENSOR .*of 4096 bytes at 0x\w+ is not within its buffer"),
    "tensor starts past the buffer": (_beyond(-1), r"is not within its buffer"),
    "tensor starts before the buffer": (_beyond(NBYTES + 1), r"is not within its buffer"),
    "tensor at address 0": (_set(data=0), r"is not within its buffer"),
    "tensor at the last address": (_set(data=(1 << 64) - 1), r"is not within its buffer"),
    "tensor larger than the buffer": (_set(ne=(NBYTES + 1, 1, 1, 1)), r"is not within its buffer"),
    "largest possible tensor": (
        _set(ne=(0xFFFF_FFFF,) * 4, nb=(0xFFFF_FFFF,) * 4),
        r"is not within its buffer",
    ),
    "more bytes than the tensor": (_set_range(0, 4097), r"SET_TENSOR .*bytes 0 to 4097 are not in tensor"),
    "more bytes than the tensor, by the offset": (_set_range(1, 4096), r"bytes 1 to 4097 are not in tensor"),
    "offset past the tensor, no bytes": (_set_range(4097, 0), r"bytes 4097 to 4097 are not in tensor"),
    "offset that overflows": (_set_range((1 << 64) - 1, 2), r"are not in tensor"),
    "offset that overflows back into the tensor": (_set_range((1 << 64) - 4096, 4096 + 16), r"are not in tensor"),
    **{
        f"declared size 2^{bits}{'-1' if less else ''}": (
            (lambda size: lambda case: case.client.send(Command.SET_TENSOR, case.set_head(case.tensor), size=size))(
                (1 << bits) - less
            ),
            r"SET_TENSOR .*are not in tensor",
        )
        for bits, less in ((31, 0), (32, 0), (62, 0), (63, 0), (64, 1))
    },
    "request shorter than its header": (
        lambda case: case.client.send(Command.SET_TENSOR, bytes(case.head - 1)),
        r"SET_TENSOR: \d+ bytes declared, and its header alone has \d+",
    ),
    "empty SET_TENSOR": (_declared(Command.SET_TENSOR, 0), r"SET_TENSOR: 0 bytes declared"),
    "client leaves inside the payload": (_cut_short, r"SET_TENSOR of tensor 'blk.0.weight': .*closed.*1000 bytes"),
    "client leaves inside the head": (_head_cut_short, r"SET_TENSOR: .*closed"),
    "double free": (_double_free, r"FREE_BUFFER: no buffer has the handle"),
    "use after free": (_use_after_free, r"SET_TENSOR .*: no buffer has the handle"),
    "unknown command 99": (lambda case: case.client.send(99), r": command 99: protocol \d\.\d has no such command"),
    "unknown command 255": (lambda case: case.client.send(255, size=(1 << 64) - 1), r"command 255"),
    "HELLO again": (
        lambda case: case.client.send(Command.HELLO, bytes(case.client.dialect.hello_request_bytes)),
        r"HELLO: it has been said already",
    ),
    "wrong fixed size": (_declared(Command.BUFFER_GET_BASE, 9, bytes(9)), r"BUFFER_GET_BASE: 9 bytes declared"),
    "fixed size of 2^64-1": (_declared(Command.GET_TENSOR, (1 << 64) - 1), r"GET_TENSOR: 18446744073709551615 bytes"),
    "short ALLOC_BUFFER": (_declared(Command.ALLOC_BUFFER, 4, bytes(4)), r"ALLOC_BUFFER: 4 bytes declared"),
    "base of an unknown handle": (
        lambda case: case.client.send(Command.BUFFER_GET_BASE, case.client.dialect.encode_handle(7)),
        r"BUFFER_GET_BASE: no buffer has the handle 0x7",
    ),
    "clear of an unknown handle": (
        lambda case: case.client.send(Command.BUFFER_CLEAR, case.client.dialect.encode_buffer_clear(7, 0)),
        r"BUFFER_CLEAR: no buffer has the handle 0x7",
    ),
    "read past the tensor": (_get_range(0, 4097), r"GET_TENSOR .*bytes 0 to 4097 are not in tensor"),
    "read of 2^64-1 bytes": (_get_range(0, (1 << 64) - 1), r"GET_TENSOR .*are not in tensor"),
    "read that overflows": (_get_range((1 << 64) - 1, 2), r"GET_TENSOR .*are not in tensor"),
    "hash with an offset past the tensor": (
        lambda case: case.client.send(
            Command.SET_TENSOR_HASH, case.client.dialect.encode_set_tensor_hash(case.tensor, 4097, 1)
        ),
        r"SET_TENSOR_HASH .*are not in tensor",
    ),
    "hash for an unknown handle": (
        lambda case: case.client.send(
            Command.SET_TENSOR_HASH, case.client.dialect.encode_set_tensor_hash(case.altered(buffer=9), 0, 1)
        ),
        r"SET_TENSOR_HASH .*no buffer has the handle 0x9",
    ),
    "init of an unknown handle": (
        lambda case: case.client.send(Command.INIT_TENSOR, case.altered(buffer=9).pack()),
        r"INIT_TENSOR .*no buffer has the handle 0x9",
    ),
    "alloc size of an unknown type": (
        lambda case: case.client.send(
            Command.GET_ALLOC_SIZE, case.client.dialect.encode_alloc_size(0, case.altered(type=77))
        ),
        r"GET_ALLOC_SIZE .*unknown ggml type 77",
    ),
    "copy to a smaller tensor": (
        lambda case: case.client.send(
            Command.COPY_TENSOR,
            case.tensor.pack() + case.client.place("small", 4095, case.buffer).pack(),
        ),
        r"COPY_TENSOR of tensor 'small': tensor 'blk.0.weight' of 4096 bytes copied to 'small' of 4095",
    ),
    "copy from an unknown handle": (
        lambda case: case.client.send(Command.COPY_TENSOR, case.altered(buffer=9).pack() + case.tensor.pack()),
        r"COPY_TENSOR .*no buffer has the handle 0x9",
    ),
    "compute": (
        _declared(Command.GRAPH_COMPUTE, (1 << 64) - 1),
        r"GRAPH_COMPUTE: this server stores weights and does not compute",
    ),
}


def _rows(cmd: Command, offset: int, nbytes: int, n_copies: int, stride: int, data: int | None = None) -> Misdeed:
    def misdeed(case: Case) -> None:
        encode = (
            case.client.dialect.encode_set_tensor_2d
            if cmd is Command.SET_TENSOR_2D
            else case.client.dialect.encode_get_tensor_2d
        )
        head = encode(case.tensor, offset, nbytes, n_copies, stride)
        sent = (nbytes * n_copies if data is None else data) if cmd is Command.SET_TENSOR_2D else 0
        case.client.send(cmd, head, size=min(len(head) + sent, (1 << 64) - 1))

    return misdeed


SINCE: dict[str, tuple[Command, Misdeed, str]] = {
    "second device": (Command.ALLOC_BUFFER, _wrong_alloc_device, r"ALLOC_BUFFER: (device 1|12 bytes declared)"),
    "memset past the tensor": (
        Command.MEMSET_TENSOR,
        lambda case: case.client.send(
            Command.MEMSET_TENSOR, case.client.dialect.encode_memset(case.tensor, 1, 4096, 7)
        ),
        r"MEMSET_TENSOR .*bytes 1 to 4097 are not in tensor",
    ),
    **{
        f"{cmd.name}: {what}": (cmd, _rows(cmd, *numbers), rf"{cmd.name} .*{expected}")
        for cmd in (Command.SET_TENSOR_2D, Command.GET_TENSOR_2D)
        for what, numbers, expected in (
            ("rows past the tensor", (0, 64, 64, 65), "are not in tensor"),
            ("rows that overlap", (0, 64, 2, 63), "overlap"),
            ("2^64-1 rows", (0, 1, (1 << 64) - 1, 0), "overlap"),
            ("a stride that overflows", (0, 16, 2, (1 << 64) - 8), "are not in tensor"),
            ("an offset past the tensor", (4097, 0, 0, 0), "are not in tensor"),
        )
    },
    "SET_TENSOR_2D: fewer bytes than its rows": (
        Command.SET_TENSOR_2D,
        _rows(Command.SET_TENSOR_2D, 0, 64, 2, 128, data=127),
        r"SET_TENSOR_2D .*127 bytes of data for 2 rows of 64",
    ),
    "SET_TENSOR_2D: shorter than its header": (
        Command.SET_TENSOR_2D,
        _declared(Command.SET_TENSOR_2D, 327, bytes(327)),
        r"SET_TENSOR_2D: 327 bytes declared",
    ),
}


@pytest.mark.parametrize("row", ALL_VERSIONS)
def test_every_version(server: Server, protocol: str, row: str, caplog: pytest.LogCaptureFixture) -> None:
    misdeed, expected = ALL_VERSIONS[row]
    check_ends_only_that_client(server, protocol, misdeed, expected, caplog)


@pytest.mark.parametrize("row", SINCE)
def test_what_came_later(server: Server, protocol: str, row: str, caplog: pytest.LogCaptureFixture) -> None:
    cmd, misdeed, expected = SINCE[row]
    if cmd not in dialect_for(protocol).commands:
        check_ends_only_that_client(
            server, protocol, lambda case: case.client.send(cmd), rf": command {cmd:d}: .*no such command", caplog
        )
    else:
        check_ends_only_that_client(server, protocol, misdeed, expected, caplog)


def test_compute_commands_are_all_refused(server: Server, protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    for cmd in sorted(COMPUTE_COMMANDS & dialect_for(protocol).commands):
        caplog.clear()
        check_ends_only_that_client(
            server,
            protocol,
            lambda case, cmd=cmd: case.client.send(cmd),  # type: ignore[misc]
            rf"{cmd.name}: this server stores weights and does not compute",
            caplog,
        )


@pytest.mark.parametrize(
    ("protocol", "number"), [("2.0", 15), ("3.0", 16), ("4.0", 17), ("7.0", 18), ("8.0", 23), ("8.0", 0xE0)]
)
def test_numbers_that_only_other_versions_have(protocol: str, number: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "weightwire")
    with Server(port=0, protocol=protocol) as server, RawClient(server.port, protocol) as client:
        client.send(number)
        assert client.closed()
        assert [record.getMessage() for record in caplog.records] == [
            f"{client.name}: command {number}: protocol {protocol} has no such command; connection closed"
        ]


class TestHello:
    """The first request."""

    @pytest.mark.parametrize("number", [0, 6, 13, 15, 99, 255])
    def test_anything_else_first(
        self, server: Server, protocol: str, number: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        with RawClient(server.port, protocol, hello=False) as client:
            client.send(number)
            assert client.closed()
            assert len(caplog.records) == 1
            assert "the first request must be HELLO" in caplog.text
        with RawClient(server.port, protocol) as client:
            client.barrier()

    @pytest.mark.parametrize("size", [1, 23, 25, 1 << 32, (1 << 64) - 1])
    def test_wrong_size(self, server: Server, protocol: str, size: int, caplog: pytest.LogCaptureFixture) -> None:
        with RawClient(server.port, protocol, hello=False) as client:
            client.send(Command.HELLO, size=size)
            assert client.closed()
            assert len(caplog.records) == 1
            assert f"HELLO: {size} bytes declared" in caplog.text

    def test_the_other_form_is_closed_so_that_a_client_can_find_the_version(
        self, server: Server, protocol: str
    ) -> None:
        other = 24 if protocol == "2.0" else 0
        with RawClient(server.port, protocol, hello=False) as client:
            client.send(Command.HELLO, bytes(other))
            assert client.closed()

    @pytest.mark.parametrize("sent", [0, 1, 5, 9])
    def test_that_does_not_come_is_dropped(self, sent: int, protocol: str, caplog: pytest.LogCaptureFixture) -> None:
        if protocol == "2.0" and sent == 9:
            sent = 8  # nine bytes are all of it there
        caplog.set_level(logging.WARNING, "weightwire")
        with (
            Server(port=0, protocol=protocol, hello_timeout=0.2) as server,
            RawClient(server.port, protocol, hello=False) as client,
        ):
            size = 0 if protocol == "2.0" else 24
            client.socket.sendall(struct.pack("<BQ", Command.HELLO, size)[:sent])
            assert client.closed()
            assert len(caplog.records) == 1
            assert "HELLO: it did not come within 0.2 s" in caplog.text

    def test_that_trickles_in_does_not_gain_time(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING, "weightwire")
        with Server(port=0, hello_timeout=0.5) as server, RawClient(server.port, hello=False) as client:
            client.socket.settimeout(0.1)
            for byte in struct.pack("<BQ", Command.HELLO, 24) + bytes(23):
                try:
                    client.socket.sendall(bytes((byte,)))
                    if client.socket.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            else:
                pytest.fail("32 bytes, one every 0.1 s, were waited for")
            assert "HELLO: it did not come within 0.5 s" in caplog.text

    def test_a_silent_client_does_not_block_others(self, server: Server, protocol: str) -> None:
        with RawClient(server.port, protocol, hello=False) as silent:
            silent.socket.sendall(bytes((Command.HELLO,)))
            with RawClient(server.port, protocol) as client:
                client.barrier()


def test_a_client_that_stalls_within_a_request_is_ended(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "weightwire")
    with Server(port=0, protocol=protocol, stall_timeout=0.2) as server, RawClient(server.port, protocol) as client:
        buffer = client.allocate(NBYTES)
        tensor = client.place("slow", 4096, buffer)
        head = client.dialect.encode_set_tensor(tensor, 0, 0)
        begun = time.monotonic()
        client.send(Command.SET_TENSOR, head + bytes(100), size=len(head) + 4096)
        assert client.closed()
        took = time.monotonic() - begun
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        measured = re.search(r"SET_TENSOR of tensor 'slow': nothing came for (\d+\.\d) s", caplog.text)
        assert measured is not None
        assert 0.2 <= float(measured[1]) <= took + 0.05


def test_between_requests_a_client_may_idle_longer_than_the_stall_timeout(protocol: str) -> None:
    with (
        Server(port=0, protocol=protocol, stall_timeout=0.1, hello_timeout=5) as server,
        RawClient(server.port, protocol) as client,
    ):
        client.socket.settimeout(0.6)
        with pytest.raises(TimeoutError):
            client.socket.recv(1)
        client.socket.settimeout(30)
        client.barrier()


def test_a_half_written_tensor_is_not_served(server: Server, protocol: str) -> None:
    with RawClient(server.port, protocol) as client:
        buffer = client.allocate(NBYTES)
        tensor = client.place("half", 4096, buffer)
        head = client.dialect.encode_set_tensor(tensor, 0, 0)
        client.send(Command.SET_TENSOR, head + bytes(100), size=len(head) + 4096)
        client.finish_sending()
        assert client.closed()
    assert "half" not in server.tensors


def test_no_buffer_of_one_client_is_known_to_another(
    server: Server, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    with RawClient(server.port, protocol) as owner:
        handle, base = owner.allocate(NBYTES)

        def misdeed(case: Case) -> None:
            tensor = case.altered(buffer=handle, data=base)
            case.client.send(Command.GET_TENSOR, case.client.dialect.encode_get_tensor(tensor, 0, 16))

        with RawClient(server.port, protocol) as thief:
            buffer = thief.allocate(64)
            misdeed(Case(thief, buffer, thief.place("x", 64, buffer)))
            assert thief.closed()
        assert len(caplog.records) == 1
        assert f"no buffer has the handle {handle:#x}" in caplog.text
        assert owner.base(handle) == base


@pytest.mark.parametrize("nbytes", [(1 << 30) + 1, 1 << 46, 1 << 60, 1 << 63, (1 << 64) - 1])
def test_too_large_a_buffer_is_refused_in_good_order(
    server: Server, protocol: str, nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with RawClient(server.port, protocol) as client:
        assert client.try_allocate(nbytes) == (0, 0)
        assert client.barrier() == (1 << 30, 1 << 30)
    assert not caplog.records


def test_capacity_that_no_machine_has_is_refused_by_the_system(protocol: str) -> None:
    with Server(port=0, protocol=protocol, memory=1 << 63) as server, RawClient(server.port, protocol) as client:
        for nbytes in (1 << 62, 1 << 50, 1 << 47):
            assert client.try_allocate(nbytes) == (0, 0)
        assert client.barrier() == (1 << 63, 1 << 63)
