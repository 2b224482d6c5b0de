"""A generated GGUF whose tensors have the sizes of a real model's, for demonstrations and measurements.

The shapes follow a 27B-class hybrid model: 64 blocks, three of four with linear attention, every fourth with full
attention. At full size (about 16 GB) 369 of its 876 tensors are over 10 MiB, the size from which ggml's clients hash.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

from weightwire.errors import ConfigError, ModelError
from weightwire.wire.types import contiguous_nbytes, type_by_name

__all__ = ["ARCHITECTURE", "FULL_SIZE_LAYOUT", "MIN_NBYTES", "synthetic_layout", "write_synthetic_gguf"]

ARCHITECTURE: Final = "synthetic-hybrid"
MIN_NBYTES: Final = 1 << 20
"""Below this (bytes) the smallest possible blocks no longer keep the tensors' proportions."""

_ALIGNMENT: Final = 32
_CHUNK: Final = 4 << 20
_BLOCKS: Final = 64
_EMBEDDING: Final = 5120
_INNER: Final = 6144
_FEED_FORWARD: Final = 17408
_VOCABULARY: Final = 248320
# Rows are shortened rather than dropped below this many, so that a small model's tensors stay in proportion.
_MIN_ROWS: Final = 16

Shape = tuple[int, ...]


def _feed_forward(prefix: str, precise: str, width: int = _FEED_FORWARD) -> Iterator[tuple[str, str, Shape]]:
    yield f"{prefix}.post_attention_norm.weight", "f32", (_EMBEDDING,)
    yield f"{prefix}.ffn_gate.weight", "q4_K", (_EMBEDDING, width)
    yield f"{prefix}.ffn_up.weight", "q4_K", (_EMBEDDING, width)
    yield f"{prefix}.ffn_down.weight", precise, (width, _EMBEDDING)


def _linear_attention(prefix: str, precise: str) -> Iterator[tuple[str, str, Shape]]:
    yield f"{prefix}.attn_norm.weight", "f32", (_EMBEDDING,)
    yield f"{prefix}.attn_qkv.weight", precise, (_EMBEDDING, 10240)
    yield f"{prefix}.attn_gate.weight", "q4_K", (_EMBEDDING, _INNER)
    yield f"{prefix}.ssm_conv1d.weight", "f32", (4, 10240)
    yield f"{prefix}.ssm_dt.bias", "f32", (48,)
    yield f"{prefix}.ssm_a", "f32", (48,)
    yield f"{prefix}.ssm_alpha.weight", "f32", (_EMBEDDING, 48)
    yield f"{prefix}.ssm_beta.weight", "f32", (_EMBEDDING, 48)
    yield f"{prefix}.ssm_norm.weight", "f32", (128,)
    yield f"{prefix}.ssm_out.weight", "q4_K", (_INNER, _EMBEDDING)


def _full_attention(prefix: str, precise: str) -> Iterator[tuple[str, str, Shape]]:
    yield f"{prefix}.attn_norm.weight", "f32", (_EMBEDDING,)
    yield f"{prefix}.attn_q.weight", "q4_K", (_EMBEDDING, 12288)
    yield f"{prefix}.attn_k.weight", "q8_0", (_EMBEDDING, 1024)
    yield f"{prefix}.attn_v.weight", "q8_0", (_EMBEDDING, 1024)
    yield f"{prefix}.attn_q_norm.weight", "f32", (256,)
    yield f"{prefix}.attn_k_norm.weight", "f32", (256,)
    yield f"{prefix}.attn_sinks.weight", "f32", (24,)
    yield f"{prefix}.attn_output.weight", precise, (_INNER, _EMBEDDING)


def _full_size() -> Iterator[tuple[str, str, Shape]]:
    yield "token_embd.weight", "q6_K", (_EMBEDDING, _VOCABULARY)
    for block in range(_BLOCKS):
        prefix = f"blk.{block}"
        # As quantisers do: more bits where errors cost most, in the first and last blocks and in every third between.
        precise = "q6_K" if block < 8 or block >= 56 or block % 3 == 2 else "q4_K"
        yield from _full_attention(prefix, precise) if block % 4 == 3 else _linear_attention(prefix, precise)
        yield from _feed_forward(prefix, precise)
    # A small head that drafts the next token but one.
    prefix = f"blk.{_BLOCKS}"
    yield f"{prefix}.attn_norm.weight", "f32", (_EMBEDDING,)
    yield from _feed_forward(prefix, "q8_0", 1024)
    yield f"{prefix}.nextn.eh_proj.weight", "q8_0", (2 * _EMBEDDING, 512)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        yield f"{prefix}.nextn.{norm}.weight", "f32", (_EMBEDDING,)
    yield "rope_freqs.weight", "f32", (64,)
    yield "output_norm.weight", "f32", (_EMBEDDING,)


FULL_SIZE_LAYOUT: Final = tuple(_full_size())
"""Names, ggml type names and shapes (ggml order) at full size."""


def _nbytes(kind: str, ne: Shape) -> int:
    return contiguous_nbytes(type_by_name(kind).code, ne)


_FULL_NBYTES: Final = sum(_nbytes(kind, ne) for _, kind, ne in FULL_SIZE_LAYOUT)


