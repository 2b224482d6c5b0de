"""Seeding from a model that changes meanwhile: rewritten, with its date set back too, or cut short."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from support.cachedir import contents, files_in, name_of, write_model
from support.rewriting import rewrite

from weightwire.cache import copying, seed
from weightwire.errors import ModelError
from weightwire.index import HashIndex
from weightwire.model import open_model

pytestmark = pytest.mark.usefixtures("small_threshold")


@pytest.mark.parametrize("threads", [0, 2])
def test_a_model_that_is_rewritten_with_its_old_date(tmp_path: Path, threads: int, index: HashIndex) -> None:
    model = write_model(tmp_path / "model.safetensors", contents(1001, 5000, 70_000, 3 << 20))
    directory = tmp_path / "entries"
    rewritten = []

    def once(name: str, done: int, total: int) -> None:
        if not rewritten:
            rewritten.append(name)
            rewrite(model)

    with pytest.raises(ModelError, match="though its date is the same"):
        seed(model, directory, threads=threads, index=index, progress=once)
    for name, data in files_in(directory).items():
        assert name == name_of(data)
    assert index.owners() == {}


@pytest.mark.parametrize("way", ["copy_file_range", "preadv"])
def test_a_model_that_is_rewritten_meanwhile(
    way: str, model: Path, directory: Path, tensors: dict[str, bytes], index: HashIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lands in the directory is named after what it is, and nothing wrong is remembered."""
    real = getattr(os, way)

    def refuse(*_: Any) -> Any:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if way == "preadv":
        monkeypatch.setattr(os, "copy_file_range", refuse)

    def rewriting(*arguments: Any) -> Any:
        monkeypatch.setattr(os, way, real)
        old = model.read_bytes()
        at = old.index(tensors["t6"])
        with open(model, "r+b") as file:
            file.seek(at)
            file.write(b"other bytes")
        return real(*arguments)

    monkeypatch.setattr(os, way, rewriting)
    monkeypatch.setattr(copying, "_clone", lambda source, target: 0)
    with pytest.raises(ModelError, match="modified"):
        seed(model, directory, threads=0, index=index)
    for name, data in files_in(directory).items():
        assert name == name_of(data)
    assert index.owners() == {}
    changed = b"other bytes" + tensors["t6"][11:]
    assert name_of(changed) in files_in(directory)
    assert name_of(tensors["t6"]) not in files_in(directory)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_model_that_is_cut_short_meanwhile(
    threads: int, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: object
) -> None:
    with open_model(model) as opened:
        os.truncate(model, 2000)
        with pytest.raises(ModelError, match="shorter"):
            seed(opened, directory, threads=threads, index=False)
    for name, data in files_in(directory).items():
        assert name == name_of(data)
