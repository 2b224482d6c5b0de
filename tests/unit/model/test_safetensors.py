"""safetensors: what the package writes is found, and headers it would never write are refused."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from support.leaks import descriptors_below

from weightwire.errors import ModelError
from weightwire.model import open_model

CODES = {"float64": 28, "float32": 0, "float16": 1, "int64": 27, "int32": 26, "int16": 25, "int8": 24}
OTHERS = {"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64"}


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(body) if length is None else length) + body + data


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refused(path: Path) -> ModelError:
    before = descriptors_below(path.parent)
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert descriptors_below(path.parent) == before
    return caught.value


def refused_content(tmp_path: Path, content: bytes) -> ModelError:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    error = refused(path)
    assert error.path == str(path)
    return error


def test_every_dtype_numpy_can_save(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    rng = np.random.default_rng(2)
    arrays = {
        name: np.frombuffer(rng.bytes(24 * np.dtype(name).itemsize), dtype=name).reshape(2, 3, 4)
        for name in [*CODES, *OTHERS]
        if name != "bool"
    }
    arrays["bool"] = np.array([[True, False]])
    arrays["scalar"] = np.array(7, dtype=np.float32)
    arrays["empty"] = np.zeros((0, 3), dtype=np.float16)
    arrays["five"] = np.zeros((2, 1, 3, 1, 2), dtype=np.int8)
    save_file(arrays, path, metadata={"format": "np"})
    with open_model(path) as model, safe_open(path, framework="np") as theirs:
        assert model.format == "safetensors"
        assert model.metadata == {"format": "np"}
        assert set(model.tensors) == set(theirs.keys())
        for name, array in arrays.items():
            ours = model.tensors[name]
            assert bytes(ours.view()) == theirs.get_tensor(name).tobytes() == array.tobytes()
            assert ours.nbytes == array.nbytes
            assert ours.ne == (tuple(reversed(array.shape)) or (1,))
            kind = array.dtype.name
            assert ours.type_code == CODES.get(kind)
            if kind in OTHERS:
                assert ours.type_name == OTHERS[kind]
        assert model.tensors["float32"].type_name == "f32"
        begins = [each.payload.offset for each in model.tensors.values()]  # type: ignore[union-attr]
        assert begins == sorted(begins)


def test_dtypes_numpy_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = {
        "b": entry("BF16", [2, 3], [0, 12]),
        "f8": entry("F8_E4M3", [4], [12, 16]),
        "f4": entry("F4", [8], [16, 20]),
        "new": entry("F3_E1M1", [100], [20, 25]),  # its size is what its offsets say
    }
    path.write_bytes(file_of(header, bytes(range(25))))
    with open_model(path) as model:
        found = [(each.type_code, each.type_name, each.ne, each.nbytes) for each in model.tensors.values()]
        assert found == [
            (30, "bf16", (3, 2), 12),
            (None, "F8_E4M3", (4,), 4),
            (None, "F4", (8,), 4),
            (None, "F3_E1M1", (100,), 5),
        ]
        assert bytes(model.tensors["new"].view()) == bytes(range(20, 25))


def test_a_gap_is_not_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"b": entry(offsets=[8, 12]), "a": entry(offsets=[0, 4])}, bytes(range(16))))
    with open_model(path) as model:
        assert [(name, bytes(each.view())) for name, each in model.tensors.items()] == [
            ("a", b"\0\1\2\3"),
            ("b", b"\x08\x09\x0a\x0b"),
        ]


@pytest.mark.parametrize("length", [2**27, 2**31, 2**32, 2**63, 2**64 - 1, 100_000_000, 3])
def test_a_header_length_that_lies(tmp_path: Path, length: int) -> None:
    tracemalloc.start()
    try:
        error = refused_content(tmp_path, file_of(b"{}", length=length))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert error.offset == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 bytes"),
        (b"1234567", "7 bytes"),
        (file_of(b""), "not JSON"),
        (file_of(b"{"), "not JSON"),
        (file_of(b"\xff\xfe"), "not UTF-8"),
        (file_of(b"[]"), "not a JSON object"),
        (file_of(b"{" * 5000 + b"}" * 5000), "JSON"),
        (file_of(b'{"a":' * 200_000), "usable JSON"),
        (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "usable JSON"),
        (file_of(b'{"a": {}, "a": {}}'), "'a' occurs twice"),
        (file_of(b'{"a": {"dtype": "F32", "dtype": "F16"}}'), "'dtype' occurs twice"),
        (file_of({"__metadata__": 1}), "__metadata__"),
        (file_of({"t": 1}), "not a JSON object"),
        (file_of({"t": {}}), "no dtype"),
        (file_of({"t": entry(dtype=1)}, bytes(4)), "no dtype"),
        (file_of({"t": entry(shape="1")}, bytes(4)), "shape"),
        (file_of({"t": entry(shape=[-1])}, bytes(4)), "shape"),
        (file_of({"t": entry(shape=[1.0])}, bytes(4)), "shape"),
        (file_of({"t": entry(shape=[True])}, bytes(4)), "shape"),
        (file_of({"t": entry(shape=[2**32, 2**32], offsets=[0, 0])}), "63 bits"),
        (file_of({"t": entry(offsets=None)}, bytes(4)), "data_offsets"),
        (file_of({"t": entry(offsets=[0])}, bytes(4)), "data_offsets"),
        (file_of({"t": entry(offsets=[0, 2, 4])}, bytes(4)), "data_offsets"),
        (file_of({"t": entry(offsets=[-4, 0])}, bytes(4)), "data_offsets"),
        (file_of({"t": entry(offsets=[0, float("nan")])}, bytes(4)), "data_offsets"),
        (file_of({"t": entry(offsets=[4, 0])}, bytes(4)), "wrong way round"),
        (file_of({"t": entry(offsets=[0, 4])}, bytes(3)), "ends at byte"),
        (file_of({"t": entry(offsets=[2**64 - 4, 2**64])}, bytes(4)), "ends at byte"),
        (file_of({"t": entry(shape=[2])}, bytes(4)), "are not 4 bytes"),
        (file_of({"t": entry("F4", [1], [0, 1])}, bytes(4)), "are not 1 bytes"),
        (file_of({"a": entry(offsets=[0, 4]), "b": entry(offsets=[0, 4])}, bytes(8)), "overlaps"),
        (file_of({"a": entry("I8", [6], [0, 6]), "b": entry(offsets=[4, 8])}, bytes(8)), "'b' overlaps tensor 'a'"),
        (file_of({"a\0b": entry()}, bytes(4)), "NUL"),
        (file_of(b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', bytes(4)), "surrogate"),
    ],
)
def test_bad_headers(tmp_path: Path, content: bytes, said: str) -> None:
    error = refused_content(tmp_path, content)
    assert said in error.detail
    assert error.offset is not None


def test_json_errors_say_the_byte(tmp_path: Path) -> None:
    assert refused_content(tmp_path, file_of('{"ä": ?}'.encode())).offset == 8 + len('{"ä": '.encode())


def test_truncation_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(3, dtype=np.float32), "b": np.arange(5, dtype=np.int8)}, path)
    content = path.read_bytes()
    for end in range(len(content)):
        assert refused_content(tmp_path, content[:end]).offset is not None


@given(flips=st.lists(st.tuples(st.integers(0, 199), st.integers(1, 255)), min_size=1, max_size=4))
@settings(deadline=None)
def test_flipped_bytes_raise_nothing_but_model_errors(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    header = {"a": entry(), "b": entry("F16", [2, 2], [4, 12]), "__metadata__": {"k": "v"}}
    damaged = bytearray(file_of(header, bytes(12)))
    for at, mask in flips:
        damaged[at % len(damaged)] ^= mask
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelError), open_model(path) as model:
        assert all(len(each.view()) == each.nbytes <= len(damaged) for each in model.tensors.values())


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A folder with two shards and the index that lists them."""
    save_file(
        {"a": np.full(3, 1, np.float32), "b": np.full(2, 2, np.int8)}, tmp_path / "model-00001-of-00002.safetensors"
    )
    save_file({"c": np.full(4, 3, np.float16)}, tmp_path / "model-00002-of-00002.safetensors")
    write_index(tmp_path, {"a": 1, "b": 1, "c": 2})
    return tmp_path