def synthetic_layout(nbytes: int) -> list[tuple[str, str, Shape]]:
    """The tensors of a model of about ``nbytes`` bytes: names, ggml type names, shapes in ggml order.

    Rows are dropped, and where few are left shortened by whole blocks. The token embedding makes up for the rounding:
    the sum is ``nbytes`` to within one of its rows. ConfigError below 1 MiB.
    """
    if nbytes < MIN_NBYTES:
        raise ConfigError(f"a synthetic model cannot have {nbytes} bytes", hint=f"ask for {MIN_NBYTES} or more")
    scale = nbytes / _FULL_NBYTES
    layout = [(name, kind, _scaled(kind, ne, scale)) for name, kind, ne in FULL_SIZE_LAYOUT]
    name, kind, ne = layout[0]
    spare = nbytes - sum(_nbytes(kind, ne) for _, kind, ne in layout[1:])
    layout[0] = name, kind, (ne[0], max(spare // _nbytes(kind, ne[:1]), 1))
    return layout


def _scaled(kind: str, ne: Shape, scale: float) -> Shape:
    block = type_by_name(kind).block
    if len(ne) == 1:
        return (max(round(ne[0] * scale / block), 1) * block,)
    rows = round(ne[1] * scale)
    if rows >= _MIN_ROWS:
        return ne[0], rows
    elements = ne[0] * ne[1] * scale
    rows = max(min(_MIN_ROWS, round(elements / block)), 1)
    return max(round(elements / rows / block), 1) * block, rows


def write_synthetic_gguf(
    path: str | os.PathLike[str],
    nbytes: int = 1 << 30,
    seed: int = 1,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Write a GGUF of about ``nbytes`` bytes (`synthetic_layout`) to ``path``, the same bytes for the same ``seed``.

    The content is pseudo-random and does not compress; f32 tensors hold finite numbers between 1 and 2.
    ``progress(name, done, total)`` is called as data is written, in bytes of tensor data. The file is written under
    another name in the same folder and renamed when whole; on any failure, an interrupt included, nothing is left.

    Raises ConfigError for an impossible size or seed and ModelError where the disk is full or the folder cannot be
    written.
    """
    if seed < 0:
        raise ConfigError(f"a seed cannot be {seed}", hint="seeds count from 0")
    layout = synthetic_layout(nbytes)
    header, offsets, total = _header(layout, seed)
    target = os.fspath(path)
    folder, name = os.path.split(target)
    # Opened by hand rather than by tempfile, whose files are 0600 whatever the umask says.
    temporary = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "wb") as file:
            _reserve(file.fileno(), len(header) + total)
            file.write(header)
            _write_data(file, layout, offsets, seed, progress)
        os.replace(temporary, target)
    except OSError as error:
        _remove(temporary)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise ModelError(
            f"cannot write {len(header) + total} bytes: {os.strerror(error.errno or 0)}",
            path=target,
            hint="free space, or ask for a smaller model" if full else "name a file in a folder that can be written",
        ) from error
    except BaseException:
        _remove(temporary)
        raise


def _reserve(fd: int, nbytes: int) -> None:
    """Claim the space now: a full disk shows before the work, and the writes have no blocks left to find."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _header(layout: list[tuple[str, str, Shape]], seed: int) -> tuple[bytes, list[int], int]:
    """The file's header with its padding, every tensor's offset in the data, and the data's length, in bytes."""
    u32, string = 4, 8
    entries: list[tuple[str, int, bytes]] = [
        ("general.architecture", string, _string(ARCHITECTURE)),
        ("general.name", string, _string("weightwire synthetic")),
        ("general.description", string, _string(f"random content, seed {seed}; only the tensors' sizes mean anything")),
        ("general.alignment", u32, struct.pack("<I", _ALIGNMENT)),
        ("general.quantization_version", u32, struct.pack("<I", 2)),
        (f"{ARCHITECTURE}.block_count", u32, struct.pack("<I", _BLOCKS)),
    ]
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(layout), len(entries))]
    parts += [_string(key) + struct.pack("<I", kind) + value for key, kind, value in entries]
    offsets: list[int] = []
    end = 0
    for name, kind, ne in layout:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        parts.append(_string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type_by_name(kind).code, offset))
        offsets.append(offset)
        end = offset + _nbytes(kind, ne)
    header = b"".join(parts)
    return header + bytes(-len(header) % _ALIGNMENT), offsets, end


def _write_data(
    file: BinaryIO,
    layout: list[tuple[str, str, Shape]],
    offsets: list[int],
    seed: int,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    import numpy as np

    # The raw output of a bit generator is the same in every version of numpy; that of Generator's methods is not.
    source = np.random.SFC64(seed)
    total = sum(_nbytes(kind, ne) for _, kind, ne in layout)
    position = done = 0
    for (name, kind, ne), offset in zip(layout, offsets, strict=True):
        file.write(bytes(offset - position))
        nbytes = _nbytes(kind, ne)
        for start in range(0, nbytes, _CHUNK):
            size = min(_CHUNK, nbytes - start)
            words = source.random_raw(-(-size // 8))
            if kind == "f32":
                # Any bits may be a NaN, which equals nothing; these have the exponent of 1.
                words &= np.uint64(0x007FFFFF_007FFFFF)
                words |= np.uint64(0x3F800000_3F800000)
            file.write(words.astype("<u8", copy=False).data.cast("B")[:size])
            done += size
            if progress is not None:
                progress(name, done, total)
        position = offset + nbytes
