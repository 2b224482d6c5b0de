import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from weightwire.errors import ConfigError, ProtocolError
from weightwire.wire.commands import Command
from weightwire.wire.dialect import DIALECTS, Dialect
from weightwire.wire.tensor import RpcTensor, weight_tensor

EVERY = list(DIALECTS.values())
PREFIXED = [dialect for dialect in EVERY if dialect.version >= (3, 0)]
SINGLE = [dialect for dialect in EVERY if dialect.version < (3, 0)]
LATEST = DIALECTS[8, 0]

A = weight_tensor("a", 0, (4, 4), 64, buffer=11, data=0x1000)
B = weight_tensor("b", 12, (256, 2), 288, buffer=12, data=0x2000, id=2)
T = A.pack()

dialects = st.sampled_from(EVERY)
u64 = st.integers(0, 2**64 - 1)
u64_borders = st.sampled_from([0, 2**31, 2**32, 2**63, 2**64 - 1]) | u64
byte = st.integers(0, 255)


def ids(dialect: Dialect) -> str:
    return dialect.text


def q(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def device(number: int) -> bytes:
    return struct.pack("<I", number)


# Golden bytes.


@pytest.mark.parametrize("dialect", SINGLE, ids=ids)
def test_one_device_golden(dialect: Dialect) -> None:
    assert dialect.encode_alloc_buffer(0, 5) == q(5)
    assert dialect.encode_device(Command.GET_ALIGNMENT, 0) == b""
    assert dialect.encode_alloc_size(0, A) == T


@pytest.mark.parametrize("dialect", PREFIXED, ids=ids)
def test_device_prefix_golden(dialect: Dialect) -> None:
    assert dialect.encode_alloc_buffer(3, 5) == device(3) + q(5)
    for cmd in (Command.GET_ALIGNMENT, Command.GET_MAX_SIZE, Command.GET_DEVICE_MEMORY):
        assert dialect.encode_device(cmd, 3) == bytes([3, 0, 0, 0])
    sources = bytes(2960) if dialect.version >= (3, 6) else b""
    assert dialect.encode_alloc_size(3, A) == device(3) + T + sources


@pytest.mark.parametrize("dialect", EVERY, ids=ids)
def test_golden_in_every_version(dialect: Dialect) -> None:
    assert dialect.encode_handle(0x0102030405060708) == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert dialect.encode_buffer_clear(1, 0xAB) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 0xAB])
    assert dialect.encode_set_tensor_hash(A, 1, 2) == T + q(1, 2)
    assert dialect.encode_get_tensor(A, 1, 2) == T + q(1, 2)
    assert dialect.encode_copy_tensor(A, B) == T + B.pack()
    assert dialect.encode_init_tensor(A) == T
    flag = b"\x01" if dialect.version >= (7, 0) else b""
    assert dialect.encode_set_tensor(A, 0x1122, 1) == T + flag + q(0x1122)


@pytest.mark.parametrize("version", [(5, 0), (5, 1), (6, 0), (7, 0), (8, 0)])
def test_memset_golden(version: tuple[int, int]) -> None:
    assert DIALECTS[version].encode_memset(A, 1, 2, 3) == T + q(1, 2) + b"\x03"


def test_2d_golden() -> None:
    assert LATEST.encode_set_tensor_2d(A, 1, 2, 3, 4) == T + q(1, 2, 3, 4)
    assert LATEST.encode_get_tensor_2d(A, 1, 2, 3, 4) == T + q(1, 2, 3, 4)


# Round trips.


@given(dialects, st.integers(0, 2**32 - 1), u64_borders)
def test_device_round_trips(dialect: Dialect, number: int, nbytes: int) -> None:
    number = number if dialect.device_prefix else 0
    alloc = dialect.decode_alloc_buffer(dialect.encode_alloc_buffer(number, nbytes))
    assert (alloc.device, alloc.nbytes) == (number, nbytes)
    for cmd in (Command.GET_ALIGNMENT, Command.GET_MAX_SIZE, Command.GET_DEVICE_MEMORY):
        assert dialect.decode_device(cmd, dialect.encode_device(cmd, number)).device == number
    size = dialect.decode_alloc_size(dialect.encode_alloc_size(number, B))
    assert (size.device, size.tensor) == (number, B)


