import math
import re

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.wire import types
from weightwire.wire.types import TYPES

# Block elements and block bytes, from the block structures' definitions (docs/protocol.md, section 2).
EXPECTED = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 2 + 16),
    3: ("q4_1", 32, 2 + 2 + 16),
    6: ("q5_0", 32, 2 + 4 + 16),
    7: ("q5_1", 32, 2 + 2 + 4 + 16),
    8: ("q8_0", 32, 2 + 32),
    9: ("q8_1", 32, 2 + 2 + 32),
    10: ("q2_K", 256, 16 + 64 + 2 + 2),
    11: ("q3_K", 256, 32 + 64 + 12 + 2),
    12: ("q4_K", 256, 2 + 2 + 12 + 128),
    13: ("q5_K", 256, 2 + 2 + 12 + 32 + 128),
    14: ("q6_K", 256, 128 + 64 + 16 + 2),
    15: ("q8_K", 256, 4 + 256 + 32),
    16: ("iq2_xxs", 256, 2 + 64),
    17: ("iq2_xs", 256, 2 + 64 + 8),
    18: ("iq3_xxs", 256, 2 + 96),
    19: ("iq1_s", 256, 2 + 32 + 16),
    20: ("iq4_nl", 32, 2 + 16),
    21: ("iq3_s", 256, 2 + 64 + 8 + 32 + 4),
    22: ("iq2_s", 256, 2 + 64 + 8 + 8),
    23: ("iq4_xs", 256, 2 + 2 + 4 + 128),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 32 + 16 + 8),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 48 + 4 + 2),
    35: ("tq2_0", 256, 64 + 2),
    39: ("mxfp4", 32, 1 + 16),
    40: ("nvfp4", 64, 4 + 32),
    41: ("q1_0", 128, 2 + 16),
    42: ("q2_0", 64, 2 + 16),
}
REMOVED = {4, 5, 31, 32, 33, 36, 37, 38}

codes = st.sampled_from(sorted(TYPES))


def test_table_cell_by_cell() -> None:
    assert {code: (entry.name, entry.block, entry.nbytes) for code, entry in TYPES.items()} == EXPECTED
    assert all(entry.code == code for code, entry in TYPES.items())


def test_every_number_is_a_type_or_removed() -> None:
    assert set(TYPES) | REMOVED == set(range(43))
    assert set(types.REMOVED_TYPES) == REMOVED


def test_table_agrees_with_the_gguf_package() -> None:
    theirs = {int(code): tuple(sizes) for code, sizes in gguf.GGML_QUANT_SIZES.items()}
    # It counts q8_1 with two 32-bit scales; ggml has stored two of 16 bits since 2024, and the type is in no file.
    assert theirs.pop(9) == (32, 40)
    assert len(theirs) > 25
    ours = {code: (entry.block, entry.nbytes) for code, entry in TYPES.items()}
    assert {code: ours.get(code) for code in theirs} == theirs
    names = {int(code): code.name.lower() for code in gguf.GGML_QUANT_SIZES}
    assert {code: TYPES[code].name.lower() for code in names} == names


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("f32", "<f4"),
        ("f16", "<f2"),
        ("f64", "<f8"),
        ("i8", "|i1"),
        ("i16", "<i2"),
        ("i32", "<i4"),
        ("i64", "<i8"),
        ("bf16", None),
        ("q4_K", None),
    ],
)
def test_numpy_dtypes(name: str, dtype: str | None) -> None:
    entry = types.type_by_name(name)
    assert entry.numpy == dtype
    if dtype is not None:
        assert int(dtype[2:]) == entry.nbytes


@pytest.mark.parametrize(("written", "code"), [("f32", 0), ("F32", 0), ("q4_K", 12), ("Q4_k", 12), ("IQ2_XXS", 16)])
def test_type_by_name(written: str, code: int) -> None:
    assert types.type_by_name(written).code == code


def test_type_by_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'q9_9'.*f32.*q4_K"):
        types.type_by_name("q9_9")


@pytest.mark.parametrize("code", [-1, 43, 255, 2**32 - 1])
def test_unknown_types_are_refused(code: int) -> None:
    for call in (
        lambda: types.contiguous_nbytes(code, (32,)),
        lambda: types.contiguous_strides(code, (32,)),
        lambda: types.span_nbytes(code, (32,), (1,)),
    ):
        with pytest.raises(ValueError, match=re.escape(f"unknown ggml type {code}")):
            call()


