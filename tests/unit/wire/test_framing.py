import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import ProtocolError
from weightwire.wire import framing
from weightwire.wire.commands import Command


def test_heads_byte_by_byte() -> None:
    assert framing.request_header(Command.SET_TENSOR, 0x0102030405060708) == bytes([6, 8, 7, 6, 5, 4, 3, 2, 1])
    assert framing.request_header(14, 24) == b"\x0e\x18" + bytes(7)
    assert framing.response_header(0x0102030405060708) == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert framing.response_header(0) == framing.EMPTY_RESPONSE == b"\0\0\0\0\0\0\0\0"


@pytest.mark.parametrize("size", [0, 1, 2**31, 2**32, 2**63 - 1])
def test_sizes_up_to_the_limit(size: int) -> None:
    assert framing.parse_request_header(framing.request_header(6, size)) == (6, size)
    assert framing.parse_u64(framing.response_header(size)) == size


@pytest.mark.parametrize("size", [-1, 2**63, 2**64 - 1, 2**64])
def test_sizes_that_kill_a_stock_server_are_never_sent(size: int) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        framing.request_header(6, size)
    with pytest.raises(ValueError, match="cannot be sent"):
        framing.response_header(size)


@pytest.mark.parametrize("cmd", [-1, 256, 1000])
def test_a_command_is_one_byte(cmd: int) -> None:
    with pytest.raises(ValueError, match="no byte"):
        framing.request_header(cmd, 0)


@pytest.mark.parametrize("value", [0, 2**31, 2**32, 2**63, 2**64 - 1])
def test_declared_sizes_are_parsed_however_large(value: int) -> None:
    raw = value.to_bytes(8, "little")
    assert framing.parse_u64(raw) == value
    assert framing.parse_request_header(b"\xff" + raw) == (255, value)
    assert framing.parse_request_header(memoryview(b"\x06" + raw)) == (6, value)


@pytest.mark.parametrize("length", [*range(8), 9, 16])
def test_a_u64_of_another_length(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"not {length}"):
        framing.parse_u64(bytes(length))


@pytest.mark.parametrize("length", [*range(9), 10, 18])
def test_a_head_of_another_length(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"not {length}"):
        framing.parse_request_header(bytes(length))


@given(st.integers(0, 255), st.integers(0, 2**63 - 1))
def test_round_trip(cmd: int, size: int) -> None:
    head = framing.request_header(cmd, size)
    assert len(head) == framing.REQUEST_HEADER_BYTES
    assert framing.parse_request_header(head) == (cmd, size)
    assert len(framing.response_header(size)) == framing.RESPONSE_HEADER_BYTES
