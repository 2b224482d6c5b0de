"""A model that is closed while it is being read: whoever reads it, and in whichever way, says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from weightwire import Server, connect, open_model, push_all, warm
from weightwire.client import sender
from weightwire.errors import ModelError
from weightwire.hashing import hash_payload
from weightwire.index.digest import hash_with_digest
from weightwire.model import Model
from weightwire.model.reading import read_bytes
from weightwire.ranges import FileRange

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    arrays = {f"t{number:02}": np.full(3 * MIB, number, np.uint8) for number in range(6)}
    arrays |= {f"u{number:02}": np.full(10 * MIB + 1, number, np.uint8) for number in range(3)}  # what is cached
    arrays |= {f"s{number:02}": np.full(100, number, np.uint8) for number in range(16)}
    save_file(arrays, tmp_path / "m.safetensors")
    with open_model(tmp_path / "m.safetensors") as model:
        yield model


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(port=0, cache=tmp_path / "cache", memory=1 << 30) as server:
        yield server


def says_so(error: ModelError, model: Model) -> None:
    assert "the model is closed" in error.detail
    assert error.path == model.files[0]
    assert "close()" in error.hint


def closing(model: Model) -> Callable[..., None]:
    """Progress that closes the model once something of it has been sent."""

    def progress(name: str, done: int, total: int) -> None:
        model.close()

    return progress


@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize("read", ["auto", "mmap", "read"])
@pytest.mark.parametrize("cache", ["never", "auto"])
def test_during_a_push(model: Model, server: Server, read: str, cache: str, optimized: bool) -> None:
    with connect(server.endpoints[0], optimized=optimized) as connection, pytest.raises(ModelError) as caught:
        connection.push(model, read=read, cache=cache, index=False, progress=closing(model))
    says_so(caught.value, model)


@pytest.mark.parametrize("nbytes", [3 * MIB, 100], ids=["in slices", "whole"])
def test_in_the_midst_of_a_tensor(model: Model, server: Server, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(sender, "SLICE", MIB)
    monkeypatch.setattr(sender, "_FIRST_SLICE", MIB)
    include = "t" if nbytes > 100 else "s"
    with connect(server.endpoints[0]) as connection, pytest.raises(ModelError) as caught:
        connection.push(model, include=include, cache="never", progress=closing(model))
    says_so(caught.value, model)


def test_during_verification(model: Model, server: Server) -> None:
    seen: list[str] = []

    def progress(name: str, done: int, total: int) -> None:
        if name in seen:
            model.close()
        seen.append(name)

    with connect(server.endpoints[0]) as connection, pytest.raises(ModelError) as caught:
        connection.push(model, verify=True, cache="never", progress=progress)
    says_so(caught.value, model)


def test_several_servers(model: Model, server: Server) -> None:
    with push_all(model, server.endpoints[0], progress=closing(model), index=False) as pushed:
        assert isinstance(pushed[0].error, ModelError)
        says_so(pushed[0].error, model)


def test_while_a_cache_is_warmed(model: Model, server: Server) -> None:
    (warmed,) = warm(model, server.endpoints[0], progress=closing(model), index=False)
    assert isinstance(warmed.error, ModelError)
    says_so(warmed.error, model)


def test_arrays_in_a_mapped_file(tmp_path: Path, server: Server) -> None:
    """In a private mapping, which is read as this process's memory, and in a shared one, which is read as the file."""
    path = tmp_path / "bytes"
    path.write_bytes(bytes(8 * MIB))
    for mode in ("c", "r"):
        mapped = np.memmap(path, np.uint8, mode)
        with open_model({f"t{n}": mapped[n * MIB : (n + 1) * MIB] for n in range(8)}) as model:
            with connect(server.endpoints[0]) as connection, pytest.raises(ModelError) as caught:
                connection.push(model, cache="never", progress=closing(model))
            says_so(caught.value, model)


@pytest.mark.parametrize(
    "reader",
    [hash_payload, hash_with_digest, lambda payload: read_bytes(payload, 0, 8)],
    ids=["fnv1a", "with a digest", "read"],
)
def test_whoever_reads_a_range(model: Model, reader: Callable[[Any], object]) -> None:
    payload = model.tensors["t00"].payload
    assert isinstance(payload, FileRange)
    model.close()
    with pytest.raises(ModelError) as caught:
        reader(payload)
    says_so(caught.value, model)


def test_views_and_looking_whether_it_has_changed(model: Model) -> None:
    model.close()
    for call in (model.check_unchanged, model.tensors["t00"].view):
        with pytest.raises(ModelError) as caught:
            call()
        says_so(caught.value, model)