@pytest.mark.parametrize("code", sorted(REMOVED))
def test_removed_types_are_refused_by_name(code: int) -> None:
    with pytest.raises(ValueError, match="was removed from ggml"):
        types.contiguous_nbytes(code, (32,))


@pytest.mark.parametrize(
    ("code", "ne", "nbytes", "nb"),
    [
        (0, (), 4, (4, 4, 4, 4)),
        (0, (3,), 12, (4, 12, 12, 12)),
        (1, (3, 5), 30, (2, 6, 30, 30)),
        (0, (2, 3, 4, 5), 480, (4, 8, 24, 96)),
        (12, (512, 10), 2880, (144, 288, 2880, 2880)),
        (2, (32, 1, 7), 126, (18, 18, 18, 126)),
        (0, (0, 9), 0, (4, 0, 0, 0)),
        (0, (9, 0), 0, (4, 36, 0, 0)),
    ],
)
def test_contiguous_by_hand(code: int, ne: tuple[int, ...], nbytes: int, nb: tuple[int, ...]) -> None:
    assert types.contiguous_nbytes(code, ne) == nbytes
    assert types.contiguous_strides(code, ne) == nb


def test_contiguous_takes_more_than_four_dimensions_and_strides_do_not() -> None:
    assert types.contiguous_nbytes(1, (2, 3, 4, 5, 6, 7)) == 2 * 3 * 4 * 5 * 6 * 7 * 2
    with pytest.raises(ValueError, match="5 dimensions"):
        types.contiguous_strides(1, (2, 3, 4, 5, 6))


@pytest.mark.parametrize("ne", [(31,), (33, 32), (1,)])
def test_a_row_must_be_whole_blocks(ne: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        types.contiguous_nbytes(8, ne)
    with pytest.raises(ValueError, match="blocks of 32"):
        types.contiguous_strides(8, ne)


@pytest.mark.parametrize("ne", [(-1,), (4, -4), (-32, -1)])
def test_negative_dimensions_are_refused(ne: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="negative"):
        types.contiguous_nbytes(0, ne)


@pytest.mark.parametrize(
    ("code", "ne", "nb", "nbytes"),
    [
        (0, (3, 5, 1, 1), (4, 100, 0, 0), 4 + 2 * 4 + 4 * 100),  # rows with gaps
        (1, (4, 1, 1, 1), (8, 0, 0, 0), 2 + 3 * 8),  # every fourth element
        (12, (512, 3, 1, 1), (144, 500, 0, 0), 288 + 2 * 500),
        (24, (1, 1, 1, 1), (77, 88, 99, 11), 1),
        (0, (0, 5, 1, 1), (4, 100, 0, 0), 0),
        (12, (256, 1, 0, 1), (144, 144, 144, 144), 0),
        (24, (2**32 - 1,) * 4, (2**32 - 1,) * 4, 1 + 4 * (2**32 - 2) * (2**32 - 1)),
    ],
)
def test_span_by_hand(code: int, ne: tuple[int, ...], nb: tuple[int, ...], nbytes: int) -> None:
    assert types.span_nbytes(code, ne, nb) == nbytes


def test_span_refuses_what_does_not_pair_up() -> None:
    with pytest.raises(ValueError, match="4 dimensions but 3 strides"):
        types.span_nbytes(0, (1, 1, 1, 1), (4, 4, 4))
    with pytest.raises(ValueError, match="at least one dimension"):
        types.span_nbytes(12, (), ())


@given(codes, st.lists(st.integers(0, 2**20), min_size=1, max_size=4))
def test_span_of_a_tensor_without_gaps_is_its_size(code: int, ne: list[int]) -> None:
    ne[0] *= TYPES[code].block
    shape = (*ne, *(1,) * (4 - len(ne)))
    expected = math.prod(shape) // TYPES[code].block * TYPES[code].nbytes
    assert types.contiguous_nbytes(code, ne) == expected
    assert types.span_nbytes(code, shape, types.contiguous_strides(code, ne)) == expected
