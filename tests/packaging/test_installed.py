"""What `pip install . && weightwire demo`, with which the README begins, needs: the wheel, and what it requires."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from prepare.base import CannotPrepare, make_venv, pip
from support.require import do_without

#: The wheel may have to be built first.
pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel and its run-time requirements, and nothing else."""
    try:
        python = make_venv(tmp_path_factory.mktemp("installed") / "venv")
        pip(python, "install", wheel, what="installing the wheel with what it requires", timeout=110)
    except CannotPrepare as problem:
        do_without("an environment with the wheel", str(problem))
    return python.parent


def test_nothing_of_the_tests_is_there(installed):
    listing = json.loads(pip(installed / "python", "list", "--format=json", what="listing what is installed"))
    names = {each["name"].lower().replace("_", "-") for each in listing}
    assert {"weightwire", "numpy", "click", "rich", "blake3"} <= names
    assert not {"pytest", "gguf", "safetensors", "prometheus-client", "cython", "psutil"} & names


def test_the_demo_works(installed, tmp_path):
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        [installed / "weightwire", "demo", "--size", "4MiB", "--json"],
        cwd=tmp_path, env={**kept, "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["verified"] is True
    assert found["sent"] == found["bytes"] > 3 << 20
