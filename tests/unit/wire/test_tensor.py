import dataclasses
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightwire.errors import ProtocolError
from weightwire.wire.tensor import MAX_WEIGHT_BYTES, RPC_TENSOR_BYTES, RpcTensor, weight_tensor, wire_name
from weightwire.wire.types import TYPES, contiguous_nbytes

U32 = 2**32 - 1
U64 = 2**64 - 1

u32 = st.integers(0, U32)
u64 = st.integers(0, U64)
quads = st.tuples(u32, u32, u32, u32)
names = st.binary(max_size=64).map(lambda raw: raw.rstrip(b"\0"))
tensors = st.builds(
    RpcTensor,
    id=u64,
    type=u32,
    buffer=u64,
    ne=quads,
    nb=quads,
    op=u32,
    op_params=st.binary(min_size=64, max_size=64),
    flags=st.integers(-(2**31), 2**31 - 1),
    src=st.tuples(*[u64] * 10),
    view_src=u64,
    view_offs=u64,
    data=u64,
    name=names,
    padding=u32,
)

GOLDEN = RpcTensor(
    id=0x0102030405060708,
    type=12,
    buffer=0x1112131415161718,
    ne=(256, 3, 0xFFFFFFFF, 1),
    nb=(144, 0x21222324, 5, 6),
    op=0x31323334,
    op_params=bytes(range(64)),
    flags=-2,
    src=tuple(0x4142434445464700 + index for index in range(10)),
    view_src=0x5152535455565758,
    view_offs=0x6162636465666768,
    data=0x7172737475767778,
    name=b"blk.0.attn_q.weight",
    padding=0x81828384,
)

# (offset, layout, value): the layout table of docs/protocol.md, section 2, written out.
FIELDS = [
    (0, "<Q", 0x0102030405060708),
    (8, "<I", 12),
    (12, "<Q", 0x1112131415161718),
    (20, "<I", 256),
    (24, "<I", 3),
    (28, "<I", 0xFFFFFFFF),
    (32, "<I", 1),
    (36, "<I", 144),
    (40, "<I", 0x21222324),
    (44, "<I", 5),
    (48, "<I", 6),
    (52, "<I", 0x31323334),
    *[(56 + 4 * n, "<I", int.from_bytes(bytes(range(4 * n, 4 * n + 4)), "little")) for n in range(16)],
    (120, "<i", -2),
    *[(124 + 8 * n, "<Q", 0x4142434445464700 + n) for n in range(10)],
    (204, "<Q", 0x5152535455565758),
    (212, "<Q", 0x6162636465666768),
    (220, "<Q", 0x7172737475767778),
    (228, "64s", b"blk.0.attn_q.weight" + bytes(45)),
    (292, "<I", 0x81828384),
]


@pytest.mark.parametrize(("offset", "layout", "value"), FIELDS)
def test_every_field_lies_where_the_protocol_says(offset: int, layout: str, value: object) -> None:
    assert struct.unpack_from(layout, GOLDEN.pack(), offset)[0] == value


def test_the_fields_of_the_table_fill_the_whole_structure() -> None:
    end = 0
    for offset, layout, _ in FIELDS:
        assert offset == end
        end = offset + struct.calcsize(layout)
    assert end == RPC_TENSOR_BYTES == len(GOLDEN.pack())


def test_golden_bytes_unpack_field_by_field() -> None:
    wire = b"".join(struct.pack(layout, value) for _, layout, value in FIELDS)
    assert GOLDEN.pack() == wire
    assert RpcTensor.unpack(wire) == GOLDEN


@given(tensors)
def test_round_trip(tensor: RpcTensor) -> None:
    wire = tensor.pack()
    assert len(wire) == RPC_TENSOR_BYTES
    assert RpcTensor.unpack(wire) == tensor


@given(st.binary(min_size=296, max_size=296), st.integers(0, 40))
def test_any_bytes_unpack_and_pack_back(wire: bytes, offset: int) -> None:
    framed = bytes(offset) + wire + b"tail"
    for buf in (framed, bytearray(framed), memoryview(framed)):
        assert RpcTensor.unpack(buf, offset).pack() == wire


@pytest.mark.parametrize("length", range(RPC_TENSOR_BYTES))
def test_cut_short_anywhere(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"{length} of 296"):
        RpcTensor.unpack(GOLDEN.pack()[:length])


