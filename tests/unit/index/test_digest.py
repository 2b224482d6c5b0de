"""Both hashes in one pass."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from fnvhash import fnv1a_64

from weightwire._native import _fnv1a
from weightwire.errors import ModelError
from weightwire.hashing import fnv1a64
from weightwire.index import Hashes, hash_together, hash_with_digest
from weightwire.ranges import FileRange


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (512 << 10) - 1, 512 << 10, (512 << 10) + 1, (2 << 20) + 7])
def test_of_a_buffer_and_of_a_file(nbytes: int, tmp_path: Path) -> None:
    data = os.urandom(nbytes)
    # The reference goes byte by byte in Python.
    expected = Hashes(fnv1a_64(data), blake3(data).digest())
    path = tmp_path / "file"
    path.write_bytes(b"before" + data + b"after")
    with open(path, "rb") as file:
        content = FileRange(file.fileno(), 6, nbytes, str(path))
        assert hash_with_digest(content) == expected
        assert hash_with_digest(content, digest=False) == Hashes(expected.fnv1a, b"")
    assert hash_with_digest(data) == hash_with_digest(memoryview(bytearray(data))) == expected
    assert hash_with_digest(data, digest=False) == Hashes(expected.fnv1a, b"")


def test_of_what_the_authors_of_blake3_hashed() -> None:
    """Their test_vectors.json: bytes that count from 0 to 250, over and over."""
    counted = bytes(at % 251 for at in range(102_400))
    expected = {
        0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
        1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
        102_400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
    }
    assert {nbytes: hash_with_digest(counted[:nbytes]).blake3.hex() for nbytes in expected} == expected


@pytest.mark.parametrize("variant", ["plain", "the best"])
def test_several_together(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very different lengths, in memory and in a file, and some without a digest."""
    if variant == "plain":
        before = _fnv1a.chosen()
        _fnv1a.choose("plain")
    sizes = [0, 1, (512 << 10) - 1, 512 << 10, (2 << 20) + 7, 3 << 20, 100]
    contents = [os.urandom(nbytes) for nbytes in sizes]
    path = tmp_path / "file"
    path.write_bytes(b"".join(contents))
    try:
        with open(path, "rb") as file:
            ranges = [FileRange(file.fileno(), sum(sizes[:at]), nbytes, str(path)) for at, nbytes in enumerate(sizes)]
            payloads = [*contents[:3], *ranges[3:6], memoryview(contents[6])]
            wanted = [at % 3 != 1 for at in range(7)]
            found = hash_together(payloads, wanted)
            with pytest.raises(ModelError, match="shorter"):
                hash_together([contents[0], FileRange(file.fileno(), 1, sum(sizes), str(path))], [True, True])
    finally:
        if variant == "plain":
            _fnv1a.choose(before)
    assert found == [
        Hashes(fnv1a64(data), blake3(data).digest() if digest else b"")
        for data, digest in zip(contents, wanted, strict=True)
    ]
    assert hash_together([], []) == []


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 << 20))
    with open(path, "rb") as file, pytest.raises(ModelError, match="shorter than when opened") as caught:
        hash_with_digest(FileRange(file.fileno(), 10, 2 << 20, str(path)))
    assert (caught.value.path, caught.value.offset) == (str(path), 2 << 20)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file, pytest.raises(ModelError, match="cannot read"):
        hash_with_digest(FileRange(file.fileno(), 0, 5))


def test_the_caller_looks_in_and_may_end_it() -> None:
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise KeyboardInterrupt

    for way in (hash_with_digest, lambda data, check: hash_together([data, b"more"], [True, False], check)):
        data = bytearray(128 << 20)
        looks.clear()
        with pytest.raises(KeyboardInterrupt):
            way(data, check)
        assert len(looks) == 2
        data.clear()  # BufferError, were it still held


def test_an_empty_array_of_more_dimensions() -> None:
    empty = np.empty((0, 3), np.float32)
    assert hash_with_digest(empty) == hash_with_digest(b"")
    assert hash_together([empty, b""], [True, True]) == [hash_with_digest(b"")] * 2


def test_what_is_no_buffer() -> None:
    with pytest.raises(TypeError):
        hash_with_digest("text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        hash_together([b"bytes", "text"], [True, True])  # type: ignore[list-item]
