"""The one place that decides whether a test may do without something."""

from __future__ import annotations

from typing import NoReturn

import pytest
from prepare.base import everything_required


def do_without(what: str, reason: str) -> NoReturn:
    """Skip the test, saying why; fail it where nothing may be skipped (CI=true, ./test --require-all)."""
    text = f"{what} is not there: {reason}"
    if everything_required():
        pytest.fail(text, pytrace=False)
    pytest.skip(text)