@given(dialects, u64_borders, u64_borders, byte)
def test_tensor_round_trips(dialect: Dialect, first: int, second: int, value: int) -> None:
    assert dialect.decode_handle(dialect.encode_handle(first)).handle == first
    clear = dialect.decode_buffer_clear(dialect.encode_buffer_clear(first, value))
    assert (clear.handle, clear.value) == (first, value)
    put = dialect.decode_set_tensor(dialect.encode_set_tensor(A, first, value))
    assert (put.tensor, put.offset, put.cache_flag) == (A, first, value if dialect.cache_flag else 0)
    asked = dialect.decode_set_tensor_hash(dialect.encode_set_tensor_hash(A, first, second))
    assert (asked.tensor, asked.offset, asked.hash) == (A, first, second)
    got = dialect.decode_get_tensor(dialect.encode_get_tensor(A, first, second))
    assert (got.tensor, got.offset, got.nbytes) == (A, first, second)
    copied = dialect.decode_copy_tensor(dialect.encode_copy_tensor(A, B))
    assert (copied.src, copied.dst) == (A, B)
    assert dialect.decode_init_tensor(dialect.encode_init_tensor(B)).tensor == B
    if Command.MEMSET_TENSOR in dialect.commands:
        memset = dialect.decode_memset(dialect.encode_memset(A, first, second, value))
        assert (memset.tensor, memset.offset, memset.nbytes, memset.value) == (A, first, second, value)


@given(u64_borders, u64_borders, u64_borders, u64_borders)
def test_2d_round_trips(offset: int, nbytes: int, n_copies: int, stride: int) -> None:
    put = LATEST.decode_set_tensor_2d(LATEST.encode_set_tensor_2d(A, offset, nbytes, n_copies, stride))
    got = LATEST.decode_get_tensor_2d(LATEST.encode_get_tensor_2d(A, offset, nbytes, n_copies, stride))
    for found in (put, got):
        assert found == (A, offset, nbytes, n_copies, stride)
        assert (found.offset, found.nbytes, found.n_copies, found.stride) == (offset, nbytes, n_copies, stride)


def test_decoders_take_a_memoryview() -> None:
    wire = memoryview(LATEST.encode_set_tensor(A, 2**40, 1))
    assert LATEST.decode_set_tensor(wire).offset == 2**40
    assert LATEST.decode_alloc_buffer(memoryview(LATEST.encode_alloc_buffer(1, 2))) == (1, 2)


@given(dialects, st.data())
def test_a_decoder_takes_any_bytes_of_the_right_length(dialect: Dialect, data: DataObject) -> None:
    """Hostile numbers are only numbers here, and come back unchanged."""
    length = dialect.set_tensor_header_bytes
    wire = data.draw(st.binary(min_size=length, max_size=length))
    put = dialect.decode_set_tensor(wire)
    assert dialect.encode_set_tensor(put.tensor, put.offset, put.cache_flag) == wire


# Wrong lengths.

Decoder = Callable[[Dialect, bytes], object]

DECODERS: dict[Command, Decoder] = {
    Command.ALLOC_BUFFER: lambda d, p: d.decode_alloc_buffer(p),
    Command.GET_ALIGNMENT: lambda d, p: d.decode_device(Command.GET_ALIGNMENT, p),
    Command.GET_MAX_SIZE: lambda d, p: d.decode_device(Command.GET_MAX_SIZE, p),
    Command.GET_DEVICE_MEMORY: lambda d, p: d.decode_device(Command.GET_DEVICE_MEMORY, p),
    Command.BUFFER_GET_BASE: lambda d, p: d.decode_handle(p),
    Command.FREE_BUFFER: lambda d, p: d.decode_handle(p),
    Command.BUFFER_CLEAR: lambda d, p: d.decode_buffer_clear(p),
    Command.SET_TENSOR: lambda d, p: d.decode_set_tensor(p),
    Command.SET_TENSOR_HASH: lambda d, p: d.decode_set_tensor_hash(p),
    Command.GET_TENSOR: lambda d, p: d.decode_get_tensor(p),
    Command.COPY_TENSOR: lambda d, p: d.decode_copy_tensor(p),
    Command.INIT_TENSOR: lambda d, p: d.decode_init_tensor(p),
    Command.GET_ALLOC_SIZE: lambda d, p: d.decode_alloc_size(p),
    Command.MEMSET_TENSOR: lambda d, p: d.decode_memset(p),
    Command.SET_TENSOR_2D: lambda d, p: d.decode_set_tensor_2d(p),
    Command.GET_TENSOR_2D: lambda d, p: d.decode_get_tensor_2d(p),
}


