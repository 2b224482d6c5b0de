"""The wheel under test, an sdist made from this tree, and a wheel made from that sdist."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest
from prepare.base import CannotPrepare, make_venv, pip, run
from prepare.environment import built_wheel, venv_folder, verbs_setting
from support.require import do_without
from support.tree import tree_files

TREE = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def tree() -> Path:
    """The top of the source tree."""
    return TREE


@pytest.fixture(scope="session")
def files(tree: Path) -> list[Path]:
    """Every file of the tree that is, or is about to be, under version control; relative to its top."""
    return tree_files(tree)


@pytest.fixture(scope="session")
def build_python(tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Path:
    """The Python of an environment that holds what pyproject.toml wants for building, and nothing else."""
    requires = tomllib.loads((tree / "pyproject.toml").read_text())["build-system"]["requires"]
    try:
        python = make_venv(tmp_path_factory.mktemp("build") / "venv")
        pip(python, "install", *requires, "cmake", "ninja", what="installing the build requirements")
    except CannotPrepare as problem:
        do_without("an environment to build in", str(problem))
    return python


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Path:
    """The wheel that is installed here when ./test made this environment; otherwise one built from the tree."""
    made_by_test = built_wheel(tree) if Path(sys.prefix) == venv_folder(tree) else None
    if made_by_test:
        return made_by_test
    return build_wheel(request.getfixturevalue("build_python"), tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(build_python: Path, tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Path:
    """The source distribution of this tree."""
    folder = tmp_path_factory.mktemp("sdist")
    script = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    run([build_python, "-c", script, folder], what="building the sdist", timeout=100, cwd=tree)
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.fixture(scope="session")
def wheel_from_sdist(build_python: Path, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the source distribution alone, by a compiler that has nothing to warn of: neither in the core
    nor in what Cython makes of the modules.
    """
    folder = tmp_path_factory.mktemp("wheel-from-sdist")
    return build_wheel(build_python, sdist, folder, "cmake.define.WEIGHTWIRE_WERROR=on")


def build_wheel(python: Path, source: Path, folder: Path, *settings: str) -> Path:
    """Build one wheel from a tree or an sdist."""
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    options = ["--no-deps", "--no-build-isolation", "--config-settings", f"build-dir={folder / 'cmake'}"]
    options += ["--config-settings", f"cmake.define.WEIGHTWIRE_VERBS={verbs_setting()}"]
    for setting in settings:
        options += ["--config-settings", setting]
    pip(python, "wheel", *options, "--wheel-dir", folder, source, what="building a wheel", timeout=110, env=path)
    (made,) = folder.glob("*.whl")
    return made
