"""What ``import weightwire`` costs a process, beside a Python that imports nothing and one that imports numpy.

A process each, with an empty environment but for what finds the modules, so that no profile of the user's counts.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from harness.rounds import Rounds, record
from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 15
OTHERS = {
    "python alone": "pass",
    "import numpy": "import numpy",
    "import weightwire and connect": "import weightwire; weightwire.connect",
}


def run(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - started


def imported(code: str) -> set[str]:
    """The modules that ``code`` leaves imported, beyond those of a Python that runs nothing."""
    found = []
    for text in ("pass", code):
        report = f"{text}; import sys; print(*sys.modules)"
        said = subprocess.run([sys.executable, "-c", report], check=True, capture_output=True, text=True)
        found.append(set(said.stdout.split()))
    return found[1] - found[0]


@pytest.mark.bench
def test_import(benchmark: BenchmarkFixture) -> None:
    subject, code = "import weightwire", "import weightwire"
    taken = Rounds(0)
    for text in (code, *OTHERS.values()):
        run(text)  # the page cache, and compiled modules

    def others() -> None:
        for name, text in OTHERS.items():
            taken.add(name, run(text))

    benchmark.pedantic(lambda: taken.add(subject, run(code)), setup=others, rounds=ROUNDS)
    modules = imported(code)
    record(benchmark, taken, subject, modules=len(modules))
    assert "weightwire" in modules
    assert "numpy" not in modules