@pytest.mark.parametrize("cmd", DECODERS, ids=lambda cmd: cmd.name)
@pytest.mark.parametrize("dialect", EVERY, ids=ids)
def test_truncated_at_every_byte_or_too_long(dialect: Dialect, cmd: Command) -> None:
    decode = DECODERS[cmd]
    if cmd not in dialect.commands:
        with pytest.raises(ProtocolError, match=f"no command {cmd.name}"):
            decode(dialect, bytes(400))
        return
    exact = dialect.min_request_bytes(cmd)
    whole = bytes(exact + 8)
    decode(dialect, whole[:exact])
    for length in (*range(exact), exact + 1, exact + 8):
        with pytest.raises(ProtocolError, match=f"{exact} bytes, not {length}"):
            decode(dialect, whole[:length])


# What cannot be said.


@pytest.mark.parametrize("dialect", SINGLE, ids=ids)
def test_one_device_only(dialect: Dialect) -> None:
    calls: list[Callable[[], bytes]] = [
        lambda: dialect.encode_alloc_buffer(1, 5),
        lambda: dialect.encode_device(Command.GET_MAX_SIZE, 1),
        lambda: dialect.encode_alloc_size(1, A),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="one device only") as caught:
            call()
        assert caught.value.hint == "use device 0"


@pytest.mark.parametrize("dialect", [d for d in EVERY if d.version < (5, 0)], ids=ids)
def test_memset_before_5(dialect: Dialect) -> None:
    with pytest.raises(ConfigError, match=f"protocol {dialect.text} has no command MEMSET_TENSOR"):
        dialect.encode_memset(A, 0, 1, 0)


@pytest.mark.parametrize("dialect", [d for d in EVERY if d.version < (8, 0)], ids=ids)
def test_2d_before_8(dialect: Dialect) -> None:
    with pytest.raises(ConfigError, match="no command SET_TENSOR_2D"):
        dialect.encode_set_tensor_2d(A, 0, 1, 1, 1)
    with pytest.raises(ConfigError, match="no command GET_TENSOR_2D"):
        dialect.encode_get_tensor_2d(A, 0, 1, 1, 1)


@pytest.mark.parametrize("cmd", [Command.ALLOC_BUFFER, Command.HELLO, Command.GET_ALLOC_SIZE])
def test_encode_device_is_for_three_commands(cmd: Command) -> None:
    with pytest.raises(ConfigError, match=f"{cmd.name} is not asked of a device alone"):
        LATEST.encode_device(cmd, 0)
    with pytest.raises(ConfigError, match=f"{cmd.name} is not asked of a device alone"):
        LATEST.decode_device(cmd, bytes(4))


@pytest.mark.parametrize(
    ("encode", "complaint"),
    [
        (lambda: LATEST.encode_alloc_buffer(2**32, 0), "device = 4294967296 does not fit u32"),
        (lambda: LATEST.encode_alloc_buffer(-1, 0), "device = -1 does not fit u32"),
        (lambda: LATEST.encode_alloc_buffer(0, 2**64), "nbytes = .* does not fit u64"),
        (lambda: LATEST.encode_handle(-1), "handle = -1 does not fit u64"),
        (lambda: LATEST.encode_buffer_clear(0, 256), "value = 256 does not fit u8"),
        (lambda: LATEST.encode_set_tensor(A, 2**64, 0), "offset = .* does not fit u64"),
        (lambda: LATEST.encode_set_tensor(A, 0, 256), "cache_flag = 256 does not fit u8"),
        (lambda: LATEST.encode_set_tensor_hash(A, 0, 2**64), "hash = .* does not fit u64"),
        (lambda: LATEST.encode_get_tensor(A, 0, -1), "nbytes = -1 does not fit u64"),
        (lambda: LATEST.encode_memset(A, 0, 1, -1), "value = -1 does not fit u8"),
        (lambda: LATEST.encode_set_tensor_2d(A, 0, 1, 2**64, 1), "n_copies = .* does not fit u64"),
        (lambda: LATEST.encode_get_tensor_2d(A, 0, 1, 1, -1), "stride = -1 does not fit u64"),
    ],
)
def test_numbers_that_do_not_fit(encode: Callable[[], bytes], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        encode()


def test_a_tensor_that_does_not_fit_is_named() -> None:
    bad = RpcTensor(1, 0, 1, (1, 1, 1, 2**32), (4, 4, 4, 4), name=b"blk.0")
    with pytest.raises(ValueError, match=r"tensor 'blk.0': ne = .*u32"):
        LATEST.encode_init_tensor(bad)
