"""Both hashes in one pass."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from fnvhash import fnv1a_64

from weightwire.errors import ModelError
from weightwire.index import Hashes, hash_with_digest
from weightwire.ranges import FileRange


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (1 << 20) - 1, 1 << 20, (2 << 20) + 7])
def test_of_a_buffer_and_of_a_file(nbytes: int, tmp_path: Path) -> None:
    data = os.urandom(nbytes)
    # The reference goes byte by byte in Python.
    expected = Hashes(fnv1a_64(data), hashlib.sha256(data).digest())
    path = tmp_path / "file"
    path.write_bytes(b"before" + data + b"after")
    with open(path, "rb") as file:
        assert hash_with_digest(FileRange(file.fileno(), 6, nbytes, str(path))) == expected
    assert hash_with_digest(data) == hash_with_digest(memoryview(bytearray(data))) == expected


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

    with pytest.raises(KeyboardInterrupt):
        hash_with_digest(bytes(128 << 20), check)
    assert len(looks) == 2


def test_what_is_no_buffer() -> None:
    with pytest.raises(TypeError):
        hash_with_digest("text")  # type: ignore[arg-type]
