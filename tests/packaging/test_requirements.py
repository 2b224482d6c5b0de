"""What the tests do where the stock peers and the real model are not there: skip with the reason, or fail in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASKS = """
def test_model(gemma_path): pass
def test_peer(stock_lib): pass
def test_server(stock_server): stock_server("2.0.0")
def test_types(stock_protocol): pass
"""


def outcome(tree: Path, folder: Path, **environment: str) -> str:
    """Run four tests that want what an empty cache folder has not; pytest's summary."""
    cache, tests = folder / "cache", folder / "tests"
    (cache / "peers").mkdir(parents=True)
    (cache / "peers" / "ggml-0.3.16.why").write_text("the line was down")
    tests.mkdir()
    # The fixtures are those of the tree's own conftest.
    (tests / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(tree / 'tests')!r})\n")
    (tests / "test_asks.py").write_text(ASKS)
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "WEIGHTWIRE_TEST_REQUIRE_ALL")}
    options = ["-p", "no:cacheprovider", "-rsfE", "-c", os.devnull, f"--rootdir={folder}", "-p", "conftest_of_tree"]
    (folder / "conftest_of_tree.py").write_text(
        f"import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('tree_fixtures', {str(tree / 'tests' / 'conftest.py')!r})\n"
        f"module = importlib.util.module_from_spec(spec)\n"
        f"spec.loader.exec_module(module)\n"
        f"globals().update({{name: getattr(module, name) for name in dir(module) if not name.startswith('__')}})\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tests)],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, "PYTHONPATH": str(folder), "WEIGHTWIRE_TEST_CACHE": str(cache), **environment},
    )
    return done.stdout + done.stderr


def test_they_skip_and_say_why(tree, tmp_path):
    said = outcome(tree, tmp_path)
    assert "8 skipped" in said, said
    assert "the real model is not there: it was never prepared (run ./test)" in said
    assert "the stock peer of protocol 2.0.0 is not there: the line was down" in said


@pytest.mark.parametrize("name", ["CI", "WEIGHTWIRE_TEST_REQUIRE_ALL"])
def test_they_fail_where_nothing_may_be_skipped(tree, tmp_path, name):
    said = outcome(tree, tmp_path, **{name: "true"})
    assert "skipped" not in said, said
    assert "1 failed, 7 errors" in said, said
    assert "the stock peer of protocol 2.0.0 is not there: the line was down" in said
