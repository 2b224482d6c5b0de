"""The tree's own virtual environment (.venv), with weightwire installed in it from a wheel."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from prepare.base import (
    CannotPrepare,
    everything_required,
    lock,
    make_venv,
    pip,
    run,
    say,
    scratch,
    venv_python,
    write_atomically,
)
from prepare.peers import can_link_verbs

#: What the wheel is made from; a change in any of it means another wheel.
SOURCES = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "cmake", "csrc", "src")
#: Written last, so that its presence says that everything before was done.
STAMP = "weightwire-tests.json"
#: What must import for the environment to count as whole.
MODULES = ("weightwire", "pytest", "hypothesis", "numpy")


def venv_folder(tree: Path) -> Path:
    """The virtual environment of this tree."""
    return tree / ".venv"


def built_wheel(tree: Path) -> Path | None:
    """The wheel that is installed in the tree's virtual environment."""
    wheels = sorted((venv_folder(tree) / "wheel").glob("*.whl"))
    return wheels[0] if len(wheels) == 1 else None


def prepare_environment(tree: Path) -> Path:
    """Bring .venv up to date (nothing is done when it is) and return its Python. Raises CannotPrepare.

    It stays locked for as long as this process lives, whatever program it becomes: a second run in this tree may use it
    at the same time, but one that would change it waits.
    """
    # The script itself is what is locked: no further file is needed.
    handle = os.open(tree / "test", os.O_RDONLY)
    os.set_inheritable(handle, True)
    lock(handle, fcntl.LOCK_SH, waiting="this tree")
    if not _current(tree):
        lock(handle, fcntl.LOCK_EX, waiting="this tree")
        # Whoever held the lock meanwhile may have done it.
        if not _current(tree):
            _bring_up_to_date(tree)
        lock(handle, fcntl.LOCK_SH, waiting="this tree")
    return venv_python(venv_folder(tree))


def _current(tree: Path) -> bool:
    folder = venv_folder(tree)
    return _read(folder / STAMP) == _fingerprint(tree) and built_wheel(tree) is not None and _works(folder)


def _bring_up_to_date(tree: Path) -> None:
    folder = venv_folder(tree)
    wanted = _fingerprint(tree)
    stamp = folder / STAMP
    have = _read(stamp)
    fresh = not (have.get("python") == wanted["python"] and _works(folder))
    if fresh:
        say("making the virtual environment .venv")
        python = make_venv(folder)
    else:
        python = venv_python(folder)
        stamp.unlink(missing_ok=True)
    say("building the wheel")
    wheel = _build_wheel(tree, python, folder / "wheel")
    say("installing it with what the tests need")
    pip(python, "install", "--no-deps", "--force-reinstall", wheel, what="installing the wheel")
    if fresh or have["requirements"] != wanted["requirements"]:
        pip(python, "install", f"{wheel}[test]", what="installing what the tests need")
    if not _works(folder):
        names = ", ".join(MODULES)
        raise CannotPrepare(f"the virtual environment was made, but one of {names} does not import in it")
    write_atomically(stamp, json.dumps(wanted))


def _build_wheel(tree: Path, python: Path, destination: Path) -> Path:
    shutil.rmtree(destination, ignore_errors=True)
    with scratch(destination.parent, "build") as work:
        # A build folder of its own: one kept in the tree remembers tools of an earlier build environment that is gone.
        setting = f"build-dir={work / 'cmake'}"
        pip(
            python,
            "wheel",
            "--no-deps",
            "--wheel-dir",
            destination,
            "--config-settings",
            setting,
            "--config-settings",
            f"cmake.define.WEIGHTWIRE_VERBS={verbs_setting()}",
            tree,
            what="building the wheel",
            timeout=1200,
        )
    wheels = list(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise CannotPrepare(f"the build made {len(wheels)} wheels instead of one")
    return wheels[0]


def verbs_setting() -> str:
    """Whether RDMA is built in. Where nothing may be skipped it is an error that its headers are missing."""
    return "on" if everything_required() or can_link_verbs() else "auto"


def _works(folder: Path) -> bool:
    try:
        run([venv_python(folder), "-I", "-c", f"import {', '.join(MODULES)}"], what="a look at .venv", timeout=120)
    except CannotPrepare:
        return False
    return True


def _read(stamp: Path) -> dict[str, str]:
    try:
        content = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _fingerprint(tree: Path) -> dict[str, str]:
    requirements = hashlib.sha256((tree / "pyproject.toml").read_bytes()).hexdigest()
    # Where the environment stands belongs to it: a copied or moved tree must not run the programs of the old place.
    python = f"{sys.version} {os.path.realpath(sys.executable)} {venv_folder(tree)}"
    return {"python": python, "requirements": requirements, "sources": f"{_digest(tree)} verbs {verbs_setting()}"}


def _digest(tree: Path) -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        top = tree / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".pyc"):
                digest.update(f"{path.relative_to(tree)}\0{path.stat().st_mode & 0o111}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
