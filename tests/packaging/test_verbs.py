"""WEIGHTWIRE_VERBS, the switch of the build: on, off and auto, with the headers of libibverbs and without."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

#: All that CMakeLists.txt asks of cmake/verbs.cmake.
PROJECT = """cmake_minimum_required(VERSION 3.21)
project(probe LANGUAGES C)
include("{tree}/cmake/verbs.cmake")
message(STATUS "sources: ${{WW_VERBS_SOURCES}}")
"""


class Configured:
    """What became of a configuration: whether it worked, what was said, and which sources were chosen."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.worked = done.returncode == 0
        self.said = " ".join(done.stdout.split() + done.stderr.split())
        found = re.search(r"^-- sources: (.*)$", done.stdout, re.MULTILINE)
        self.sources = set(found[1].split(";")) if found else set()


def configure(build_python: Path, tree: Path, folder: Path, verbs: str, *, headers: bool) -> Configured:
    """Configure a build on a system of which only ``folder`` is seen, whether or not this one has the headers."""
    system, source = folder / "system", folder / "source"
    (system / "usr" / "include" / "infiniband").mkdir(parents=True)
    if headers:
        (system / "usr" / "include" / "infiniband" / "verbs.h").touch()
    source.mkdir()
    (source / "CMakeLists.txt").write_text(PROJECT.format(tree=tree))
    rooted = [f"-DCMAKE_FIND_ROOT_PATH={system}", "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY"]
    command = [build_python.parent / "cmake", "-G", "Ninja", "-S", source, "-B", folder / "build", *rooted]
    path = f"{build_python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(
        [*map(str, command), f"-DWEIGHTWIRE_VERBS={verbs}"],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "PATH": path},
    )  # fmt: skip
    return Configured(done)


@pytest.mark.parametrize("verbs", ["auto", "on"])
def test_with_headers_it_is_built(build_python, tree, tmp_path, verbs):
    found = configure(build_python, tree, tmp_path, verbs, headers=True)
    assert found.worked, found.said
    assert "built with RDMA" in found.said
    # All there are: a file that was forgotten would be missed when the module is loaded, and not before.
    folder = tree / "csrc" / "verbs"
    there = {str(path.relative_to(tree)) for path in folder.glob("*.c")} - {"csrc/verbs/none.c"}
    assert found.sources == there


def test_on_without_headers_is_an_error(build_python, tree, tmp_path):
    found = configure(build_python, tree, tmp_path, "on", headers=False)
    assert not found.worked
    assert "WEIGHTWIRE_VERBS=on and no infiniband/verbs.h (on Debian: apt-get install libibverbs-dev)" in found.said


def test_auto_without_headers_builds_without_and_warns(build_python, tree, tmp_path):
    found = configure(build_python, tree, tmp_path, "auto", headers=False)
    assert found.worked, found.said
    assert found.sources == {"csrc/verbs/none.c"}
    assert "CMake Warning" in found.said
    assert "built WITHOUT RDMA: no infiniband/verbs.h (on Debian: apt-get install libibverbs-dev)" in found.said


@pytest.mark.parametrize("headers", [False, True])
def test_off_builds_without(build_python, tree, tmp_path, headers):
    found = configure(build_python, tree, tmp_path, "off", headers=headers)
    assert found.worked, found.said
    assert found.sources == {"csrc/verbs/none.c"}
    assert "Warning" not in found.said


def test_nothing_else_is_taken(build_python, tree, tmp_path):
    found = configure(build_python, tree, tmp_path, "yes", headers=True)
    assert not found.worked
    assert "WEIGHTWIRE_VERBS is yes; it is auto, on or off" in found.said
