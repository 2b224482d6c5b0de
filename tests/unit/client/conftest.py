"""What tests of the push share."""

from __future__ import annotations

import pytest

from weightwire.index import identity


@pytest.fixture
def always_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were written just now can be recorded in an index, which would otherwise wait for two seconds."""
    monkeypatch.setattr(identity, "_RACY_NS", 0)
