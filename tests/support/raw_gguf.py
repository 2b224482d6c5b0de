"""GGUF files byte by byte, so that a test can make one that no writer would."""

from __future__ import annotations

import struct
from collections.abc import Sequence

U32, STRING, ARRAY = 4, 8, 9


def string(text: str | bytes) -> bytes:
    """A length and that many bytes."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """One metadata entry; `value` is as it stands in the file."""
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, body: bytes) -> bytes:
    """The value of an array entry."""
    return struct.pack("<IQ", kind, count) + body


def tensor(name: str | bytes, ne: Sequence[int], code: int, offset: int, n_dims: int | None = None) -> bytes:
    """One tensor's entry."""
    return string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne) if n_dims is None else n_dims, *ne, code, offset)


def build(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; the counts are the true ones unless given, and `alignment` only pads, it is not written down."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment if tensors else 0) + data
