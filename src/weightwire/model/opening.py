"""`open_model`: from what the caller has to a Model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Final

from weightwire.config import shown
from weightwire.errors import ConfigError, ModelError
from weightwire.model.arrays import open_arrays
from weightwire.model.base import Model, ModelFile, refuse
from weightwire.model.gguf import MAGIC
from weightwire.model.safetensors import INDEX_SUFFIX, open_safetensors, open_safetensors_index
from weightwire.model.shards import ShardName, open_gguf, shard_paths

__all__ = ["open_model", "opened_model"]

_SUFFIXES: Final = (".gguf", ".safetensors")

_Source = str | bytes | os.PathLike[str] | os.PathLike[bytes] | Mapping[str, object] | Model


def open_model(source: _Source) -> Model:
    """Open a model; nothing but headers is read.

    ``source`` is a GGUF or safetensors file, any shard of a split model, a ``*.safetensors.index.json``, a folder with
    one model in it, a mapping from names to arrays (anything with the buffer protocol), or a Model, which is returned
    as it is.

    Raises ModelError, with the path and the byte, for whatever is missing, unreadable, truncated or malformed, and
    ConfigError for a ``source`` that is none of these.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, Mapping):
        return open_arrays(source)
    try:
        path = os.fsdecode(source)
    except TypeError as error:
        raise ConfigError(
            f"model: {shown(source)} is neither a path nor a mapping of arrays",
            hint="give the path of a GGUF or safetensors file, a mapping from names to arrays, or an open model",
        ) from error
    if not path:
        raise ModelError(
            "'' cannot be opened: the path is empty", hint="name a GGUF or safetensors file, or its folder"
        )
    if os.path.isdir(path):
        return _open_file(_model_in(path))
    return _open_file(path)


@contextlib.contextmanager
def opened_model(source: _Source) -> Iterator[Model]:
    """`open_model` as a context manager that closes what it has opened: a Model stays as open as it was given."""
    model = open_model(source)
    try:
        yield model
    finally:
        if model is not source:
            model.close()


def _open_file(path: str) -> Model:
    # The content decides, not the name: the blobs of a download cache have no suffix.
    file = _opened_or_missing(path)
    try:
        start = file.read_at(0, min(9, file.size))
    finally:
        file.close()
    if start[:4] == MAGIC:
        return open_gguf(path)
    if path.endswith(INDEX_SUFFIX):
        return open_safetensors_index(path)
    if path.endswith(".safetensors") or start[8:9] == b"{":
        return open_safetensors(path)
    # Whatever it is, the GGUF walk can name it best.
    return open_gguf(path)


def _opened_or_missing(path: str) -> ModelFile:
    """The file at ``path``. A shard that is not there is told together with the others of its model."""
    try:
        return ModelFile(path)
    except ModelError as error:
        if isinstance(error.__cause__, FileNotFoundError) and not os.path.lexists(path):
            try:
                shard_paths(path)
            except ModelError as missing:
                raise missing from error.__cause__
        raise


def _model_in(folder: str) -> str:
    """The path of the only model in ``folder``."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise refuse(error, folder, "list") from error
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if f"model{INDEX_SUFFIX}" in indices:
        indices = [f"model{INDEX_SUFFIX}"]
    found = indices or _first_of_each([name for name in names if name.endswith(_SUFFIXES) and not name.startswith(".")])
    if not found:
        raise ModelError("no GGUF or safetensors file in this folder", path=folder, hint="name the model file itself")
    if len(found) > 1:
        listed = ", ".join(found[:4]) + (" …" if len(found) > 4 else "")
        raise ModelError(f"{len(found)} models in this folder: {listed}", path=folder, hint="name one of them")
    return os.path.join(folder, found[0])


def _first_of_each(names: list[str]) -> list[str]:
    """``names``, with only the first present shard of every split model."""
    first: dict[tuple[str, ...], str] = {}
    for name in names:
        shard = ShardName.parse(name)
        first.setdefault((name,) if shard is None else (shard.prefix, str(shard.total), shard.suffix), name)
    return list(first.values())
