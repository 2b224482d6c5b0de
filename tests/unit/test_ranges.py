from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from weightwire.ranges import FileRange


def test_a_range_refers_and_owns_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        part = FileRange(fd, 2, 3, "file")
        assert os.pread(part.fd, part.nbytes, part.offset) == b"234"
        del part
        assert os.pread(fd, 1, 0) == b"0", "the descriptor is its owner's to close"
    finally:
        os.close(fd)


def test_ranges_are_values() -> None:
    assert FileRange(3, 0, 10) == FileRange(3, 0, 10, "")
    assert len({FileRange(3, 0, 10), FileRange(3, 0, 10), FileRange(3, 0, 11), FileRange(4, 0, 10)}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        FileRange(3, 0, 10).offset = 5  # type: ignore[misc]
