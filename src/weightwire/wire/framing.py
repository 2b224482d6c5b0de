"""Heads of requests and answers. Source: docs/protocol.md, section 1.

A request is its command (one byte), the payload's size (u64) and the payload; an answer is a size and a payload. All
numbers are little-endian and nothing is padded.
"""

from __future__ import annotations

import struct
from typing import Final

from weightwire.errors import ProtocolError
from weightwire.wire.tensor import Readable

__all__ = [
    "EMPTY_RESPONSE",
    "MAX_CONTROL_BYTES",
    "MAX_MESSAGE_BYTES",
    "REQUEST_HEADER_BYTES",
    "RESPONSE_HEADER_BYTES",
    "parse_request_header",
    "parse_u64",
    "request_header",
    "response_header",
]

_REQUEST: Final = struct.Struct("<BQ")
_U64: Final = struct.Struct("<Q")

REQUEST_HEADER_BYTES: Final = 9
RESPONSE_HEADER_BYTES: Final = 8

MAX_MESSAGE_BYTES: Final = (1 << 63) - 1
"""Largest payload size ever sent or believed, bytes: a stock server aborts at 2^63 (docs/protocol.md, section 10)."""

MAX_CONTROL_BYTES: Final = 4096
"""More than any fixed-size request or answer (the longest is 3260 bytes), bytes; such a message may be read whole."""

EMPTY_RESPONSE: Final = bytes(8)
"""The answer that only says "done": a size of zero."""


def request_header(cmd: int, size: int) -> bytes:
    """The 9 bytes before a request's payload of ``size`` bytes.

    ValueError if ``cmd`` is no byte or ``size`` is above `MAX_MESSAGE_BYTES`.
    """
    if not 0 <= size <= MAX_MESSAGE_BYTES:
        raise ValueError(f"a request of {size} bytes cannot be sent; {MAX_MESSAGE_BYTES} is the most")
    if not 0 <= cmd <= 0xFF:
        raise ValueError(f"command {cmd} is no byte")
    return _REQUEST.pack(cmd, size)


def response_header(size: int) -> bytes:
    """The 8 bytes before an answer's payload of ``size`` bytes. ValueError if it is above `MAX_MESSAGE_BYTES`."""
    if not 0 <= size <= MAX_MESSAGE_BYTES:
        raise ValueError(f"an answer of {size} bytes cannot be sent; {MAX_MESSAGE_BYTES} is the most")
    return _U64.pack(size)


def parse_request_header(buf: Readable) -> tuple[int, int]:
    """Command number and payload size (bytes, up to 2^64 - 1, as the peer says) of 9 bytes. ProtocolError otherwise."""
    if len(buf) != REQUEST_HEADER_BYTES:
        raise ProtocolError(f"a request's head is {REQUEST_HEADER_BYTES} bytes, not {len(buf)}")
    cmd, size = _REQUEST.unpack(buf)
    return cmd, size


def parse_u64(buf: Readable) -> int:
    """The number in exactly 8 bytes. ProtocolError for any other length."""
    if len(buf) != 8:
        raise ProtocolError(f"a u64 is 8 bytes, not {len(buf)}")
    value: int = _U64.unpack(buf)[0]
    return value
