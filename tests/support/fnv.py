"""FNV-1a 64 as its authors define it, byte by byte: what every faster way must equal."""

from __future__ import annotations

from weightwire.hashing import FNV_OFFSET

__all__ = ["slow"]


def slow(data: bytes, start: int = FNV_OFFSET) -> int:
    """The hash of ``data``, continued from ``start``."""
    for byte in data:
        start = (start ^ byte) * 0x100000001B3 % 2**64
    return start
