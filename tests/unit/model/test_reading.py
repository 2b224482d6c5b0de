"""Reading ranges of files by position."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightwire import ranges
from weightwire.errors import ModelError
from weightwire.model import base, reading
from weightwire.model.base import ModelFile
from weightwire.model.reading import read_bytes, read_range
from weightwire.ranges import FileRange

DATA = bytes(range(256)) * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_bytes(DATA)
    return made


@pytest.fixture
def payload(path: Path) -> Iterator[FileRange]:
    fd = os.open(path, os.O_RDONLY)
    yield FileRange(fd, 100, 10_000, str(path))
    os.close(fd)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each call asked the kernel for, where no call may ask for more than 4096."""
    calls: list[int] = []
    preadv, pread = os.preadv, os.pread

    def watched_v(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(sum(buffer.nbytes for buffer in buffers))
        return preadv(fd, buffers, offset)

    def watched(fd: int, nbytes: int, offset: int) -> bytes:
        calls.append(nbytes)
        return pread(fd, nbytes, offset)

    monkeypatch.setattr(os, "preadv", watched_v)
    monkeypatch.setattr(os, "pread", watched)
    for module in (reading, base):
        monkeypatch.setattr(module, "SYSCALL_MAX", 4096)
    return calls


def test_the_limit_is_one_gib() -> None:
    assert ranges.SYSCALL_MAX == 1 << 30


def test_a_range_in_calls_within_the_limit(payload: FileRange, asked: list[int]) -> None:
    into = memoryview(bytearray(9000))
    assert read_range(payload, 5, into) == DATA[105:9105]
    assert asked == [4096, 4096, 808]
    assert read_bytes(payload, 1, 4096) == DATA[101:4197]
    assert asked[3:] == [4096]


def test_a_header_in_calls_within_the_limit(path: Path, asked: list[int]) -> None:
    file = ModelFile(str(path))
    assert file.read_at(7, 9000) == DATA[7:9007]
    assert asked == [4096, 4096, 808]
    file.close()


def test_nothing_is_read_for_nothing(payload: FileRange, asked: list[int]) -> None:
    assert read_bytes(payload, 0, 0) == b""
    assert asked == []


def test_a_file_that_became_too_short(payload: FileRange, path: Path, asked: list[int]) -> None:
    os.truncate(path, 5000)
    with pytest.raises(ModelError, match="shorter than when opened") as caught:
        read_range(payload, 0, memoryview(bytearray(9000)))
    assert caught.value.offset == 5000
