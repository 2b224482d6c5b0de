"""Which files make up a source tree, whether or not it is a checkout."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

__all__ = ["tree_files"]

#: Folders of what was made in the tree, and not written.
MADE_FOLDERS = (
    "build",
    "dist",
    "__pycache__",
    "*.egg-info",
    ".git",
    ".*_cache",
    ".benchmarks",
    ".hypothesis",
    ".venv*",
)
MADE_FILES = ("*.so", "*.pyc")


def tree_files(tree: Path) -> list[Path]:
    """Every file of the tree that is, or is about to be, under version control; relative to its top.

    Git says which. Without git, or outside a checkout, it is every file but those that building and testing make.
    """
    command = ["git", "-c", f"safe.directory={tree}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, check=True)
        found = [Path(name) for name in os.fsdecode(done.stdout).split("\0") if name and (tree / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        found = []
    # None of them: the tree was unpacked inside a checkout of something else, which ignores it.
    return found or sorted(_walk(tree))


def _walk(tree: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(tree):
        here = Path(folder)
        folders[:] = [
            name for name in folders if not _made(name, MADE_FOLDERS) and not (here / name / "pyvenv.cfg").exists()
        ]
        for name in names:
            if not _made(name, MADE_FILES) and (here / name).is_file():
                yield (here / name).relative_to(tree)


def _made(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
