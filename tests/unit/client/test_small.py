from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightwire.client.small import SMALL, WINDOW, SmallReader
from weightwire.errors import ModelError
from weightwire.ranges import FileRange

SIZE = 1 << 20
DATA = os.urandom(SIZE)


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory) -> int:
    path = tmp_path_factory.mktemp("small") / "file"
    path.write_bytes(DATA)
    return os.open(path, os.O_RDONLY)


@given(st.lists(st.tuples(st.integers(0, SIZE - SMALL), st.integers(1, SMALL - 1)), min_size=1, max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_range_has_its_own_bytes(fd: int, ranges: list[tuple[int, int]]) -> None:
    payloads = [FileRange(fd, offset, nbytes) for offset, nbytes in ranges]
    reader = SmallReader(payloads)
    for index, payload in enumerate(payloads):
        if reader.get(payload) is None:
            reader.fill(index)
        view = reader.get(payload)
        assert view is not None
        assert view == DATA[payload.offset : payload.offset + payload.nbytes]


def test_neighbours_are_read_together(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(sum(map(len, buffers)))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    payloads = [FileRange(fd, 1000 * i, 1000) for i in range(400)]
    reader = SmallReader(payloads)
    for index, payload in enumerate(payloads):
        if reader.get(payload) is None:
            reader.fill(index)
    assert reads == [WINDOW // 1000 * 1000, (400 - WINDOW // 1000) * 1000]


def test_large_neighbours_are_not_read(fd: int) -> None:
    payloads = [FileRange(fd, 0, 100), FileRange(fd, 100, SMALL), FileRange(fd, 100 + SMALL, 100)]
    reader = SmallReader(payloads)
    reader.fill(0)
    assert reader.get(payloads[2]) is None


def test_another_files_bytes_are_not_taken(fd: int, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(1000))
    other = os.open(tmp_path / "other", os.O_RDONLY)
    try:
        payloads = [FileRange(fd, 0, 100), FileRange(other, 0, 100)]
        reader = SmallReader(payloads)
        reader.fill(0)
        assert reader.get(payloads[1]) is None
        reader.fill(1)
        assert reader.get(payloads[1]) == bytes(100)
        assert reader.get(payloads[0]) is None
    finally:
        os.close(other)


def test_a_file_that_ends_early(fd: int) -> None:
    reader = SmallReader([FileRange(fd, SIZE - 10, 11, "model.gguf")])
    with pytest.raises(ModelError, match="shorter") as caught:
        reader.fill(0)
    assert caught.value.path == "model.gguf"
    assert caught.value.offset == SIZE
    assert reader.get(FileRange(fd, SIZE - 10, 5)) is None, "half a window is none"


def test_a_descriptor_that_is_none() -> None:
    with pytest.raises(ModelError, match="cannot read"):
        SmallReader([FileRange(-1, 0, 5, "model.gguf")]).fill(0)