@pytest.mark.parametrize("offset", [1, 296, 297, 10**30, -1, -296])
def test_unpack_past_the_end(offset: int) -> None:
    with pytest.raises(ProtocolError, match="cut short"):
        RpcTensor.unpack(GOLDEN.pack(), offset)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("id", 2**64, "u64"),
        ("id", -1, "u64"),
        ("type", 2**32, "u32"),
        ("buffer", 2**64, "u64"),
        ("ne", (1, 1, 1, 2**32), "u32"),
        ("nb", (1, -1, 1, 1), "u32"),
        ("op", 2**32, "u32"),
        ("flags", 2**31, "i32"),
        ("flags", -(2**31) - 1, "i32"),
        ("src", (0,) * 9 + (2**64,), "u64"),
        ("view_src", 2**64, "u64"),
        ("view_offs", 2**64, "u64"),
        ("data", 2**64, "u64"),
        ("padding", 2**32, "u32"),
        ("ne", (1, 1, 1), "4 dimensions"),
        ("nb", (1, 1, 1, 1, 1), "4 dimensions"),
        ("src", (0,) * 9, "10 sources"),
        ("op_params", bytes(63), "64 bytes, not 63"),
        ("name", bytes(65), "65 bytes"),
    ],
)
def test_pack_names_the_field_that_does_not_fit(field: str, value: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        dataclasses.replace(GOLDEN, **{field: value}).pack()
    if complaint in {"u32", "u64", "i32"}:
        assert f"{field} = " in str(caught.value)


def test_label_stops_at_nul_and_survives_bad_utf8() -> None:
    assert dataclasses.replace(GOLDEN, name=b"ab\0garbage").label == "ab"
    assert dataclasses.replace(GOLDEN, name=b"a\xff").label == "a�"
    full = dataclasses.replace(GOLDEN, name=b"x" * 64)
    assert RpcTensor.unpack(full.pack()).label == "x" * 64


def test_nbytes_is_the_span() -> None:
    assert dataclasses.replace(GOLDEN, ne=(512, 2, 1, 1), nb=(144, 1000, 0, 0)).nbytes == 288 + 1000
    with pytest.raises(ValueError, match="unknown ggml type 4294967295"):
        _ = dataclasses.replace(GOLDEN, type=U32).nbytes


# The weight's tensor.


def packed(tensor: RpcTensor) -> RpcTensor:
    """The tensor as a server sees it."""
    return RpcTensor.unpack(tensor.pack())


def test_a_weight_keeps_its_type_and_shape() -> None:
    tensor = packed(weight_tensor("w", 12, (512, 10), 2880, buffer=7, data=4096))
    assert (tensor.id, tensor.type, tensor.buffer, tensor.data) == (1, 12, 7, 4096)
    assert (tensor.ne, tensor.nb) == ((512, 10, 1, 1), (144, 288, 2880, 2880))
    assert (tensor.nbytes, tensor.label) == (2880, "w")
    assert (tensor.op, tensor.flags, tensor.src, tensor.view_src, tensor.view_offs, tensor.padding) == (
        0,
        0,
        (0,) * 10,
        0,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("code", "ne", "nbytes"),
    [
        (None, (10, 10), 100),
        (43, (10, 10), 100),
        (4, (10, 10), 100),
        (0, (10, 10), 399),  # the size does not follow from the shape
        (8, (33,), 34),  # no whole blocks
        (0, (-1, -100), 400),
        (24, (2**32,), 100),
    ],
)
def test_a_weight_without_a_usable_type_travels_as_bytes(code: int | None, ne: tuple[int, ...], nbytes: int) -> None:
    tensor = packed(weight_tensor("w", code, ne, nbytes, buffer=1, data=2))
    assert (tensor.type, tensor.ne, tensor.nb) == (24, (nbytes, 1, 1, 1), (1, nbytes, nbytes, nbytes))
    assert tensor.nbytes == nbytes


def test_dimensions_past_the_fourth_are_folded() -> None:
    tensor = packed(weight_tensor("w", 1, (2, 3, 4, 5, 6, 7), 10080, buffer=1, data=2))
    assert (tensor.type, tensor.ne, tensor.nb) == (1, (2, 3, 4, 210), (2, 4, 12, 48))
    assert tensor.nbytes == 10080


def test_a_matrix_over_4_gib_keeps_its_type() -> None:
    rows = 2**21
    tensor = packed(weight_tensor("w", 12, (5120, rows), 2880 * rows, buffer=1, data=2))
    assert tensor.type == 12
    assert tensor.ne == (5120, rows, 1, 1)
    assert tensor.nb[:2] == (144, 2880)
    assert tensor.nbytes == 2880 * rows > 2**32


def test_a_used_stride_of_4_gib_makes_it_bytes() -> None:
    nbytes = 2 * 2**32
    tensor = packed(weight_tensor("w", 0, (2**15, 2**15, 2), nbytes, buffer=1, data=2))
    assert tensor.type == 24
    assert tensor.nbytes == nbytes


BORDERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 3 * 2**31 - 1, 3 * 2**31, 2**45, 2**62, 2**63 - 1]


