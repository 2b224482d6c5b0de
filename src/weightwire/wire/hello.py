"""HELLO, the first request of a connection, in both forms. Source: docs/protocol.md, sections 5, 6, 8 and 13."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from weightwire.errors import ProtocolError
from weightwire.wire.tensor import Readable

__all__ = [
    "CACHE_BIT",
    "CAPS_BYTES",
    "NO_CAPS",
    "Greeting",
    "decode_hello_answer",
    "decode_hello_request",
    "encode_hello_answer",
    "encode_hello_request",
]

CAPS_BYTES: Final = 24
NO_CAPS: Final = bytes(CAPS_BYTES)
"""Capabilities that say: stay on TCP."""

CACHE_BIT: Final = 1
"""Of ``Greeting.flags``: the server keeps a tensor cache, so SET_TENSOR_HASH is worth asking."""

_SHORT: Final = 3
_LONG: Final = 4 + CAPS_BYTES


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a server says of itself: three bytes of version, and from protocol 4 one byte of flags and 24 of connection
    capabilities (``flags`` 0 and ``caps`` zero before)."""

    major: int
    minor: int
    patch: int
    flags: int = 0
    caps: bytes = NO_CAPS

    @property
    def version(self) -> tuple[int, int, int]:
        """(major, minor, patch)."""
        return self.major, self.minor, self.patch

    @property
    def text(self) -> str:
        """The version as "7.0.0"."""
        return f"{self.major}.{self.minor}.{self.patch}"

    @property
    def has_cache(self) -> bool:
        """Whether the server says that it keeps a tensor cache; a stock one never does."""
        return bool(self.flags & CACHE_BIT)

    def encode(self) -> bytes:
        """The answer's payload: 3 bytes up to protocol 3, 28 from 4.

        ValueError if a field does not fit, or flags or capabilities are set where there is no place for them.
        """
        for what, value in (("major", self.major), ("minor", self.minor), ("patch", self.patch), ("flags", self.flags)):
            if not 0 <= value <= 0xFF:
                raise ValueError(f"{what} = {value} of a HELLO answer is no byte")
        if len(self.caps) != CAPS_BYTES:
            raise ValueError(f"connection capabilities are {CAPS_BYTES} bytes, not {len(self.caps)}")
        head = bytes((self.major, self.minor, self.patch))
        if self.major < 4:
            if self.flags or any(self.caps):
                raise ValueError(f"a HELLO answer of protocol {self.text} has no place for flags or capabilities")
            return head
        return head + bytes((self.flags,)) + self.caps

    @classmethod
    def decode(cls, payload: Readable) -> Greeting:
        """The greeting in an answer's payload.

        ProtocolError if it has neither 3 nor 28 bytes, or a known major (1 to 8) in the other major's form.
        """
        if len(payload) not in (_SHORT, _LONG):
            raise ProtocolError(
                f"the answer to HELLO has {_SHORT} or {_LONG} bytes, not {len(payload)}",
                hint="is this a ggml RPC server?",
            )
        short = len(payload) == _SHORT
        major, minor, patch = payload[0], payload[1], payload[2]
        # Forks with majors of their own may use either form; whether they are spoken to is decided by their number.
        if major in (range(4, 9) if short else range(1, 4)):
            theirs = f"{major}.{minor}.{patch}"
            raise ProtocolError(f"a HELLO answer of {len(payload)} bytes cannot be of protocol {theirs}")
        if short:
            return cls(major, minor, patch)
        return cls(major, minor, patch, payload[3], bytes(payload[4:_LONG]))


def encode_hello_request(caps: bytes | None = NO_CAPS) -> bytes:
    """HELLO's payload: 24 bytes of capabilities (protocol 4 and newer), or with ``None`` the empty one of 1 to 3.

    ValueError if ``caps`` has another length.
    """
    if caps is None:
        return b""
    if len(caps) != CAPS_BYTES:
        raise ValueError(f"connection capabilities are {CAPS_BYTES} bytes, not {len(caps)}")
    return bytes(caps)


def decode_hello_request(payload: Readable) -> bytes | None:
    """The client's 24 bytes of capabilities, or None if it sent the empty form. ProtocolError for any other length."""
    if not len(payload):
        return None
    if len(payload) != CAPS_BYTES:
        raise ProtocolError(f"HELLO has 0 or {CAPS_BYTES} bytes, not {len(payload)}")
    return bytes(payload)


def encode_hello_answer(greeting: Greeting) -> bytes:
    """See `Greeting.encode`."""
    return greeting.encode()


def decode_hello_answer(payload: Readable) -> Greeting:
    """See `Greeting.decode`."""
    return Greeting.decode(payload)
