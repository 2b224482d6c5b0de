"""GGUF, versions 2 and 3: a walk over the header that finds where every tensor lies.

Source: the GGUF specification (ggml, docs/gguf.md). Nothing is decoded that is not kept: arrays, such as a vocabulary,
are stepped over. Every count, length and offset is compared with the file before it is believed.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from weightwire.errors import ModelError
from weightwire.model.base import ModelFile, ModelTensor, element_count, usable_name
from weightwire.model.cursor import HeaderCursor
from weightwire.wire.types import TYPES, contiguous_nbytes

__all__ = ["DEFAULT_ALIGNMENT", "MAGIC", "GgufHeader", "read_gguf"]

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32

# Far above any real model, low enough that a hostile (sparse) file cannot keep the walk busy or fill the memory.
_MAX_ENTRIES: Final = 1 << 20
_MAX_STRINGS: Final = 1 << 24
_MAX_NAME: Final = 65535
_MAX_KEPT_STRING: Final = 1 << 20
_MAX_KEPT: Final = 16 << 20
_MAX_NESTING: Final = 8
_MAX_DIMS: Final = 4

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    code: struct.Struct("<" + letter)
    for code, letter in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_U32: Final = 4

_FOREIGN: Final = (
    (b"PK\x03\x04", "this is a zip archive, perhaps a PyTorch checkpoint; convert it to GGUF or safetensors"),
    (b"vers", "this looks like a Git LFS pointer, not the model: run git lfs pull"),
    (b"lmgg", "this is a GGML file from before GGUF; convert it again from the original model"),
    (b"tjgg", "this is a GGJT file from before GGUF; convert it again from the original model"),
    (b"fmgg", "this is a GGMF file from before GGUF; convert it again from the original model"),
)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What one GGUF file says: its version, scalar metadata, tensors in header order, and where their data starts.

    ``key_offsets`` has the byte at which the entry of every metadata key begins, of those too whose value is not kept.
    """

    version: int
    metadata: dict[str, object]
    tensors: dict[str, ModelTensor]
    data_offset: int
    key_offsets: dict[str, int]


class _Info(NamedTuple):
    """One tensor's entry in the header; ``offset`` counts from the start of the data, ``at`` is the entry's place."""

    name: str
    ne: tuple[int, ...]
    code: int
    offset: int
    at: int


