"""The expression that chooses tensors; the rest of the plan is tested by what a push puts on the wire."""

from __future__ import annotations

import pytest

from weightwire.errors import ConfigError
from weightwire.model.choosing import compile_include


def test_an_expression() -> None:
    assert compile_include(None) is None
    found = compile_include(r"^blk\.0\.")
    assert found is not None
    assert found.search("blk.0.weight")


@pytest.mark.parametrize(
    "include",
    ["(", "a{99999999999999999999}", "(" * 5000 + ")" * 5000, "[a", "(?P<x>a)(?P<x>b)", "a**", b"a", 5, ["a"]],
    ids=lambda include: repr(include)[:20],
)
def test_what_is_none(include: str) -> None:
    with pytest.raises(ConfigError, match="include") as caught:
        compile_include(include)
    assert caught.value.hint
    assert len(caught.value.detail) < 300
    assert caught.value.__cause__ is None
