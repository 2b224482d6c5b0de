"""Pushing and registering memory over RDMA, in the soft-RoCE guest: what `rdma_guest.py` measures there, recorded.

No network card: the guest's device is software on an emulated processor, so that the ratios only show which side leaves
the link idle less, and what registering costs beside a copy there. Skipped where there is no guest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from rdma_guest import KERNELS

SCRIPT = Path(__file__).resolve().parent / "rdma_guest.py"
MIB = 32
LIMIT = 900
LEAST_ROUNDS = 5
"""An emulated machine scatters more than a real one: no median of fewer."""


def command(kernel: str, rounds: int) -> list[str]:
    """What is run for a guest with this kernel: ``rounds`` that count, or `LEAST_ROUNDS` if that is more."""
    least = str(max(rounds, LEAST_ROUNDS))
    return [sys.executable, str(SCRIPT), "--mib", str(MIB), "--rounds", least, "--kernel", kernel]


@pytest.fixture(scope="module", params=KERNELS, ids=["Linux 6.12", "Linux 6.1"])
def measured(request: pytest.FixtureRequest, rounds: int) -> Mapping[str, Any]:
    """What the script says of a guest, and the seconds it took."""
    started = time.perf_counter()
    done = subprocess.run(
        command(request.param, rounds),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode and "softroce: " in done.stderr:
        pytest.skip(f"no guest here: {done.stderr.strip().splitlines()[-1]}")
    if "no stock peer here" in done.stdout + done.stderr:
        pytest.skip("no stock peer here; ./test --prepare-only builds it")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    return {**found, "seconds": time.perf_counter() - started}


def keep(benchmark: BenchmarkFixture, summary: Mapping[str, Any]) -> None:
    """As `record` does, with what was measured elsewhere; the time of this process means nothing."""
    benchmark.pedantic(lambda: None, rounds=1)
    benchmark.extra_info.update(summary, network="soft-RoCE in an emulated guest")
    print(json.dumps(summary, indent=2))


@pytest.mark.bench
@pytest.mark.timeout(LIMIT + 60)
def test_push_over_rdma(benchmark: BenchmarkFixture, measured: Mapping[str, Any]) -> None:
    keep(benchmark, measured["push"])
    assert set(measured["push"]["times_as_fast_as"]) == {"stock pair", "weightwire, registered memory"}


@pytest.mark.bench
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("size", ["1 MiB", "16 MiB"])
def test_registration(benchmark: BenchmarkFixture, measured: Mapping[str, Any], size: str) -> None:
    keep(benchmark, measured["registration"][size])
    assert set(measured["registration"][size]["times_as_fast_as"]) == {"copy", "rings of a connection"}