@pytest.mark.parametrize("nbytes", BORDERS)
def test_bytes_form_at_the_borders(nbytes: int) -> None:
    tensor = packed(weight_tensor("w", None, (nbytes,), nbytes, buffer=1, data=2))
    assert tensor.nbytes == nbytes
    assert tensor.type == 24


@given(st.integers(0, MAX_WEIGHT_BYTES) | st.integers(0, 2**45) | st.integers(2**32 - 3, 2**34))
@example(2**32)
def test_bytes_form_spans_exactly_any_size(nbytes: int) -> None:
    tensor = packed(weight_tensor("w", None, (nbytes,), nbytes, buffer=1, data=2))
    assert tensor.nbytes == nbytes
    ne0, ne1, ne2, ne3 = tensor.ne
    assert (ne2, ne3) == (1, 1)
    # What a server computes, written out: one element, and the strides times the steps.
    assert (0 if nbytes == 0 else 1 + (ne0 - 1) * tensor.nb[0] + (ne1 - 1) * tensor.nb[1]) == nbytes


@given(
    st.sampled_from(sorted(TYPES)),
    st.lists(st.integers(0, 2**17) | st.integers(0, 4), min_size=0, max_size=7),
    st.booleans(),
)
def test_any_weight_spans_exactly_its_bytes(code: int, ne: list[int], blocks: bool) -> None:
    if ne and blocks:
        ne[0] *= TYPES[code].block
    try:
        nbytes = contiguous_nbytes(code, ne)
    except ValueError:
        nbytes = 12345
    if nbytes > MAX_WEIGHT_BYTES:
        with pytest.raises(ValueError, match="cannot be described"):
            weight_tensor("w", code, ne, nbytes, buffer=1, data=2)
    else:
        assert packed(weight_tensor("w", code, ne, nbytes, buffer=1, data=2)).nbytes == nbytes


@pytest.mark.parametrize("nbytes", [-1, 2**63, 2**64 - 1, 2**64])
def test_sizes_past_the_limit_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="cannot be described"):
        weight_tensor("w", None, (1,), nbytes, buffer=1, data=2)


@pytest.mark.parametrize("field", ["buffer", "data", "id"])
@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_weights_addresses_must_fit(field: str, value: int) -> None:
    numbers = {"buffer": 1, "data": 2, "id": 3, field: value}
    with pytest.raises(ValueError, match=f"{field} = {value}"):
        weight_tensor("w", None, (1,), 1, **numbers)


# Names.


@pytest.mark.parametrize("name", ["", "output.weight", "x" * 63, "é" * 31])
def test_short_names_stay(name: str) -> None:
    assert wire_name(name) == name.encode()


def test_a_long_name_is_cut_and_hashed() -> None:
    assert wire_name("x" * 64) == b"x" * 46 + b"~" + b"b96a5acbb56db825"


def test_a_long_name_is_cut_between_characters() -> None:
    # Byte 46 falls inside the sixteenth three-byte character.
    short = wire_name("あ" * 40)
    assert short.startswith("あ".encode() * 15 + b"~")
    assert len(short) == 45 + 17


def test_long_names_that_differ_only_at_the_end_stay_distinct() -> None:
    stem = "model.layers.0." * 6
    assert len({wire_name(f"{stem}{index}") for index in range(1000)}) == 1000


def test_names_with_nul_stay_distinct_and_whole() -> None:
    first, second = wire_name("a\0b"), wire_name("a\0c")
    assert first != second
    assert b"\0" not in first + second
    assert first.startswith(b"a~")


@given(st.text(st.characters(), max_size=200))
def test_any_name_fits_and_reads_back_as_a_c_string(name: str) -> None:
    wire = wire_name(name)
    assert len(wire) <= 63
    assert b"\0" not in wire
    tensor = packed(weight_tensor(name, None, (1,), 1, buffer=1, data=2))
    assert tensor.name == wire
    # A lone surrogate (JSON can hold one) has no UTF-8; the others read back as they were.
    if len(name.encode("utf-8", "surrogatepass")) <= 63 and "\0" not in name and name.isprintable():
        assert tensor.label == name
