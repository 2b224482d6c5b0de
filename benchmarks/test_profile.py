"""What profiling costs: a call of the clock off and on, beside a call that does nothing; and allocations."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from weightwire.profile import Stage
from weightwire.transport.profiling import LoadRecorder

CORE = Path(__file__).resolve().parents[1] / "csrc"
ROUNDS = 9
CALLS = [Stage.HASH, Stage.WIRE] * 5000


@pytest.mark.bench
def test_in_the_core(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Through C, as streams call it: off is one relaxed load and a branch beside an empty function."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "calls"
    sources = [Path(__file__).with_name("profile_calls.c"), CORE / "profile" / "profile.c"]
    options = ["-std=c11", "-O2", "-D_GNU_SOURCE", f"-I{CORE}", "-pthread"]
    subprocess.run([compiler, *options, "-o", program, *sources], check=True, timeout=60)
    found: dict[str, list[float]] = {}

    def run() -> None:
        for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
            name, ns = line.split()
            found.setdefault(name, []).append(float(ns))

    benchmark.pedantic(run, rounds=ROUNDS)
    ns = {name: median(values) for name, values in found.items()}
    rounds = [nothing / off for nothing, off in zip(found["nothing"], found["off"], strict=True)]
    benchmark.extra_info.update(ns)
    benchmark.extra_info.update(
        subject="off",
        rounds=len(rounds),
        median_seconds={name: ns[name] / 1e9 for name in ("off", "nothing")},
        times_as_fast_as={"nothing": median(rounds)},
        quartiles_times_as_fast_as={"nothing": quantiles(rounds, n=4)[::2]},
    )
    print(", ".join(f"{name} {value:.2f} ns" for name, value in ns.items()))
    assert set(ns) == {"warming", "nothing", "null", "off", "on"}


CALLED: dict[str, Callable[[int], object]] = {
    "off": LoadRecorder(on=False).switch,
    "on": LoadRecorder(on=True).switch,
    # A compiled function of one argument that returns a constant: what any call costs.
    "math.isfinite": math.isfinite,
}


@pytest.mark.bench
@pytest.mark.parametrize("name", CALLED)
def test_from_python(benchmark: BenchmarkFixture, name: str) -> None:
    """Calls per second of `switch`, in the midst of a loop in Python."""
    called = CALLED[name]

    def run() -> None:
        for stage in CALLS:
            called(stage)

    benchmark.pedantic(run, rounds=ROUNDS * 5, warmup_rounds=2)
    stats = benchmark.stats.stats
    print(f"{name}: {len(CALLS) / stats.median / 1e6:.1f} million calls/s")
    benchmark.extra_info["calls_per_s"] = len(CALLS) / stats.median


@pytest.mark.bench
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_no_allocation(benchmark: BenchmarkFixture, on: bool) -> None:
    """Not even for a moment: the peak of what the interpreter allocates does not move while it is called."""
    recorder = LoadRecorder(on=on)
    switch, begin, mark = recorder.switch, recorder.begin, recorder.mark

    def run() -> None:
        for stage in CALLS:
            begin()
            switch(stage)
            mark()

    def idle() -> None:
        for _ in CALLS:
            pass

    def peak_of(work: Callable[[], None]) -> int:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        work()
        return tracemalloc.get_traced_memory()[1] - before

    run()
    blocks = sys.getallocatedblocks()
    tracemalloc.start()
    try:
        run()
        idle()
        allocated = peak_of(run) - peak_of(idle)  # to look takes some memory itself
    finally:
        tracemalloc.stop()
    benchmark.pedantic(run, rounds=ROUNDS)
    benchmark.extra_info.update(allocated_bytes=allocated, calls=3 * len(CALLS))
    print(f"{'on' if on else 'off'}: {allocated} bytes more at the peak of {3 * len(CALLS)} calls")
    assert allocated < 1024
    assert sys.getallocatedblocks() - blocks < 100
