"""What the tests of the tools for cache directories share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cachedir import contents, write_model

from weightwire.cache import seeding
from weightwire.index import HashIndex, identity


@pytest.fixture
def small_threshold(monkeypatch: pytest.MonkeyPatch) -> int:
    """Have tensors over 1000 bytes seeded, so that tests need not write 10 MiB for each."""
    monkeypatch.setattr(seeding, "CACHE_THRESHOLD", 1000)
    return 1000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HashIndex]:
    """An index that knows a file at once, without waiting for its time stamps to settle."""
    monkeypatch.setattr(identity, "_RACY_NS", 0)
    with HashIndex(tmp_path / "index.sqlite3") as made:
        yield made


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "entries"


@pytest.fixture
def tensors() -> dict[str, bytes]:
    return contents(1001, 5000, 1000, 70_000, 0, 4096, 3 << 20)


@pytest.fixture
def model(tmp_path: Path, tensors: dict[str, bytes]) -> Path:
    return write_model(tmp_path / "model.safetensors", tensors)
