"""safetensors: one file, or several with a ``*.safetensors.index.json``.

Source: the safetensors format (huggingface/safetensors, README "Format"): a 64-bit length, that much JSON, the data.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Final, NoReturn

from weightwire.errors import ModelError
from weightwire.model.base import Model, ModelFile, ModelTensor, element_count, usable_name
from weightwire.model.shards import ShardName, merge_tensors, open_files, shard_paths
from weightwire.wire.types import TYPES

__all__ = ["INDEX_SUFFIX", "MAX_HEADER", "open_safetensors", "open_safetensors_index", "read_safetensors"]

INDEX_SUFFIX: Final = ".safetensors.index.json"
MAX_HEADER: Final = 100_000_000
"""Bytes of JSON at most, as in the safetensors package."""

_log = logging.getLogger(__name__)

_GGML: Final = {"F64": 28, "F32": 0, "F16": 1, "BF16": 30, "I64": 27, "I32": 26, "I16": 25, "I8": 24}
_NUMPY: Final = {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1", "C64": "<c8"}
"""Types that numpy has and ggml has not."""
_BITS: Final = {
    name: bits
    for bits, names in {
        64: "F64 I64 U64 C64",
        32: "F32 I32 U32",
        16: "F16 BF16 I16 U16",
        8: "I8 U8 BOOL F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        6: "F6_E2M3 F6_E3M2",
        4: "F4",
    }.items()
    for name in names.split()
}


class _DuplicateKey(ValueError):
    """A JSON object that says the same key twice."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return result


def _parse(data: bytes, path: str, start: int, what: str = "header") -> dict[str, object]:
    """The JSON object in ``data``, which lies at byte ``start`` of ``path`` and is its ``what``."""
    try:
        text = data.decode()
        parsed = json.loads(text, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ModelError(f"the {what} is not UTF-8: {error.reason}", path=path, offset=start + error.start) from error
    except _DuplicateKey as error:
        raise ModelError(f"key {error.args[0]!r} occurs twice", path=path, offset=start) from error
    except json.JSONDecodeError as error:
        at = start + len(text[: error.pos].encode(errors="surrogatepass"))
        raise ModelError(f"the {what} is not JSON: {error.msg}", path=path, offset=at) from error
    except ValueError as error:
        # The only other thing that json refuses. Python's own words advise the program, not whoever has the file.
        detail = f"the {what} is not usable JSON: a number in it has thousands of digits"
        raise ModelError(detail, path=path, offset=start, hint="the file is damaged; fetch it again") from error
    except RecursionError as error:
        detail = f"the {what} is not usable JSON: its brackets are nested too deep"
        raise ModelError(detail, path=path, offset=start, hint="the file is damaged; fetch it again") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"the {what} is not a JSON object", path=path, offset=start)
    return parsed


def _natural(value: object) -> bool:
    return type(value) is int and value >= 0


