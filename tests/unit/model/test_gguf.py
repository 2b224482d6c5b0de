"""The GGUF walk: what the gguf package writes is found, and what nobody should write is refused where it is wrong."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from support import raw_gguf as raw

from weightwire.errors import ModelError
from weightwire.model import Model, ModelTensor, open_model
from weightwire.model.base import ModelFile
from weightwire.ranges import FileRange

HOSTILE = (2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
F32, Q8_0, Q4_K = 0, 8, 12


def opened(tmp_path: Path, content: bytes) -> Model:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return open_model(path)


def refused(tmp_path: Path, content: bytes) -> ModelError:
    """The error for `content`, which must come without memory for what the file only claims."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            open_model(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.path == str(path)
    return caught.value


def place(tensor: ModelTensor) -> tuple[int, int]:
    assert isinstance(tensor.payload, FileRange)
    return tensor.payload.offset, tensor.payload.nbytes


def compare_with_reader(path: Path, model: Model) -> None:
    """Every tensor as the gguf package sees it, down to its bytes."""
    reader = gguf.GGUFReader(path)
    assert list(model.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = model.tensors[theirs.name]
        assert ours.type_code == int(theirs.tensor_type)
        assert ours.type_name.lower() == theirs.tensor_type.name.lower()
        assert ours.ne == tuple(int(extent) for extent in theirs.shape)
        assert place(ours) == (int(theirs.data_offset), int(theirs.n_bytes))
        assert ours.nbytes == int(theirs.n_bytes)
        assert bytes(ours.view()) == theirs.data.tobytes()


def test_every_type_of_the_gguf_package_is_found_where_its_reader_finds_it(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    rng = np.random.default_rng(1)
    sizes = dict(gguf.GGML_QUANT_SIZES)
    # ggml stores Q8_1, which no model file has, in 36 bytes; the package says 40.
    del sizes[gguf.GGMLQuantizationType.Q8_1]
    for kind, (_, nbytes) in sizes.items():
        content = rng.integers(0, 256, (3, 2 * nbytes), dtype=np.uint8)
        writer.add_tensor(f"t.{kind.name}", content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_model(path) as model:
        assert model.format == "gguf"
        assert model.path == str(path)
        assert model.files == (str(path),)
        assert len(model.tensors) == len(sizes)
        assert model.nbytes == sum(6 * nbytes for _, nbytes in sizes.values())
        compare_with_reader(path, model)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_shapes_scalars_and_alignment_as_the_gguf_package_writes_them(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "shapes.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -1)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -2)
    writer.add_int32("i32", -3)
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "ä ☃")
    writer.add_array("words", ["a", "bc", ""])
    writer.add_array("numbers", [1, 2, 3])
    for index, shape in enumerate([(1,), (7,), (3, 5), (2, 3, 4), (2, 3, 4, 5)]):
        writer.add_tensor(f"t{index}", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_model(path) as model:
        compare_with_reader(path, model)
        assert model.tensors["t4"].ne == (5, 4, 3, 2)
        assert {key: value for key, value in model.metadata.items() if not key.startswith("general")} == {
            "u8": 255,
            "i8": -1,
            "u16": 65535,
            "i16": -2,
            "i32": -3,
            "u64": 2**64 - 1,
            "i64": -(2**62),
            "f32": 0.5,
            "f64": 0.1,
            "yes": True,
            "text": "ä ☃",
        }
        assert model.metadata["general.architecture"] == "llama"
        assert model.metadata["general.alignment"] == alignment


def test_version_2_is_read_like_version_3(tmp_path: Path) -> None:
    data = bytes(range(16))
    with opened(tmp_path, raw.build([], [raw.tensor("t", (4,), F32, 0)], data, version=2)) as model:
        assert bytes(model.tensors["t"].view()) == data


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"GGU", "ends inside"),
        (raw.build(version=1), "version 1"),
        (raw.build(version=0x03000000), "big-endian"),
        (raw.build(version=0x02000000), "big-endian"),
        (raw.build(version=4), "version 4"),
        (raw.build(version=0), "version 0"),
        (raw.build(magic=b"PK\x03\x04"), "not a GGUF"),
        (raw.build(magic=b"tjgg"), "not a GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "not a GGUF"),
    ],
)
def test_what_is_no_gguf_of_ours_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    error = refused(tmp_path, content)
    assert said in error.detail
    assert error.offset in (0, 4)
    assert error.hint or "version" in said


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    ("make", "offset"),
    [
        (lambda n: raw.build(n_tensors=n), 8),
        (lambda n: raw.build(n_pairs=n), 16),
        (lambda n: raw.build([struct.pack("<Q", n) + b"key" + bytes(64)]), 24),  # key length
        (lambda n: raw.build([raw.pair("k", raw.STRING, struct.pack("<Q", n))]), 45),  # string length
        (lambda n: raw.build([raw.pair("k", raw.ARRAY, raw.array(0, n, b"abc"))]), 49),  # bytes
        (lambda n: raw.build([raw.pair("k", raw.ARRAY, raw.array(12, n, b"abc"))]), 49),  # 8 bytes each
        (lambda n: raw.build([raw.pair("k", raw.ARRAY, raw.array(raw.STRING, n, bytes(64)))]), 49),
        (lambda n: raw.build([raw.pair("k", raw.ARRAY, raw.array(raw.ARRAY, n, bytes(64)))]), 49),
        (lambda n: raw.build([raw.pair("k", raw.ARRAY, raw.array(raw.STRING, 1, struct.pack("<Q", n)))]), 49),
        (lambda n: raw.build([], [struct.pack("<Q", n) + bytes(64)]), 24),  # name length
        (lambda n: raw.build([], [raw.tensor("t", (n, n), F32, 0)]), 37),
        (lambda n: raw.build([], [raw.tensor("t", (n // 32 * 32,), F32, 0)]), 37),
        (lambda n: raw.build([], [raw.tensor("t", (32, n), 57, n)]), 37),
        (lambda n: raw.build([], [raw.tensor("t", (4,), F32, n // 32 * 32)], bytes(64)), 49),
        (lambda n: raw.build([], [raw.tensor("t", (4,), 57, n // 32 * 32)], bytes(64)), 49),
    ],
)
def test_hostile_numbers_are_refused_at_their_place(tmp_path: Path, make, value: int, offset: int) -> None:  # type: ignore[no-untyped-def]
    error = refused(tmp_path, make(value))
    assert error.offset is not None
    # The number's own place, or that of what it measures in the same entry.
    assert offset <= error.offset <= offset + 20


def test_a_sparse_file_does_not_make_claims_credible(tmp_path: Path) -> None:
    """The bytes for 2^31 empty strings are there, as a hole: the walk refuses rather than walks them."""
    path = tmp_path / "hole.gguf"
    path.write_bytes(raw.build([raw.pair("k", raw.ARRAY, raw.array(raw.STRING, 2**31, b""))]))
    with path.open("r+b") as file:
        file.truncate(2**36)
    with pytest.raises(ModelError, match="more than the"):
        open_model(path)


def test_arrays_in_arrays_are_walked_but_not_without_end(tmp_path: Path) -> None:
    inner = raw.array(raw.STRING, 2, raw.string("a") + raw.string("bc"))
    numbers = raw.array(5, 3, bytes(12))
    nested = raw.pair("k", raw.ARRAY, raw.array(raw.ARRAY, 2, inner + numbers))
    with opened(tmp_path, raw.build([nested, raw.pair("n", raw.U32, b"\7\0\0\0")])) as model:
        assert dict(model.metadata) == {"n": 7}
    deep = raw.array(0, 0, b"")
    for _ in range(100):
        deep = raw.array(raw.ARRAY, 1, deep)
    assert "nests arrays" in refused(tmp_path, raw.build([raw.pair("k", raw.ARRAY, deep)])).detail


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([raw.pair("k", 13, bytes(8))], "value type 13"),
        ([raw.pair("k", 2**32 - 1, bytes(8))], "value type 4294967295"),
        ([raw.pair("k", raw.ARRAY, raw.array(13, 1, bytes(8)))], "array of value type 13"),
        ([raw.pair("k", 0, b"1"), raw.pair("k", 0, b"2")], "'k' occurs twice"),
        ([raw.pair(b"\xff", 0, b"1")], "not UTF-8"),
        ([raw.pair("general.alignment", raw.U32, bytes(4))], "power of two"),
        ([raw.pair("general.alignment", raw.U32, b"\x18\0\0\0")], "power of two"),
        ([raw.pair("general.alignment", raw.STRING, raw.string("32"))], "value type 8"),
        ([raw.pair("general.alignment", 10, b"\x20" + bytes(7))], "value type 10"),
    ],
)
def test_bad_metadata(tmp_path: Path, pairs: list[bytes], said: str) -> None:
    error = refused(tmp_path, raw.build(pairs))
    assert said in error.detail
    assert error.offset is not None
    assert error.offset >= 24


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([raw.tensor("t", (4,), F32, 0, n_dims=5)], "5 dimensions"),
        ([raw.tensor("t", (4,), F32, 0, n_dims=2**32 - 1)], "dimensions"),
        ([raw.tensor("t", (33,), Q8_0, 0)], "block of 32"),
        ([raw.tensor("t", (128, 2), Q4_K, 0)], "block of 256"),
        ([raw.tensor("t", (4,), F32, 16)], "not a multiple of 32"),
        ([raw.tensor("t", (4,), F32, 0), raw.tensor("t", (4,), F32, 32)], "'t' occurs twice"),
        ([raw.tensor("a", (16,), F32, 0), raw.tensor("b", (4,), F32, 32)], "inside tensor 'a'"),
        ([raw.tensor("a", (4,), 57, 0), raw.tensor("b", (4,), 58, 0)], "inside tensor 'a'"),
        ([raw.tensor("t", (0, 2**63), F32, 0)], "63 bits"),
        ([raw.tensor("t", (2**32, 2**31), F32, 0)], "63 bits"),
        ([raw.tensor("t", (17,), F32, 0)], "needs 68 bytes"),
        ([raw.tensor("t", (4,), F32, 64)], "needs 16 bytes"),
        ([raw.tensor("t", (4,), F32, 96)], "past the file's end"),
        ([raw.tensor("t", (4,), 57, 64)], "where the file ends"),
        ([raw.tensor(b"\xc3\x28", (4,), F32, 0)], "not UTF-8"),
        ([raw.tensor("a\0b", (4,), F32, 0)], "NUL"),
    ],
)
def test_bad_tensors(tmp_path: Path, tensors: list[bytes], said: str) -> None:
    error = refused(tmp_path, raw.build([], tensors, bytes(64)))
    assert said in error.detail
    assert error.offset is not None
    assert error.offset >= 24


def test_unknown_types_reach_to_the_next_tensor_or_the_end(tmp_path: Path) -> None:
    data = bytes(range(256))
    tensors = [
        raw.tensor("last", (7, 7), 57, 160),  # header order is not the order of the data
        raw.tensor("first", (9,), 2**32 - 1, 0),
        raw.tensor("known", (4,), F32, 128),
        raw.tensor("removed", (4,), 4, 96),  # q4_2, which ggml no longer has
        raw.tensor("empty", (0,), 99, 96),
    ]
    with opened(tmp_path, raw.build([], tensors, data)) as model:
        assert list(model.tensors) == ["last", "first", "known", "removed", "empty"]
        found = {name: (each.type_code, each.type_name, each.nbytes) for name, each in model.tensors.items()}
        assert found == {
            "last": (None, "type 57", 96),
            "first": (None, "type 4294967295", 96),
            "known": (F32, "f32", 16),
            "removed": (None, "type 4", 32),
            "empty": (None, "type 99", 0),
        }
        assert bytes(model.tensors["last"].view()) == data[160:]
        assert bytes(model.tensors["first"].view()) == data[:96]


def test_empty_tensors_and_scalars(tmp_path: Path) -> None:
    tensors = [raw.tensor("none", (0, 5), F32, 0), raw.tensor("one", (), F32, 0), raw.tensor("end", (256, 0), Q4_K, 32)]
    with opened(tmp_path, raw.build([], tensors, b"\1\2\3\4")) as model:
        assert [(each.ne, each.nbytes) for each in model.tensors.values()] == [((0, 5), 0), ((1,), 4), ((256, 0), 0)]
        assert bytes(model.tensors["one"].view()) == b"\1\2\3\4"
        assert bytes(model.tensors["end"].view()) == b""


def test_a_file_without_tensors_is_a_model_without_tensors(tmp_path: Path) -> None:
    with opened(tmp_path, raw.build([raw.pair("k", raw.STRING, raw.string("v"))])) as model:
        assert not model.tensors
        assert model.nbytes == 0
        assert model.metadata == {"k": "v"}


def test_a_long_string_is_stepped_over(tmp_path: Path) -> None:
    kept, left = "x" * (1 << 20), "y" * ((1 << 20) + 1)
    pairs = [raw.pair("kept", raw.STRING, raw.string(kept)), raw.pair("left", raw.STRING, raw.string(left))]
    with opened(tmp_path, raw.build([*pairs, raw.pair("end", 0, b"\5")])) as model:
        assert model.metadata == {"kept": kept, "end": 5}


def test_many_long_strings_do_not_fill_the_memory(tmp_path: Path) -> None:
    """A mebibyte each, in a file that is mostly holes; the first sixteen are kept."""
    path = tmp_path / "strings.gguf"
    with path.open("wb") as file:
        file.write(raw.build(n_pairs=64))
        for index in range(64):
            file.write(raw.pair(f"k{index}", raw.STRING, struct.pack("<Q", 1 << 20)))
            file.seek(1 << 20, os.SEEK_CUR)
        file.truncate()
    tracemalloc.start()
    try:
        with open_model(path) as model:
            assert list(model.metadata) == [f"k{index}" for index in range(16)]
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


def test_a_large_vocabulary_is_walked_without_reading_tensor_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150,000 tokens and as many merges: the header is read once in bounded pieces, the data not at all."""
    count = 150_000
    tokens = b"".join(raw.string(f"token{index}") for index in range(count))
    merges = b"".join(raw.string(f"to {index}") for index in range(count))
    pairs = [
        raw.pair("tokenizer.ggml.tokens", raw.ARRAY, raw.array(raw.STRING, count, tokens)),
        raw.pair("tokenizer.ggml.scores", raw.ARRAY, raw.array(6, count, bytes(4 * count))),
        raw.pair("tokenizer.ggml.merges", raw.ARRAY, raw.array(raw.STRING, count, merges)),
        raw.pair("after", raw.U32, b"\1\0\0\0"),
    ]
    tensors = [raw.tensor(f"t{index}", (1024, 1024), F32, index << 22) for index in range(16)]
    header = raw.build(pairs, tensors)
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(header)
    with path.open("r+b") as file:
        file.truncate(len(header) + (16 << 22))
    reads: list[tuple[int, int]] = []
    read_at = ModelFile.read_at

    def counted(self: ModelFile, offset: int, nbytes: int) -> bytes:
        reads.append((offset, nbytes))
        return read_at(self, offset, nbytes)

    monkeypatch.setattr(ModelFile, "read_at", counted)
    with open_model(path) as model:
        assert model.metadata["after"] == 1
        assert [place(each)[0] for each in model.tensors.values()] == [
            len(header) + (index << 22) for index in range(16)
        ]
    assert max(nbytes for _, nbytes in reads) <= 1 << 20
    assert all(offset < len(header) for offset, _ in reads)
    # The last window may reach past the header's end.
    assert sum(nbytes for _, nbytes in reads) < len(header) + (1 << 20)
