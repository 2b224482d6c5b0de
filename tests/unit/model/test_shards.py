"""Split GGUF: any shard opens all of them, and shards that do not belong together are told apart."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from support import raw_gguf as raw
from support.leaks import descriptors_below

from weightwire.errors import ModelError
from weightwire.model import open_model

Split = tuple[int | None, int | None, int | None]


def shard(
    folder: Path,
    no: int,
    count: int,
    names: Sequence[str],
    *,
    prefix: str = "model",
    split: Split | None = None,
    pairs: Sequence[bytes] = (),
) -> Path:
    """Shard `no` (from 1), 16 bytes per name; `split` is what it says: number from 0, count, tensors."""
    own = (no - 1, count, 3) if split is None else split
    said = list(pairs)
    for key, kind, layout, value in (
        ("split.no", 2, "<H", own[0]),
        ("split.count", 2, "<H", own[1]),
        ("split.tensors.count", 5, "<i", own[2]),
    ):
        if value is not None:
            said.append(raw.pair(key, kind, struct.pack(layout, value)))
    tensors = [raw.tensor(name, (4,), 0, 32 * index) for index, name in enumerate(names)]
    data = b"".join(bytes([no]) * 16 + bytes(16) for _ in names)
    path = folder / f"{prefix}-{no:05d}-of-{count:05d}.gguf"
    path.write_bytes(raw.build(said, tensors, data))
    return path


def architecture(name: str) -> bytes:
    return raw.pair("general.architecture", raw.STRING, raw.string(name))


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Three shards of a model of three tensors, the last of them without any."""
    return [
        shard(tmp_path, 1, 3, ["a", "b"], pairs=[architecture("llama")]),
        shard(tmp_path, 2, 3, ["c"]),
        shard(tmp_path, 3, 3, []),
    ]


def key_offset(path: Path, key: str) -> int:
    """Where a metadata key's entry begins: its length, of 8 bytes, and then the key."""
    at = path.read_bytes().index(struct.pack("<Q", len(key)) + key.encode())
    assert at > 0
    return at


def refused(path: Path) -> ModelError:
    before = descriptors_below(path.parent)
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert descriptors_below(path.parent) == before
    return caught.value


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_all(shards: list[Path], given: int) -> None:
    before = descriptors_below(shards[0].parent)
    with open_model(shards[given]) as model:
        assert model.path == str(shards[given])
        assert model.files == tuple(map(str, shards))
        assert list(model.tensors) == ["a", "b", "c"]
        assert [bytes(each.view()) for each in model.tensors.values()] == [b"\1" * 16, b"\1" * 16, b"\2" * 16]
        assert model.metadata["general.architecture"] == "llama"
        assert model.nbytes == 48
    del model
    assert descriptors_below(shards[0].parent) == before


def test_a_relative_path_opens_all(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shards[0].parent)
    with open_model(shards[1].name) as model:
        assert len(model.tensors) == 3


def test_a_folder_of_shards_is_one_model(shards: list[Path]) -> None:
    with open_model(shards[0].parent) as model:
        assert len(model.files) == 3


def test_shards_written_by_the_gguf_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", split_max_tensors=2)
    content = {f"t{index}": np.full((3, 4), index, dtype=np.float32) for index in range(5)}
    for name, array in content.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_model(tmp_path / "big-00002-of-00003.gguf") as model:
        assert {name: bytes(each.view()) for name, each in model.tensors.items()} == {
            name: array.tobytes() for name, array in content.items()
        }


def test_a_missing_shard_is_named(shards: list[Path]) -> None:
    shards[1].unlink()
    error = refused(shards[2])
    assert error.path == str(shards[1])
    assert "1 of 3 shards missing" in error.detail
    assert error.offset is None
    assert "at byte" not in error.detail
    assert error.hint
    # The folder is no way around it.
    assert refused(shards[0].parent).path == str(shards[1])


def test_a_missing_shard_that_was_asked_for_is_a_missing_file(shards: list[Path]) -> None:
    shards[1].unlink()
    error = refused(shards[1])
    assert error.path == str(shards[1])
    assert isinstance(error.__cause__, FileNotFoundError)


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ((1, 4, 3), "split.count is 4"),
        ((2, 3, 3), "split.no is 2"),
        ((0, 3, 3), "split.no is 0"),
        ((1, 3, 7), "split.tensors.count is 7"),
        ((None, 3, 3), "no split.no"),
        ((1, None, 3), "no split.count"),
        ((None, None, None), "no split.count"),
    ],
)
def test_a_foreign_shard_is_named(shards: list[Path], split: Split, said: str) -> None:
    shard(shards[0].parent, 2, 3, ["c"], split=split)
    error = refused(shards[0])
    assert error.path == str(shards[1])
    assert said in error.detail
    # An absent key has no place: the file's first byte then.
    key = said.split()[0]
    assert error.offset == (0 if key == "no" else key_offset(shards[1], key))


def test_a_shard_with_too_few_tensors_is_noticed(shards: list[Path]) -> None:
    shard(shards[0].parent, 2, 3, [])
    error = refused(shards[1])
    assert "split.tensors.count is 3, where 2 fits" in error.detail
    assert error.path == str(shards[0])
    assert error.offset == key_offset(shards[0], "split.tensors.count")


def test_a_shard_of_another_architecture_is_named(shards: list[Path]) -> None:
    shard(shards[0].parent, 2, 3, ["c"], pairs=[architecture("gemma3")])
    error = refused(shards[0])
    assert error.path == str(shards[1])
    assert error.offset == key_offset(shards[1], "general.architecture")
    assert "general.architecture is 'gemma3'" in error.detail


def test_a_name_in_two_shards_is_refused(shards: list[Path]) -> None:
    shard(shards[0].parent, 2, 3, ["b"])
    error = refused(shards[0])
    assert error.path == str(shards[1])
    assert "'b' is also in model-00001-of-00003.gguf" in error.detail
    assert error.offset is not None


def test_a_truncated_shard_is_named(shards: list[Path]) -> None:
    shards[1].write_bytes(shards[1].read_bytes()[:-20])
    error = refused(shards[0])
    assert error.path == str(shards[1])
    assert error.offset is not None


def test_a_shard_under_another_name_says_what_to_do(shards: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "renamed.gguf"
    shutil.copy(shards[0], other)
    error = refused(other)
    assert "one of 3 shards" in error.detail
    assert error.offset == key_offset(other, "split.count")
    assert error.hint


@pytest.mark.parametrize("name", ["m-00000-of-00002.gguf", "m-00003-of-00002.gguf"])
def test_a_name_that_contradicts_itself(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(raw.build())
    assert "the name says shard" in refused(path).detail


def test_one_of_one_needs_no_split_keys(tmp_path: Path) -> None:
    path = shard(tmp_path, 1, 1, ["a"], split=(None, None, None))
    with open_model(path) as model:
        assert list(model.tensors) == ["a"]
