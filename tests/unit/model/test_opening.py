"""What `open_model` takes, and how it refuses what is not a model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import raw_gguf as raw
from support.leaks import descriptors_below

from weightwire.errors import ConfigError, ModelError
from weightwire.model import open_model

GGUF = raw.build([], [raw.tensor("t", (4,), 0, 0)], bytes(range(16)))


@pytest.fixture(autouse=True)
def _no_descriptor_is_left(tmp_path: Path) -> Iterator[None]:
    before = descriptors_below(tmp_path)
    yield
    assert descriptors_below(tmp_path) == before


def refused(path: Path | str | bytes) -> ModelError:
    with pytest.raises(ModelError) as caught:
        open_model(path)
    return caught.value


@pytest.mark.parametrize("path", ["", b""])
def test_an_empty_path(path: str | bytes) -> None:
    error = refused(path)
    assert "'' cannot be opened" in error.detail
    assert error.hint


def test_paths_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF)
    for given in (path, str(path), os.fsencode(path)):
        with open_model(given) as model:
            assert list(model.tensors) == ["t"]
            assert model.path == str(path)


def test_the_content_decides_rather_than_the_name(tmp_path: Path) -> None:
    blob = tmp_path / "sha256-0123"
    blob.write_bytes(GGUF)
    with open_model(blob) as model:
        assert model.format == "gguf"
    save_file({"t": np.zeros(1, np.float32)}, blob)
    with open_model(blob) as model:
        assert model.format == "safetensors"
    wrong = tmp_path / "wrong.safetensors"
    wrong.write_bytes(GGUF)
    with open_model(wrong) as model:
        assert model.format == "gguf"


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(GGUF)
    (tmp_path / "model.gguf").symlink_to("blob")
    with open_model(tmp_path / "model.gguf") as model:
        assert list(model.tensors) == ["t"]


def test_a_missing_file(tmp_path: Path) -> None:
    error = refused(tmp_path / "absent.gguf")
    assert error.path == str(tmp_path / "absent.gguf")
    assert isinstance(error.__cause__, FileNotFoundError)
    assert error.hint
    assert "No such file" in str(error)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF)
    real = os.open

    # Permissions do not bind root, which tests may run as.
    def guarded(name: str, flags: int, mode: int = 0o777) -> int:
        if name == str(path):
            raise PermissionError(13, "Permission denied", name)
        return real(name, flags, mode)

    monkeypatch.setattr(os, "open", guarded)
    error = refused(path)
    assert isinstance(error.__cause__, PermissionError)
    assert "Permission denied" in error.detail
    assert error.hint


@pytest.mark.timeout(20)
def test_a_fifo_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refused(tmp_path / "pipe.gguf").detail


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "", "/dev/null", "loop"])
def test_paths_that_cannot_be(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert refused(name).detail


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "model.safetensors.index.json", "model"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert refused(tmp_path / name).path == str(tmp_path / name)


def test_text_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A model card\n")
    assert "not a GGUF file" in refused(tmp_path / "README.md").detail


def test_a_folder_with_one_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".partial.gguf").write_bytes(b"")
    (tmp_path / "model.gguf").write_bytes(GGUF)
    with open_model(tmp_path) as model:
        assert model.path == str(tmp_path / "model.gguf")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    error = refused(tmp_path)
    assert error.path == str(tmp_path)
    assert error.hint


@pytest.mark.parametrize("other", ["b.gguf", "model.safetensors", "worst-of-breed.gguf"])
def test_a_folder_with_several_models(tmp_path: Path, other: str) -> None:
    (tmp_path / "best-of-breed.gguf").write_bytes(GGUF)
    (tmp_path / other).write_bytes(GGUF)
    error = refused(tmp_path)
    assert "2 models" in error.detail
    assert other in error.detail


def test_a_folder_called_like_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "model.gguf"
    folder.mkdir()
    assert "no GGUF or safetensors file" in refused(folder).detail


def test_what_is_neither_path_nor_mapping() -> None:
    for source in (7, None, 1.5, [1], object()):
        with pytest.raises(ConfigError, match="neither a path nor a mapping"):
            open_model(source)  # type: ignore[arg-type]


def test_opening_a_file_needs_no_numpy(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF)
    code = (
        "import sys; from weightwire.model import open_model\n"
        "with open_model(sys.argv[1]) as model: bytes(model.tensors['t'].view())\n"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)


@pytest.mark.model
def test_the_real_model_as_the_gguf_package_reads_it(gemma_path: Path) -> None:
    reader = gguf.GGUFReader(gemma_path)
    with open_model(gemma_path) as model:
        assert len(model.tensors) == 236
        assert model.metadata["general.architecture"] == "gemma3"
        assert list(model.tensors) == [each.name for each in reader.tensors]
        for theirs in reader.tensors:
            ours = model.tensors[theirs.name]
            assert ours.type_code == int(theirs.tensor_type)
            assert ours.ne == tuple(int(extent) for extent in theirs.shape)
            assert ours.nbytes == int(theirs.n_bytes)
            assert ours.payload.offset == int(theirs.data_offset)  # type: ignore[union-attr]
            assert ours.view() == theirs.data.data.cast("B")
