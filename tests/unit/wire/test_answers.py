from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import ProtocolError
from weightwire.wire import answers

u64 = st.integers(0, 2**64 - 1)


def test_answers_byte_by_byte() -> None:
    assert answers.encode_alloc_answer(1, 2) == bytes([1, *[0] * 7, 2, *[0] * 7])
    assert answers.encode_memory_answer(0x100, 0x200) == bytes([0, 1, *[0] * 6, 0, 2, *[0] * 6])
    assert answers.encode_u64_answer(2**64 - 1) == b"\xff" * 8
    assert answers.encode_u32_answer(3) == bytes([3, 0, 0, 0])
    assert answers.encode_u8_answer(1) == b"\x01"


@given(u64, u64)
def test_pairs_round_trip(first: int, second: int) -> None:
    alloc = answers.decode_alloc_answer(answers.encode_alloc_answer(first, second))
    assert (alloc.handle, alloc.nbytes) == (first, second)
    memory = answers.decode_memory_answer(answers.encode_memory_answer(first, second))
    assert (memory.free, memory.total) == (first, second)


@given(u64)
def test_numbers_round_trip(value: int) -> None:
    assert answers.decode_u64_answer(answers.encode_u64_answer(value)) == value
    assert answers.decode_u32_answer(answers.encode_u32_answer(value % 2**32)) == value % 2**32
    assert answers.decode_u8_answer(answers.encode_u8_answer(value % 256)) == value % 256


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        (answers.decode_alloc_answer, 16),
        (answers.decode_memory_answer, 16),
        (answers.decode_u64_answer, 8),
        (answers.decode_u32_answer, 4),
        (answers.decode_u8_answer, 1),
    ],
)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 24])
def test_any_other_length_is_refused(decode: Callable[[bytes], object], expected: int, length: int) -> None:
    if length == expected:
        decode(bytes(length))
    else:
        with pytest.raises(ProtocolError, match=f"{expected} bytes, not {length}"):
            decode(bytes(length))


def test_an_error_names_the_command() -> None:
    with pytest.raises(ProtocolError, match="GET_MAX_SIZE"):
        answers.decode_u64_answer(b"", "GET_MAX_SIZE")


@pytest.mark.parametrize(
    "encode",
    [
        lambda: answers.encode_alloc_answer(2**64, 0),
        lambda: answers.encode_memory_answer(0, -1),
        lambda: answers.encode_u64_answer(2**64),
        lambda: answers.encode_u32_answer(2**32),
        lambda: answers.encode_u8_answer(256),
    ],
)
def test_numbers_that_do_not_fit_are_refused(encode: Callable[[], bytes]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode()
