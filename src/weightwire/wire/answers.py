"""Payloads of answers, to and from bytes; no version changed them. Source: docs/protocol.md, section 5.

What they say is the peer's word: sizes and handles are taken as they come. Decoders raise ProtocolError on a wrong
length.
"""

from __future__ import annotations

import struct

from weightwire.errors import ProtocolError
from weightwire.wire.messages import AllocAnswer, MemoryAnswer
from weightwire.wire.tensor import Readable

__all__ = [
    "decode_alloc_answer",
    "decode_memory_answer",
    "decode_u8_answer",
    "decode_u32_answer",
    "decode_u64_answer",
    "encode_alloc_answer",
    "encode_memory_answer",
    "encode_u8_answer",
    "encode_u32_answer",
    "encode_u64_answer",
]


def _numbers(layout: str, payload: Readable, what: str) -> tuple[int, ...]:
    expected = struct.calcsize(layout)
    if len(payload) != expected:
        raise ProtocolError(f"the answer to {what} has {expected} bytes, not {len(payload)}")
    return struct.unpack(layout, payload)


def _pack(layout: str, *values: int) -> bytes:
    try:
        return struct.pack(layout, *values)
    except struct.error as error:
        raise ValueError(f"an answer's number does not fit its field: {values} ({error})") from None


def encode_alloc_answer(handle: int, nbytes: int) -> bytes:
    """ALLOC_BUFFER's answer, 16 bytes; (0, 0) says that it could not be done."""
    return _pack("<QQ", handle, nbytes)


def decode_alloc_answer(payload: Readable) -> AllocAnswer:
    """ALLOC_BUFFER's answer."""
    return AllocAnswer(*_numbers("<QQ", payload, "ALLOC_BUFFER"))


def encode_memory_answer(free: int, total: int) -> bytes:
    """GET_DEVICE_MEMORY's answer, 16 bytes."""
    return _pack("<QQ", free, total)


def decode_memory_answer(payload: Readable) -> MemoryAnswer:
    """GET_DEVICE_MEMORY's answer."""
    return MemoryAnswer(*_numbers("<QQ", payload, "GET_DEVICE_MEMORY"))


def encode_u64_answer(value: int) -> bytes:
    """The answer to GET_ALIGNMENT, GET_MAX_SIZE, GET_ALLOC_SIZE (bytes) and BUFFER_GET_BASE (an address)."""
    return _pack("<Q", value)


def decode_u64_answer(payload: Readable, what: str = "a request for a number") -> int:
    """Such an answer; ``what`` names the command in an error."""
    return _numbers("<Q", payload, what)[0]


def encode_u32_answer(value: int) -> bytes:
    """DEVICE_COUNT's answer."""
    return _pack("<I", value)


def decode_u32_answer(payload: Readable, what: str = "DEVICE_COUNT") -> int:
    """DEVICE_COUNT's answer."""
    return _numbers("<I", payload, what)[0]


def encode_u8_answer(value: int) -> bytes:
    """The answer to SET_TENSOR_HASH, COPY_TENSOR and COMM_INIT (1: done), and up to 3.0 to GRAPH_COMPUTE (a status)."""
    return _pack("<B", value)


def decode_u8_answer(payload: Readable, what: str = "a yes-or-no request") -> int:
    """Such an answer; ``what`` names the command in an error."""
    return _numbers("<B", payload, what)[0]