def write_index(folder: Path, where: dict[str, Any]) -> Path:
    names = {name: f"model-{no:05d}-of-00002.safetensors" if isinstance(no, int) else no for name, no in where.items()}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 22}, "weight_map": names}))
    return path


@pytest.mark.parametrize(
    "given_path",
    ["", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
)
def test_index_folder_and_shards_open_the_whole_model(indexed: Path, given_path: str) -> None:
    before = descriptors_below(indexed)
    with open_model(indexed / given_path) as model:
        assert len(model.files) == 2
        assert set(model.tensors) == {"a", "b", "c"}
        assert bytes(model.tensors["c"].view()) == np.full(4, 3, np.float16).tobytes()
    del model
    assert descriptors_below(indexed) == before


def test_an_index_that_goes_when_it_has_been_seen_is_not_missed(indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.path.isfile

    def then_remove(path: str) -> bool:
        there = real(path)
        Path(path).unlink()
        return there

    monkeypatch.setattr(os.path, "isfile", then_remove)
    with open_model(indexed / "model-00002-of-00002.safetensors") as model:
        assert set(model.tensors) == {"a", "b", "c"}


def test_an_index_beside_a_shard_is_read_once(indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it cannot say two things."""
    real, opened = os.open, list[str]()

    def noted(path: str, *how: int) -> int:
        opened.append(os.path.basename(path))
        return real(path, *how)

    monkeypatch.setattr(os, "open", noted)
    with open_model(indexed / "model-00002-of-00002.safetensors"):
        assert opened.count("model.safetensors.index.json") == 1


def test_shards_without_an_index_open_the_whole_model(indexed: Path) -> None:
    (indexed / "model.safetensors.index.json").unlink()
    for path in (indexed, indexed / "model-00002-of-00002.safetensors"):
        with open_model(path) as model:
            assert set(model.tensors) == {"a", "b", "c"}
    (indexed / "model-00001-of-00002.safetensors").unlink()
    error = refused(indexed / "model-00002-of-00002.safetensors")
    assert error.path == str(indexed / "model-00001-of-00002.safetensors")
    assert error.offset is None
    assert "at byte" not in error.detail


def test_a_name_in_two_shards_without_an_index(indexed: Path) -> None:
    (indexed / "model.safetensors.index.json").unlink()
    save_file({"b": np.zeros(1, np.int8)}, indexed / "model-00002-of-00002.safetensors")
    assert "'b' is also in model-00001-of-00002.safetensors" in refused(indexed).detail


def test_the_index_decides_what_belongs(indexed: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_index(indexed, {"a": 1, "c": 2})
    with open_model(indexed) as model:
        assert set(model.tensors) == {"a", "c"}
    assert "1 tensors that the index does not list" in caplog.text


def test_words_that_fit_whoever_has_the_file(tmp_path: Path, indexed: Path) -> None:
    error = refused_content(tmp_path, file_of(b'{"a": ' + b"9" * 5000 + b"}"))
    assert "thousands of digits" in error.detail
    assert "sys." not in str(error)
    assert "fetch it again" in error.hint
    for content, said in ((b"x", "the index is not JSON"), (b"[]", "the index is not a JSON object")):
        (indexed / "model.safetensors.index.json").write_bytes(content)
        assert said in refused(indexed).detail


def test_a_missing_file_of_the_index(indexed: Path) -> None:
    (indexed / "model-00002-of-00002.safetensors").unlink()
    error = refused(indexed)
    assert error.path == str(indexed / "model-00002-of-00002.safetensors")
    assert "1 of 2 files" in error.detail
    assert error.offset is None
    assert "at byte" not in error.detail


def test_a_listed_tensor_that_is_not_there(indexed: Path) -> None:
    write_index(indexed, {"a": 1, "b": 1, "c": 2, "d": 2})
    error = refused(indexed)
    assert error.path == str(indexed / "model-00002-of-00002.safetensors")
    assert "'d'" in error.detail
    assert error.offset == 0


@pytest.mark.parametrize("target", ["../x.safetensors", "/etc/passwd", "..", "", 1.5, None, "a\0b"])
def test_an_index_cannot_lead_out_of_its_folder(indexed: Path, target: object) -> None:
    path = write_index(indexed, {"a": target})
    error = refused(indexed)
    assert error.path == str(path)
    assert "not the name of a file" in error.detail


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"\xff", b'{"weight_map": {"a"']
)
def test_a_bad_index(indexed: Path, content: bytes) -> None:
    path = indexed / "model.safetensors.index.json"
    path.write_bytes(content)
    assert refused(path).path == str(path)
