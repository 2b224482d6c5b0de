"""Results as the benchmarks write them, small and made up, and a way to run what reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

MACHINE = {"cpu": "Some CPU", "cores": 2, "memory_bytes": 8 << 30, "kernel": "6.1", "file_system": "ext4"}


def facts(subject: str, ratios: dict[str, float], **more: Any) -> dict[str, Any]:
    """What `harness.rounds.record` keeps."""
    return {
        "subject": subject,
        "bytes": 1 << 30,
        "rounds": 3,
        "median_seconds": {subject: 1.0, **ratios},
        "times_as_fast_as": ratios,
        "quartiles_times_as_fast_as": {name: [ratio * 0.9, ratio * 1.1] for name, ratio in ratios.items()},
        **more,
    }


def row(client: str, server: str, threads: int | None, split: dict[str, float] | None) -> dict[str, Any]:
    """A row of test_matrix."""
    return {"client": client, "server": server, "threads": threads, "seconds": 1.25, "split_seconds": split}


@pytest.fixture
def benchmarks() -> dict[str, dict[str, Any]]:
    """Benchmarks by their names, with what they recorded."""
    split = {"span": 1.0, "read": 0.01, "hash": 0.25, "staging": 0.125, "wire": 0.5, "wait": 0.0625, "gap": 0.0525}
    stock = "stock client, stock server"
    return {
        "test_push_uncached[mix]": facts(
            "weightwire", {"socket pair": 0.9, "stock pair": 1.5}, absent={"gloo": "torch is not installed"}
        ),
        "test_matrix[cold]": facts(
            "new client, new server",
            {stock: 2.5, "new client, new server, 2 threads": 1.0},
            rows={
                "new client, new server": row("new", "new", None, split),
                "new client, new server, 2 threads": row("new", "new", 2, split | {"hash": 0.375}),
                stock: row("stock", "stock", None, None),
            },
            absent={"old client, old server": "there is no plain way here"},
        ),
        "test_one_buffer[64 MiB]": facts("fast", {"plain": 4.0}),
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write benchmarks as a file of pytest-benchmark."""

    def one(benchmarks: dict[str, dict[str, Any]], name: str = "result.json", **machine: object) -> Path:
        path = tmp_path / name
        entries = [{"name": each, "extra_info": recorded} for each, recorded in benchmarks.items()]
        value = {
            "machine_info": MACHINE | machine,
            "datetime": "2030-01-02T03:04:05",
            "commit_info": {"id": "0123456789abcdef", "dirty": False},
            "benchmarks": entries,
        }
        path.write_text(json.dumps(value))
        return path

    return one


@pytest.fixture
def script() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script of benchmarks/ in a process of its own."""

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, BENCHMARKS / name, *arguments]
        return subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=110)

    return run
