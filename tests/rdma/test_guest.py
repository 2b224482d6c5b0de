"""RDMA over real queue pairs: a guest with soft-RoCE is booted once and runs the checks in tests/rdma/guest; what
became of each is told here, one test for each function there.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from prepare import realmodel
from prepare.guest import SOFTROCE
from support.model_slice import write_slice
from support.require import do_without

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: The order they run in: the last one removes the device.
CHECKS = sorted(HERE.glob("guest/check_*.py"))
LIMIT = 1500
#: Seconds for one check in there, unless it says otherwise; they wait for nothing that long.
EACH = 240

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 60)]


def names(path: Path) -> list[str]:
    """``check_stream::test_bytes_arrive`` for each test function of a file."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [f"{path.stem}::{node.name}" for node in functions if node.name.startswith("test_")]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[ElementTree.Element]]:
    """The guest's report: the test cases of each check."""
    shared = tmp_path_factory.mktemp("guest")
    model = realmodel.model_ready()
    if model:
        write_slice(model, shared / "slice.gguf")
    # Importing takes long in there: only what is used.
    environment = ["env", f"WEIGHTWIRE_GUEST_FOLDER={shared}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"]
    pytest_there = [sys.executable, "-P", "-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    inner = [*pytest_there, "-q", "-rA", "--timeout", str(EACH)]
    report = [f"--junitxml={shared / 'report.xml'}", "-o", "junit_logging=all"]
    done = subprocess.run(
        [SOFTROCE, "--share", shared, "--timeout", str(LIMIT), "--", *environment, *inner, *report, *CHECKS],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "WEIGHTWIRE_LIB"))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 2 and done.stderr.startswith("softroce: "):
        do_without("the soft-RoCE guest", done.stderr.strip())
    print(done.stdout)
    if not (shared / "report.xml").exists():
        pytest.fail(f"the guest ended with {done.returncode}:\n{done.stdout}{done.stderr}", pytrace=False)
    found: dict[str, list[ElementTree.Element]] = {}
    for case in ElementTree.parse(shared / "report.xml").iter("testcase"):
        function = case.get("name", "").split("[")[0]
        found.setdefault(f"{case.get('classname', '').rsplit('.')[-1]}::{function}", []).append(case)
    assert sum(map(len, found.values())) > 0, done.stdout
    return found


@pytest.mark.parametrize("check", [name for path in CHECKS for name in names(path)])
def test_in_the_guest(outcomes: Mapping[str, Sequence[ElementTree.Element]], check: str) -> None:
    assert check in outcomes, f"the guest did not come to it; it ran {', '.join(outcomes)}"
    skipped = []
    for case in outcomes[check]:
        print(f"{case.get('name')}: {float(case.get('time', 0)):.1f} s in the guest")
        for kind in ("failure", "error", "skipped", "system-out"):
            for said in case.findall(kind):
                print(said.text)
                assert kind not in ("failure", "error"), f"{case.get('name')}:\n{said.text}"
                if kind == "skipped":
                    skipped.append(said.get("message", ""))
    if skipped:
        do_without("something in the guest", "; ".join(skipped))
