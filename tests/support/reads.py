"""Getting in between a server and the entries of its cache that it reads."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from weightwire.cache import reading

__all__ = ["around_reads", "before_reads"]


def around_reads(monkeypatch: pytest.MonkeyPatch, around: Callable[[int, int, Callable[[], None]], object]) -> None:
    """Have ``around(fd, offset, read)`` called for each read of a piece, which happens when that calls ``read()``.

    Looking whether a piece is cached is no reading.
    """
    real, real_both = os.preadv, reading.read_fnv1a64

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            return real(fd, buffers, offset, flags)
        got: list[int] = []
        around(fd, offset, lambda: got.append(real(fd, buffers, offset)))
        return got[0]

    def both(fd: int, target: memoryview, offset: int, digest: int) -> tuple[int, int]:
        got: list[tuple[int, int]] = []
        around(fd, offset, lambda: got.append(real_both(fd, target, offset, digest)))
        return got[0]

    monkeypatch.setattr(reading.os, "preadv", preadv)
    monkeypatch.setattr(reading, "read_fnv1a64", both)


def before_reads(monkeypatch: pytest.MonkeyPatch, look: Callable[[int], object]) -> None:
    """Have ``look`` called with the offset before each piece is read."""

    def around(fd: int, offset: int, read: Callable[[], None]) -> None:
        look(offset)
        read()

    around_reads(monkeypatch, around)