def read_safetensors(file: ModelFile) -> tuple[dict[str, ModelTensor], dict[str, object]]:
    """The tensors of one file, in the order of their data, and its ``__metadata__``.

    ModelError for anything the header cannot be trusted on. Gaps between tensors, which the safetensors package
    refuses, are allowed: nothing is read from them.
    """
    if file.size < 8:
        raise ModelError(f"not a safetensors file: {file.size} bytes", path=file.path, offset=0, hint="fetch it again")
    length = int.from_bytes(file.read_at(0, 8), "little")
    if length > MAX_HEADER:
        raise ModelError(
            f"the header cannot be {length} bytes long (the limit is {MAX_HEADER})",
            path=file.path,
            offset=0,
            hint="this is not a safetensors file, or a damaged one",
        )
    if length > file.size - 8:
        raise ModelError(
            f"the header is {length} bytes long, and {file.size - 8} follow",
            path=file.path,
            offset=0,
            hint="the file is truncated; fetch it again",
        )
    header = _parse(file.read_at(8, length), file.path, 8)
    metadata: dict[str, object] = {}
    ranges: list[tuple[int, int, ModelTensor]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            if not isinstance(entry, dict):
                raise ModelError("__metadata__ is not a JSON object", path=file.path, offset=8)
            metadata = {key: value for key, value in entry.items() if isinstance(value, str | int | float)}
            continue
        begin, tensor = _read_entry(file, 8 + length, name, entry)
        ranges.append((begin, begin + tensor.nbytes, tensor))
    ranges.sort(key=lambda each: each[:2])
    before, reached = "", 0
    for begin, end, tensor in ranges:
        if begin < reached and end > begin:
            at = 8 + length + begin
            raise ModelError(f"tensor {tensor.name!r} overlaps tensor {before!r}", path=file.path, offset=at)
        if end > reached:
            before, reached = tensor.name, end
    return {tensor.name: tensor for _, _, tensor in ranges}, metadata


def _read_entry(file: ModelFile, data: int, name: str, entry: object) -> tuple[int, ModelTensor]:
    """One entry of the header; ``data`` is where the file's data starts. Returns where in the data it begins, too."""

    def refuse(problem: str, offset: int = 8) -> NoReturn:
        raise ModelError(f"tensor {name!r}: {problem}", path=file.path, offset=offset)

    if not usable_name(name):
        refuse("its name has a NUL or half a surrogate pair in it")
    if not isinstance(entry, dict):
        refuse("its entry is not a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        refuse("it has no dtype")
    if not isinstance(shape, list) or not all(map(_natural, shape)):
        refuse("its shape is not a list of numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        refuse("its data_offsets are not two numbers")
    begin, end = offsets
    if begin > end:
        refuse(f"its data_offsets {begin} and {end} are the wrong way round")
    if end > file.size - data:
        raise ModelError(
            f"tensor {name!r} ends at byte {data + end}, and the file at {file.size}",
            path=file.path,
            offset=min(data + begin, file.size),
            hint="the file is truncated; fetch it again",
        )
    count = element_count(shape)
    if count is None:
        refuse("its shape has more elements than 63 bits count")
    bits = _BITS.get(dtype)
    if bits is not None and count * bits != 8 * (end - begin):
        refuse(f"{count} elements of {dtype} are not {end - begin} bytes", data + begin)
    code = _GGML.get(dtype)
    return begin, ModelTensor(
        name=name,
        type_code=code,
        type_name=dtype if code is None else TYPES[code].name,
        ne=tuple(reversed(shape)) or (1,),
        nbytes=end - begin,
        payload=file.range(data + begin, end - begin),
        dtype=_NUMPY.get(dtype),
        _file=file,
    )


def open_safetensors(path: str) -> Model:
    """Open a safetensors file; a shard (``model-00001-of-00004.safetensors``) opens the whole model.

    The index beside a shard says which files those are; without an index it is all of the numbered ones.
    """
    folder, name = os.path.split(path)
    shard = ShardName.parse(name)
    if shard is not None:
        index = os.path.join(folder, shard.prefix + INDEX_SUFFIX)
        weights = _index_there(index)
        if name in weights.values():
            return _open(path, [], (index, weights))
    return _open(path, shard_paths(path), None)


def open_safetensors_index(index: str, path: str | None = None) -> Model:
    """Open the model that ``index`` (``model.safetensors.index.json``) lists; ``path`` is what the caller asked for.

    Tensors the index does not list are left out; ModelError where a listed one is not in the file that should have it.
    """
    return _open(path or index, [], (index, _read_index(index)))


def _index_there(index: str) -> dict[str, str]:
    """`_read_index`; empty if there is no such file."""
    if not os.path.isfile(index):
        return {}
    try:
        return _read_index(index)
    except ModelError as error:
        if isinstance(error.__cause__, FileNotFoundError):  # removed since
            return {}
        raise


def _read_index(index: str) -> dict[str, str]:
    """The index's map from tensor names to file names."""
    file = ModelFile(index)
    try:
        if file.size > MAX_HEADER:
            raise ModelError(f"an index cannot be {file.size} bytes long (the limit is {MAX_HEADER})", path=index)
        weights = _parse(file.read_at(0, file.size), index, 0, "index").get("weight_map")
    finally:
        file.close()
    if not isinstance(weights, dict) or not weights:
        raise ModelError("the index has no weight_map", path=index, hint="this is not a safetensors index")
    for name, target in weights.items():
        # A name that leads out of the folder would make an index open any file of the machine.
        if not isinstance(target, str) or target in ("", ".", "..") or "/" in target or not usable_name(target):
            detail = f"tensor {name!r} is said to be in {target!r}, which is not the name of a file here"
            raise ModelError(detail, path=index)
    return weights


def _open(path: str, paths: list[str], index: tuple[str, Mapping[str, str]] | None) -> Model:
    if index is not None:
        folder = os.path.dirname(index[0])
        paths = [os.path.join(folder, name) for name in dict.fromkeys(sorted(index[1].values()))]
        missing = [each for each in paths if not os.path.lexists(each)]
        if missing:
            raise ModelError(
                f"{len(missing)} of {len(paths)} files that the index lists are missing, the first of them "
                f"{os.path.basename(missing[0])}",
                path=missing[0],
                hint="all files of a model must lie in the index's folder",
            )
    files = open_files(paths)
    try:
        metadata: dict[str, object] = {}
        parts: list[dict[str, ModelTensor]] = []
        for file in files:
            tensors, own = read_safetensors(file)
            parts.append(tensors if index is None else _listed(file, tensors, index))
            for key, value in own.items():
                metadata.setdefault(key, value)
        return Model(merge_tensors(files, parts), format="safetensors", path=path, files=files, metadata=metadata)
    except BaseException:
        for file in files:
            file.close()
        raise


def _listed(
    file: ModelFile, tensors: dict[str, ModelTensor], index: tuple[str, Mapping[str, str]]
) -> dict[str, ModelTensor]:
    """Those of a file's ``tensors`` that the index says are in it."""
    own = os.path.basename(file.path)
    listed = {name for name, target in index[1].items() if target == own}
    absent = listed - tensors.keys()
    if absent:
        raise ModelError(
            f"{os.path.basename(index[0])} says that tensor {min(absent)!r} is in this file, and it is not",
            path=file.path,
            offset=0,
            hint="shards of different models are mixed; fetch all of them again from one place",
        )
    if len(listed) < len(tensors):
        _log.warning("%s: %d tensors that the index does not list are left out", file.path, len(tensors) - len(listed))
    return {name: tensor for name, tensor in tensors.items() if name in listed}