def read_gguf(file: ModelFile) -> GgufHeader:
    """Walk the header of ``file``. ModelError with the byte at fault for anything it cannot be trusted on."""
    cursor = HeaderCursor(file)
    version = _read_version(cursor)
    n_tensors = _read_count(cursor, "the number of tensors", 24)
    n_entries = _read_count(cursor, "the number of metadata entries", 13)
    metadata, key_offsets, alignment = _read_metadata(cursor, n_entries)
    infos = _read_infos(cursor, n_tensors, alignment)
    data_offset = -(-cursor.offset // alignment) * alignment
    return GgufHeader(version, metadata, _place(file, infos, data_offset), data_offset, key_offsets)


def _read_version(cursor: HeaderCursor) -> int:
    if cursor.remaining == 0:
        raise cursor.error("the file is empty", hint="fetch it again")
    if cursor.remaining < 8:
        raise cursor.truncated("the magic and version", 8)
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        hint = next((hint for start, hint in _FOREIGN if magic == start), "")
        raise cursor.error(f"not a GGUF file: it starts with {magic!r}", offset=0, hint=hint)
    version = cursor.u32("the version")
    if version in (2, 3):
        return version
    if version == 1:
        detail, hint = "GGUF version 1 is not supported", "convert it again with a current llama.cpp"
    elif version & 0xFFFF == 0 and version:
        detail = "this GGUF file is big-endian"
        hint = "convert it: gguf-convert-endian FILE little (from the gguf package)"
    else:
        detail, hint = f"GGUF version {version} is not known (2 and 3 are)", ""
    raise cursor.error(detail, offset=4, hint=hint)


def _read_count(cursor: HeaderCursor, what: str, least: int) -> int:
    """A number of entries, each of which takes at least ``least`` bytes of the file."""
    at = cursor.offset
    count = cursor.u64(what)
    if count > _MAX_ENTRIES:
        raise cursor.error(f"{what} cannot be {count} (the limit is {_MAX_ENTRIES})", offset=at)
    if count * least > cursor.remaining:
        raise cursor.error(
            f"{what} is {count}, which the {cursor.remaining} bytes that follow cannot hold",
            offset=at,
            hint="the file is truncated or damaged; fetch it again",
        )
    return count


def _read_name(cursor: HeaderCursor, what: str) -> str:
    at = cursor.offset
    length = cursor.u64(f"the length of {what}")
    if length > _MAX_NAME:
        raise cursor.error(f"{what} cannot be {length} bytes long (the limit is {_MAX_NAME})", offset=at)
    try:
        name = cursor.take(length, what).decode()
    except UnicodeDecodeError as error:
        raise cursor.error(f"{what} is not UTF-8: {error.reason}", offset=at + 8 + error.start) from error
    if not usable_name(name):
        raise cursor.error(f"{what} contains a NUL: {name!r}", offset=at + 8)
    return name


def _read_metadata(cursor: HeaderCursor, count: int) -> tuple[dict[str, object], dict[str, int], int]:
    """Scalars and strings (1 MiB each and 16 MiB in all at most) by key, where every key's entry is, the alignment."""
    metadata: dict[str, object] = {}
    places: dict[str, int] = {}
    alignment = DEFAULT_ALIGNMENT
    strings, room = _MAX_STRINGS, _MAX_KEPT
    for _ in range(count):
        at = cursor.offset
        key = _read_name(cursor, "a metadata key")
        if key in places:
            raise cursor.error(f"metadata key {key!r} occurs twice", offset=at)
        places[key] = at
        what = f"metadata {key!r}"
        kind_at = cursor.offset
        kind = cursor.u32(what)
        value_at = cursor.offset
        if kind == _ARRAY:
            strings = _skip_array(cursor, what, strings)
        elif kind == _STRING:
            length = cursor.u64(what)
            if length <= min(_MAX_KEPT_STRING, room):
                room -= length
                metadata[key] = cursor.take(length, what).decode(errors="replace")
            else:
                cursor.skip(length, what)
        else:
            metadata[key] = _read_scalar(cursor, kind, kind_at, what)
        if key == "general.alignment":
            alignment = _checked_alignment(cursor, kind, metadata.get(key), value_at)
    return metadata, places, alignment


def _read_scalar(cursor: HeaderCursor, kind: int, at: int, what: str) -> int | float | bool:
    layout = _SCALARS.get(kind)
    if layout is None:
        raise cursor.error(f"{what} has value type {kind}, which is not known (0 to 12 are)", offset=at)
    value: int | float | bool = layout.unpack(cursor.take(layout.size, what))[0]
    return value


def _checked_alignment(cursor: HeaderCursor, kind: int, value: object, at: int) -> int:
    if kind != _U32 or not isinstance(value, int):
        raise cursor.error(f"general.alignment has value type {kind}, not {_U32} (unsigned, 32 bits)", offset=at)
    if value == 0 or value & (value - 1):
        raise cursor.error(f"general.alignment is {value}, where it must be a power of two", offset=at)
    return value


def _skip_array(cursor: HeaderCursor, what: str, strings: int, depth: int = 1) -> int:
    """Move past an array; takes and returns how many strings and inner arrays the header may still have."""
    at = cursor.offset
    kind = cursor.u32(what)
    length_at = cursor.offset
    length = cursor.u64(what)
    layout = _SCALARS.get(kind)
    if layout is not None:
        if length * layout.size > cursor.remaining:
            raise cursor.truncated(f"{what}, an array of {length} values", length * layout.size)
        cursor.skip(length * layout.size, what)
        return strings
    if kind not in (_STRING, _ARRAY):
        raise cursor.error(f"{what} is an array of value type {kind}, which is not known (0 to 12 are)", offset=at)
    least = 8 if kind == _STRING else 12
    if length * least > cursor.remaining:
        raise cursor.truncated(f"{what}, an array of {length} entries", length * least)
    if length > strings:
        raise cursor.error(
            f"{what} has {length} entries, more than the {strings} the header may still have", offset=length_at
        )
    strings -= length
    if kind == _STRING:
        cursor.skip_strings(length, what)
        return strings
    if depth == _MAX_NESTING:
        raise cursor.error(f"{what} nests arrays more than {_MAX_NESTING} deep", offset=at)
    for _ in range(length):
        strings = _skip_array(cursor, what, strings, depth + 1)
    return strings


def _read_infos(cursor: HeaderCursor, count: int, alignment: int) -> list[_Info]:
    infos: list[_Info] = []
    seen: set[str] = set()
    for _ in range(count):
        start = cursor.offset
        name = _read_name(cursor, "a tensor's name")
        if name in seen:
            raise cursor.error(f"tensor {name!r} occurs twice", offset=start)
        seen.add(name)
        what = f"the entry of tensor {name!r}"
        at = cursor.offset
        n_dims = cursor.u32(what)
        if n_dims > _MAX_DIMS:
            raise cursor.error(f"tensor {name!r} has {n_dims} dimensions (at most {_MAX_DIMS})", offset=at)
        at = cursor.offset
        ne = tuple(cursor.u64(what) for _ in range(n_dims)) or (1,)
        if element_count(ne) is None:
            raise cursor.error(f"tensor {name!r} has shape {ne}, more elements than 63 bits count", offset=at)
        code = cursor.u32(what)
        known = TYPES.get(code)
        if known is not None and ne[0] % known.block:
            raise cursor.error(
                f"tensor {name!r} has rows of {ne[0]} elements, no multiple of {known.name}'s block of {known.block}",
                offset=at,
            )
        at = cursor.offset
        offset = cursor.u64(what)
        if offset % alignment:
            raise cursor.error(f"tensor {name!r} starts at {offset}, not a multiple of {alignment}", offset=at)
        infos.append(_Info(name, ne, code, offset, at))
    return infos


def _place(file: ModelFile, infos: Sequence[_Info], data_offset: int) -> dict[str, ModelTensor]:
    """Find every tensor's bytes.

    A tensor of a type ggml does not know reaches to the next one (padding between them included) or to the file's end.
    """
    starts = sorted({info.offset for info in infos})
    tensors: dict[str, ModelTensor] = {}
    for info in infos:
        begin = data_offset + info.offset
        if begin > file.size:
            # An empty tensor at the very end may lie past padding that nobody wrote.
            if element_count(info.ne) != 0 or info.offset > file.size:
                raise ModelError(
                    f"tensor {info.name!r} starts at byte {begin}, past the file's end at {file.size}",
                    path=file.path,
                    offset=info.at,
                    hint="the file is truncated; fetch it again",
                )
            begin = file.size
        known = TYPES.get(info.code)
        if known is not None:
            nbytes = contiguous_nbytes(info.code, info.ne)
            if nbytes > file.size - begin:
                raise ModelError(
                    f"tensor {info.name!r} needs {nbytes} bytes from byte {begin}, and the file ends at {file.size}",
                    path=file.path,
                    offset=info.at,
                    hint="the file is truncated; fetch it again",
                )
        elif element_count(info.ne) == 0:
            nbytes = 0
        else:
            following = bisect_right(starts, info.offset)
            end = data_offset + starts[following] if following < len(starts) else file.size
            nbytes = min(end, file.size) - begin
            if nbytes == 0:
                raise ModelError(
                    f"tensor {info.name!r} starts at byte {begin}, where the file ends",
                    path=file.path,
                    offset=info.at,
                    hint="the file is truncated; fetch it again",
                )
        tensors[info.name] = ModelTensor(
            name=info.name,
            type_code=None if known is None else known.code,
            type_name=f"type {info.code}" if known is None else known.name,
            ne=info.ne,
            nbytes=nbytes,
            payload=file.range(begin, nbytes),
            _file=file,
        )
    _refuse_overlaps(file, infos, tensors, data_offset)
    return tensors


def _refuse_overlaps(
    file: ModelFile, infos: Sequence[_Info], tensors: dict[str, ModelTensor], data_offset: int
) -> None:
    before, end = "", 0
    for info in sorted(infos, key=lambda info: info.offset):
        nbytes = tensors[info.name].nbytes
        if nbytes == 0:
            continue
        begin = data_offset + info.offset
        if before and begin < end:
            raise ModelError(
                f"tensor {info.name!r} starts at byte {begin}, inside tensor {before!r}, which ends at {end}",
                path=file.path,
                offset=info.at,
            )
        before, end = info.name, begin + nbytes
