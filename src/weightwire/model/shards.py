"""Models split over several files: which files they are, and whether those belong together."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from weightwire.errors import ModelError
from weightwire.model.base import Model, ModelFile, ModelTensor
from weightwire.model.gguf import GgufHeader, read_gguf

__all__ = ["ShardName", "merge_tensors", "open_files", "open_gguf", "shard_paths"]

_SHARD: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.gguf|\.safetensors)", re.DOTALL)
_IDENTITY: Final = ("general.architecture", "general.name", "general.uuid")


class ShardName(NamedTuple):
    """The parts of a shard's file name: ``{prefix}-{no:05d}-of-{total:05d}{suffix}``, counted from 1."""

    prefix: str
    no: int
    total: int
    suffix: str

    @classmethod
    def parse(cls, name: str) -> ShardName | None:
        """The parts of ``name`` (without a folder), or None where it is not a shard's."""
        match = _SHARD.fullmatch(name)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]), match[4])

    def sibling(self, no: int) -> str:
        """The name of shard ``no`` of the same model."""
        return f"{self.prefix}-{no:05d}-of-{self.total:05d}{self.suffix}"


def shard_paths(path: str) -> list[str]:
    """All files of the model that ``path`` is in, in order: the shards if its name is a shard's, or itself alone.

    ModelError where the name contradicts itself, or shards are missing.
    """
    folder, name = os.path.split(path)
    shard = ShardName.parse(name)
    if shard is None:
        return [path]
    if not 1 <= shard.no <= shard.total:
        raise ModelError(f"the name says shard {shard.no} of {shard.total}", path=path, hint="shards count from 1")
    paths = [os.path.join(folder, shard.sibling(no)) for no in range(1, shard.total + 1)]
    missing = [each for each in paths if not os.path.lexists(each)]
    if len(missing) == shard.total:
        raise ModelError(f"none of the {shard.total} shards is there", path=path, hint="check the path")
    if missing:
        raise ModelError(
            f"{len(missing)} of {shard.total} shards missing, the first of them {os.path.basename(missing[0])}",
            path=missing[0],
            hint="all shards of a model must lie in one folder",
        )
    return paths


def open_files(paths: Sequence[str]) -> list[ModelFile]:
    """Open every file, or none: what was opened is closed again when one cannot be."""
    files: list[ModelFile] = []
    try:
        files.extend(map(ModelFile, paths))
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def merge_tensors(files: Sequence[ModelFile], parts: Sequence[dict[str, ModelTensor]]) -> dict[str, ModelTensor]:
    """The tensors of all ``files`` in order; ModelError for a name that two of them have."""
    merged: dict[str, ModelTensor] = {}
    owner: dict[str, ModelFile] = {}
    for file, part in zip(files, parts, strict=True):
        for name, tensor in part.items():
            if name in merged:
                raise ModelError(
                    f"tensor {name!r} is also in {os.path.basename(owner[name].path)}",
                    path=file.path,
                    offset=getattr(tensor.payload, "offset", None),
                    hint="these files are not shards of one model",
                )
            merged[name] = tensor
            owner[name] = file
    return merged


def open_gguf(path: str) -> Model:
    """Open a GGUF file; any shard of a split one opens all of it. ModelError for anything amiss."""
    files = open_files(shard_paths(path))
    try:
        headers = [read_gguf(file) for file in files]
        if len(files) == 1:
            _check_whole(files[0], headers[0])
        else:
            _check_shards(files, headers)
        metadata: dict[str, object] = {}
        for header in headers:
            for key, value in header.metadata.items():
                metadata.setdefault(key, value)
        tensors = merge_tensors(files, [header.tensors for header in headers])
        return Model(tensors, format="gguf", path=path, files=files, metadata=metadata)
    except BaseException:
        for file in files:
            file.close()
        raise


def _check_whole(file: ModelFile, header: GgufHeader) -> None:
    count = header.metadata.get("split.count", 1)
    if count not in (0, 1):
        raise ModelError(
            f"this is one of {count} shards (split.count), but the file's name does not say which",
            path=file.path,
            offset=header.key_offsets["split.count"],
            hint="name the shards as gguf-split does: NAME-00001-of-0000N.gguf, all in one folder",
        )


def _check_shards(files: Sequence[ModelFile], headers: Sequence[GgufHeader]) -> None:
    """ModelError unless the files are, by what they say of themselves, the shards their names say they are."""
    hint = "shards of different models are mixed; fetch all of them again from one place"
    total = sum(len(header.tensors) for header in headers)
    identity: dict[str, object] = {}
    for index, (file, header) in enumerate(zip(files, headers, strict=True)):
        for key, expected in (("split.count", len(files)), ("split.no", index), ("split.tensors.count", total)):
            actual = header.metadata.get(key)
            if actual is None and key != "split.tensors.count":
                place = header.key_offsets.get(key, 0)
                raise ModelError(f"foreign shard: it has no {key}", path=file.path, offset=place, hint=hint)
            if actual is not None and actual != expected:
                detail = f"foreign shard: {key} is {actual}, where {expected} fits"
                raise ModelError(detail, path=file.path, offset=header.key_offsets[key], hint=hint)
        for key in _IDENTITY:
            value = header.metadata.get(key)
            if value is not None and identity.setdefault(key, value) != value:
                detail = f"foreign shard: {key} is {value!r}, and the first shard's is {identity[key]!r}"
                raise ModelError(detail, path=file.path, offset=header.key_offsets[key], hint=hint)
