"""``rpc_tensor``: the 296 bytes by which ggml RPC speaks of a tensor. Source: docs/protocol.md, section 2."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from weightwire.errors import ProtocolError
from weightwire.wire.types import I8, MAX_DIMS, TYPES, contiguous_nbytes, contiguous_strides, span_nbytes

__all__ = ["MAX_NAME", "MAX_WEIGHT_BYTES", "RPC_TENSOR_BYTES", "Readable", "RpcTensor", "weight_tensor", "wire_name"]

Readable = bytes | bytearray | memoryview
"""Bytes to decode: a memoryview must be one-dimensional and of single bytes."""

_LAYOUT: Final = struct.Struct("<QIQ4I4II64si10QQQQ64sI")
RPC_TENSOR_BYTES: Final = 296
MAX_SRC: Final = 10
OP_PARAMS_BYTES: Final = 64
MAX_NAME: Final = 64

_U32: Final = 0xFFFF_FFFF
_FOLD: Final = 1 << 31
MAX_WEIGHT_BYTES: Final = (1 << 63) - 1
"""The longest run of bytes one ``rpc_tensor`` can span in the I8 form, in bytes (about 8 EiB)."""


@dataclass(frozen=True, slots=True)
class RpcTensor:
    """One tensor as it travels: shape ``ne`` and byte strides ``nb`` (four u32 each), where it lies (``buffer`` is the
    server's handle, ``data`` an absolute address on the server, bytes) and its name.

    ``name`` is at most 64 bytes, without the NULs that pad it on the wire. ``padding`` is the last word: padding up to
    protocol 5.0 and a use count (graphs only) from 5.1.
    """

    id: int
    type: int
    buffer: int
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    op: int = 0
    op_params: bytes = bytes(OP_PARAMS_BYTES)
    flags: int = 0
    src: tuple[int, ...] = (0,) * MAX_SRC
    view_src: int = 0
    view_offs: int = 0
    data: int = 0
    name: bytes = b""
    padding: int = 0

    def pack(self) -> bytes:
        """The 296 bytes. ValueError if a field does not fit its place."""
        if len(self.ne) != MAX_DIMS or len(self.nb) != MAX_DIMS or len(self.src) != MAX_SRC:
            raise ValueError(f"tensor {self.label!r}: needs {MAX_DIMS} dimensions and strides and {MAX_SRC} sources")
        if len(self.op_params) != OP_PARAMS_BYTES:
            raise ValueError(
                f"tensor {self.label!r}: op_params must be {OP_PARAMS_BYTES} bytes, not {len(self.op_params)}"
            )
        if len(self.name) > MAX_NAME:
            raise ValueError(f"tensor {self.label!r}: its name is {len(self.name)} bytes, and {MAX_NAME} is the most")
        try:
            return _LAYOUT.pack(
                self.id,
                self.type,
                self.buffer,
                *self.ne,
                *self.nb,
                self.op,
                self.op_params,
                self.flags,
                *self.src,
                self.view_src,
                self.view_offs,
                self.data,
                self.name,
                self.padding,
            )
        except struct.error as error:
            raise ValueError(f"tensor {self.label!r}: {self._misfit() or error}") from None

    def _misfit(self) -> str:
        unsigned = {"id": 64, "type": 32, "buffer": 64, "ne": 32, "nb": 32, "op": 32, "src": 64}
        unsigned |= {"view_src": 64, "view_offs": 64, "data": 64, "padding": 32}
        for what, bits in unsigned.items():
            value = getattr(self, what)
            for number in value if isinstance(value, tuple) else (value,):
                if not 0 <= number < 1 << bits:
                    return f"{what} = {value} does not fit u{bits}"
        return "" if -(1 << 31) <= self.flags < 1 << 31 else f"flags = {self.flags} does not fit i32"

    @classmethod
    def unpack(cls, buf: Readable, offset: int = 0) -> RpcTensor:
        """The tensor in the 296 bytes of ``buf`` from ``offset`` on. ProtocolError if they are not all there.

        Every value that fits the fields is taken, so check before use: nothing here is bounded by what the peer says.
        """
        if offset < 0 or len(buf) - offset < RPC_TENSOR_BYTES:
            have = max(0, len(buf) - max(0, offset))
            raise ProtocolError(f"rpc_tensor cut short: {have} of {RPC_TENSOR_BYTES} bytes")
        fields = _LAYOUT.unpack_from(buf, offset)
        return cls(
            id=fields[0],
            type=fields[1],
            buffer=fields[2],
            ne=fields[3:7],
            nb=fields[7:11],
            op=fields[11],
            op_params=fields[12],
            flags=fields[13],
            src=fields[14:24],
            view_src=fields[24],
            view_offs=fields[25],
            data=fields[26],
            # Only the padding goes: what a peer left behind an inner NUL stays, so that pack() gives back its bytes.
            name=fields[27].rstrip(b"\0"),
            padding=fields[28],
        )

    @property
    def nbytes(self) -> int:
        """Bytes from the tensor's first to its last one, exact however large. ValueError if the type is unknown."""
        return span_nbytes(self.type, self.ne, self.nb)

    @property
    def label(self) -> str:
        """The name as text, up to the first NUL."""
        return bytes(self.name).split(b"\0", 1)[0].decode("utf-8", "replace")


def _fnv1a64(data: bytes) -> int:
    # A name is a few dozen bytes, and this storey may not import the native hash.
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFF_FFFF_FFFF_FFFF
    return value


def wire_name(name: str) -> bytes:
    """``name`` as at most 63 bytes of UTF-8 without NUL, so that a C server keeps it whole.

    A name that is longer (or has a NUL in it) is cut to at most 46 bytes, at a character's end, and continued with
    ``~`` and the 16 hex digits of its FNV-1a 64, so that two long names stay distinct.
    """
    full = name.encode("utf-8", "surrogatepass")
    if len(full) < MAX_NAME and b"\0" not in full:
        return full
    end = min(46, len(full))
    while end and end < len(full) and full[end] & 0xC0 == 0x80:
        end -= 1
    head = full[:end].split(b"\0", 1)[0]
    return head + f"~{_fnv1a64(full):016x}".encode()


def _typed_form(
    type_code: int | None, ne: Sequence[int], nbytes: int
) -> tuple[int, tuple[int, int, int, int], tuple[int, int, int, int]] | None:
    if type_code is None or type_code not in TYPES:
        return None
    if len(ne) <= MAX_DIMS:
        shape = (*ne, *(1,) * (MAX_DIMS - len(ne)))
    else:
        shape = (*ne[: MAX_DIMS - 1], prod(ne[MAX_DIMS - 1 :]))
    d0, d1, d2, d3 = shape
    if not all(0 <= extent <= _U32 for extent in shape) or d0 % TYPES[type_code].block:
        return None
    if contiguous_nbytes(type_code, shape) != nbytes:
        return None
    s0, s1, s2, s3 = contiguous_strides(type_code, shape)
    # A stride is used only where its dimension has a second element; elsewhere its low bits are as good as any, and
    # without this every matrix of 4 GiB would lose its type over nb[2].
    if any(extent > 1 and stride > _U32 for extent, stride in zip(shape[1:], (s1, s2, s3), strict=True)):
        return None
    return type_code, (d0, d1, d2, d3), (s0, s1 & _U32, s2 & _U32, s3 & _U32)


def _bytes_form(nbytes: int) -> tuple[int, tuple[int, int, int, int], tuple[int, int, int, int]]:
    if nbytes <= _U32:
        return I8, (nbytes, 1, 1, 1), (1, nbytes, nbytes, nbytes)
    # Rows start 2^31 bytes apart and overlap: ne0, from 2^31 to 2^32 - 1, makes the last one end at nbytes exactly.
    rows = nbytes // _FOLD
    return I8, (nbytes - (rows - 1) * _FOLD, rows, 1, 1), (1, _FOLD, _FOLD, _FOLD)


def weight_tensor(
    name: str, type_code: int | None, ne: Sequence[int], nbytes: int, *, buffer: int, data: int, id: int = 1
) -> RpcTensor:
    """The ``rpc_tensor`` of a weight of ``nbytes`` bytes without gaps at server address ``data`` in ``buffer``.

    It carries the real type and shape where they say exactly ``nbytes`` and fit the u32 fields (dimensions past the
    fourth are folded into it), and otherwise plain bytes: type I8, one dimension, or two for 4 GiB and more. Either way
    the server takes it for exactly ``nbytes``. ``type_code`` None (or one of no known size) always gives plain bytes.
    ValueError if ``nbytes`` is negative or above `MAX_WEIGHT_BYTES`, or a number does not fit its field.
    Source: docs/protocol.md, section 2.
    """
    if not 0 <= nbytes <= MAX_WEIGHT_BYTES:
        raise ValueError(f"tensor {name!r}: {nbytes} bytes cannot be described; 0 to {MAX_WEIGHT_BYTES} can")
    for what, value in (("id", id), ("buffer", buffer), ("data", data)):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"tensor {name!r}: {what} = {value} is no 64-bit unsigned number")
    code, shape, strides = _typed_form(type_code, ne, nbytes) or _bytes_form(nbytes)
    return RpcTensor(id=id, type=code, buffer=buffer, ne=shape, nb=strides, data=data, name=wire_name(name))
