from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import ProtocolError
from weightwire.wire.caps import RdmaCaps
from weightwire.wire.hello import NO_CAPS

GID = bytes(10) + b"\xff\xff" + bytes((10, 77, 0, 1))


@given(st.integers(1, 2**32 - 1), st.binary(min_size=16, max_size=16).filter(any))
def test_round_trip(number: int, gid: bytes) -> None:
    caps = RdmaCaps(number, gid)
    assert RdmaCaps.decode(caps.encode()) == caps


def test_layout() -> None:
    assert RdmaCaps(0x12345678, GID).encode() == bytes.fromhex("78563412 78563400") + GID
    assert RdmaCaps(0x12345678, GID).psn == 0x345678


def test_zero_is_no_offer() -> None:
    assert RdmaCaps.decode(NO_CAPS) is None


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (struct.pack("<IHH16s", 0x11, 7, 0, GID), "another layout"),  # Apple's: a lid where the sequence number is
        (struct.pack("<II16s", 0x01000011, 0x01000011, GID), "another layout"),
        (struct.pack("<II16s", 0, 0, GID), "another layout"),
        (struct.pack("<II16s", 5, 5, bytes(16)), "without a GID"),
        (bytes(23), "24 bytes"),
        (bytes(25), "24 bytes"),
    ],
)
def test_what_is_refused(raw: bytes, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        RdmaCaps.decode(raw)


@pytest.mark.parametrize("caps", [RdmaCaps(0, GID), RdmaCaps(1 << 32, GID), RdmaCaps(-1, GID), RdmaCaps(1, GID[1:])])
def test_what_cannot_be_encoded(caps: RdmaCaps) -> None:
    with pytest.raises(ValueError):
        caps.encode()
