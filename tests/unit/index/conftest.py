"""Files to index, and ways to change them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.indexing import CONTENT, ranges_of

from weightwire.index import HashIndex, identity
from weightwire.ranges import FileRange


@pytest.fixture(autouse=True)
def settled_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Spare each test the two seconds after which a file counts as settled; those about that set it themselves."""
    monkeypatch.setattr(identity, "_RACY_NS", 0)
    caplog.set_level(logging.WARNING, "weightwire.index")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "index.sqlite3"


@pytest.fixture
def index(place: Path) -> Iterator[HashIndex]:
    with HashIndex(place) as made:
        yield made


@pytest.fixture
def opened() -> Iterator[Callable[[Path], int]]:
    """Opens files, which are closed after the test."""
    fds: list[int] = []

    def open_(path: Path) -> int:
        fds.append(os.open(path, os.O_RDONLY))
        return fds[-1]

    yield open_
    for fd in fds:
        os.close(fd)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def ranges(model: Path, opened: Callable[[Path], int]) -> list[FileRange]:
    return ranges_of(model, opened(model))
