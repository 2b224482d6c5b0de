"""Rules about the source tree that a machine can check: layers, types, style, lengths, nothing of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(sys.executable).parent
MAX_LINES = 500
SOURCES = {".py", ".pyi", ".pyx", ".pxd", ".c", ".h", ".cmake"}


def run(tree: Path, *command: object) -> str:
    """Run a checker in the tree; its output is the failure's text."""
    done = subprocess.run([str(part) for part in command], cwd=tree, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def test_layers(tree):
    said = run(tree, SCRIPTS / "lint-imports", "--no-cache")
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", said), said


def imported(path: Path) -> Iterator[str]:
    """The modules that a Python file imports anywhere in it, by their full names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_two_rooms_use_the_native_modules(tree):
    package = tree / "src" / "weightwire"
    users = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if any(name.startswith("weightwire._native") for name in imported(path))
    }
    assert users - {"_native"} == {"transport", "hashing.py"}


def test_wire_does_no_input_or_output(tree):
    for path in (tree / "src" / "weightwire" / "wire").rglob("*.py"):
        names = {name.split(".")[0] for name in imported(path)}
        assert not names & {"socket", "os", "io", "mmap", "select", "ssl", "asyncio", "threading", "pathlib"}, path


def test_what_cython_modules_import(tree):
    """The import checker cannot see these files; they carry and decide nothing, so they need almost nothing."""
    files = [*(tree / "src").rglob("*.pyx"), *(tree / "src").rglob("*.pxd")]
    assert len(files) >= 3
    for path in files:
        for line in path.read_text().splitlines():
            match = re.match(r"\s*(?:from\s+([\w.]+)\s+c?import|c?import\s+([\w.]+))\b", line)
            if not match or match[1] == "__future__":
                continue
            name = match[1] or match[2]
            if name.startswith("weightwire"):
                assert re.match(r"weightwire\.(_native|errors|ranges)\b", name), f"{path.name}: {line.strip()}"
            else:
                # threading: who waits on the main thread has to look for signals, which Python handles there alone.
                allowed = {"libc", "posix", "cpython", "cython", "errno", "os", "threading"}
                assert name.split(".")[0] in allowed, f"{path.name}: {line.strip()}"


def test_the_core_knows_no_python(tree):
    files = [*(tree / "csrc").rglob("*.c"), *(tree / "csrc").rglob("*.h")]
    assert files
    for path in files:
        assert "Python.h" not in path.read_text(), path


@pytest.mark.slow
def test_types(tree):
    assert "Success" in run(tree, sys.executable, "-m", "mypy", "--strict")


@pytest.mark.slow
def test_stubs_say_what_the_native_modules_have(tree, wheel, tmp_path):
    modules = [f"weightwire._native.{path.stem}" for path in (tree / "src/weightwire/_native").glob("_*.pyx")]
    assert modules
    # Cython adds __test__ for doctest and no caller sees it; the buffer protocol has no name in Python before 3.12.
    wanted = [rf"{re.escape(module)}\.__test__" for module in modules]
    if sys.version_info < (3, 12):
        wanted.append(r"weightwire\._native\.\w+\.\w+\.__buffer__")
    allowed = tmp_path / "allowed"
    allowed.write_text("\n".join(wanted))
    options = ["--allowlist", allowed, "--ignore-unused-allowlist"]
    # Outside the tree, so that the installed stubs are compared and not those in src.
    said = run(tmp_path, sys.executable, "-P", "-m", "mypy.stubtest", *modules, *options)
    assert "Success" in said


def test_style(tree):
    run(tree, sys.executable, "-m", "ruff", "check", ".")


def test_format(tree):
    run(tree, sys.executable, "-m", "ruff", "format", "--check", ".")


def test_no_file_is_too_long(tree, files):
    sources = [path for path in files if path.suffix in SOURCES or path.name in ("test", "run")]
    assert len(sources) > 50
    lengths = {str(path): len((tree / path).read_text().splitlines()) for path in sources}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def test_nothing_of_one_machine(tree, files):
    """No home folder of anybody, no host of a package registry, no mark of unfinished work."""
    # Put together here so that this file does not hold what it looks for.
    wanted = {
        "a folder of one machine": rf"(?<![\w.~])/(?:{'home'}|{'Users'})/(?!me\b|user\b)[a-z]\w*|(?<![\w.])/{'root'}/",
        "a registry's host": rf"\b(?:{'pypi'}\.org|{'python'}hosted\.org)\b",
        "unfinished work": rf"\b(?:{'TO' + 'DO'}|{'FIX' + 'ME'}|{'X' * 3})\b|{'NotImplemented' + 'Error'}",
    }
    found = []
    # In the compressed pixels of an image any three letters may come together.
    for path in (path for path in files if path.suffix != ".png"):
        text = (tree / path).read_bytes().decode(errors="replace")
        for what, pattern in wanted.items():
            found += [f"{path}: {what}: {match[0]}" for match in re.finditer(pattern, text)]
    assert not found


def test_the_scripts_can_be_run(tree):
    for name in ("test", ".ci/run"):
        assert (tree / name).stat().st_mode & 0o111 == 0o111, name
