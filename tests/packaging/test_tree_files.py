"""The rules about files also hold where there is no git, or no checkout."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.require import do_without
from support.tree import tree_files

WRITTEN = ["README.md", "src/weightwire/errors.py", "tests/unit/test_config.py"]
MADE = [
    ".venv/lib/x.py", "env/pyvenv.cfg", "env/lib/x.py", "build/x.c", "dist/x.whl", "src/__pycache__/x.pyc",
    ".mypy_cache/x.json", "tests/.ruff_cache/x", ".hypothesis/x", "x.egg-info/PKG-INFO", "src/weightwire/x.so",
]  # fmt: skip


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    for name in (*WRITTEN, *MADE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def test_outside_a_checkout(unpacked: Path) -> None:
    assert [str(path) for path in tree_files(unpacked)] == WRITTEN


def test_without_git(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = set(map(str, tree_files(tree)))
    assert set(WRITTEN) <= found
    assert not [name for name in found if name.startswith((".git/", ".venv")) or "__pycache__" in name]


def test_inside_a_checkout_that_ignores_it(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        do_without("git", "it is not on the path")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("*\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "README.md").write_text("x")
    assert tree_files(tmp_path / "inner") == [Path("README.md")]
