"""What ``import weightwire`` gives and costs, and the laws the import linter cannot see."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import weightwire

SOURCE = Path(__file__).resolve().parents[2] / "src" / "weightwire"


def test_public_names_are_there() -> None:
    for name in weightwire.__all__:
        assert getattr(weightwire, name) is not None
        assert name in dir(weightwire)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'weightwire' has no attribute 'nothing'"):
        weightwire.nothing  # noqa: B018


def test_version_is_the_distributions() -> None:
    assert weightwire.__version__ == metadata.version("weightwire")


def test_importing_loads_and_starts_nothing() -> None:
    code = """
import logging, sys, threading
before = set(sys.modules)
import weightwire
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(loaded & {"numpy", "click", "rich", "blake3", "socket", "ctypes", "mmap"}))
print([name for name in sys.modules if name.startswith("weightwire.")])
print(threading.active_count(), logging.getLogger().handlers, logging.getLogger("weightwire").handlers)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[]", "[]", "1 [] []"]


def test_native_modules_import_nothing_above_them() -> None:
    own = {f"weightwire._native.{name}" for name in ("_base", "_core", "_profile", "_sentinel", "_verbs")}
    allowed = own | {"weightwire.errors", "weightwire.ranges"}
    modules = sorted((SOURCE / "_native").glob("*.pyx"))
    assert modules, "the .pyx files stand beside the package in a source tree"
    for path in modules:
        found = set(re.findall(r"^(?:from|import|cimport)\s+(weightwire[\w.]*)", path.read_text(), re.MULTILINE))
        assert found <= allowed, path


def test_no_source_file_is_past_500_lines() -> None:
    root = SOURCE.parents[1]
    paths = [
        p for folder in ("src", "csrc") for p in (root / folder).rglob("*") if p.suffix in {".py", ".pyx", ".c", ".h"}
    ]
    assert paths
    assert [str(p) for p in paths if len(p.read_text().splitlines()) > 500] == []
