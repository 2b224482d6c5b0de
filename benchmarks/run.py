"""Measure everything that the report shows, and write the report: benchmarks/run.py [--budget SECONDS] [--rounds N]

Wants weightwire installed with the extra "bench", `./test --prepare-only` for the stock peer and the guest, and a
machine with nothing else to do. Results go to benchmarks/results/, one file for each step. A step that no longer fits
the budget is left out, and one that overruns it is ended: the report says "not measured" then. Exit code 1 if any step
failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE))

import report  # noqa: E402  (found through the path set above)

RESULTS = _HERE / "results"

BUDGET = 1700
"""Seconds for all steps but those on request, with three rounds each."""


@dataclass(frozen=True)
class Step:
    """Some of the benchmarks: what pytest is told, and about how long it takes with three rounds, seconds.

    "rdma" takes five rounds at least. One that is ``on_request`` is left to --only.
    """

    name: str
    seconds: float
    arguments: tuple[str, ...]
    on_request: bool = False


#: In order of importance. The seconds are of two cores of a virtual machine.
STEPS = (
    Step("matrix", 190, ("test_matrix.py", "--matrix-mib", "512")),
    Step("push", 50, ("test_push.py",)),
    Step("small", 30, ("test_small_tensors.py",)),
    Step("import", 15, ("test_import.py",)),
    Step("gguf", 40, ("test_gguf_walk.py",)),
    Step("hashing", 45, ("test_hashing.py",)),
    Step("profile", 25, ("test_profile.py",)),
    Step("cache", 310, ("test_cache.py", "-k", "blocks")),
    Step("split", 600, ("test_split.py",)),
    Step("hits", 60, ("test_cache_hit.py",)),
    Step("seed", 20, ("test_seed.py",)),
    Step("rdma", 180, ("test_rdma.py", "-k", "6.12")),
    Step("mix", 325, ("test_cache.py", "-k", "mix", "--every-shape"), on_request=True),
)


def run(step: Step, rounds: int, limit: float) -> bool:
    """Run a step for at most ``limit`` seconds. Whether it ended by itself and well."""
    result = RESULTS / f"{step.name}.json"
    file, *rest = step.arguments
    command = [sys.executable, "-m", "pytest", str(_HERE / file), *rest, "--rounds", str(rounds)]
    command += ["-q", "-rs", "-p", "no:cacheprovider", f"--benchmark-json={result}"]
    # In a group of its own: what it has started ends with it.
    process = subprocess.Popen(command, cwd=_HERE.parent, stdin=subprocess.DEVNULL, process_group=0)
    try:
        return process.wait(limit) == 0
    except subprocess.TimeoutExpired:
        print(f"run.py: {step.name}: ended, the budget is used up", file=sys.stderr)
        return False
    finally:
        _end(process)
        if result.exists() and not result.stat().st_size:
            result.unlink()  # opened before anything ran, and never written


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, patience in ((signal.SIGINT, 30.0), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, write the report, return the exit code."""
    parser = argparse.ArgumentParser(description="Measure everything that the report shows, and write the report.")
    parser.add_argument(
        "--budget", type=float, default=BUDGET, metavar="SECONDS", help=f"for all of it (default: {BUDGET})"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds that count (default: 3)")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="these steps")
    parser.add_argument("--no-report", action="store_true", help="leave REPORT.md as it is")
    options = parser.parse_args(arguments)
    RESULTS.mkdir(exist_ok=True)
    started, failed = time.monotonic(), []
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"run.py: the load is {load:.1f} already; what is measured now will scatter", file=sys.stderr)
    for step in STEPS:
        if options.only and step.name not in options.only:
            continue
        # Nothing of an earlier run may pass for a result of this one.
        (RESULTS / f"{step.name}.json").unlink(missing_ok=True)
        if step.on_request and not options.only:
            continue
        left = options.budget - (time.monotonic() - started)
        expected = step.seconds * max(options.rounds, 1) / 3
        if expected > left:
            print(f"run.py: {step.name}: left out, {left:.0f} s are left and it takes {expected:.0f}", file=sys.stderr)
            failed.append(step.name)
        elif not run(step, options.rounds, left):
            failed.append(step.name)
    took = time.monotonic() - started
    print(f"run.py: {took:.0f} s; not done: {', '.join(failed) or 'nothing'}", file=sys.stderr)
    code = 0 if options.no_report else report.main([str(path) for path in sorted(RESULTS.glob("*.json"))])
    return code or (1 if failed else 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("run.py: interrupted")
