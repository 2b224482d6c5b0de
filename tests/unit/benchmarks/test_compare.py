"""Ratios against floors: met, violated, not measured, unknown, and files that are no such thing."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import BENCHMARKS, facts


@pytest.fixture
def floors(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "floors.toml"
        path.write_text(text)
        return path

    return write


MET = """
["test_push_uncached[mix]"]
"socket pair" = 0.9  # equal is enough
"stock pair" = 1.2
["test_matrix[cold]"]
"stock client, stock server" = 2
"""


def test_met(script: Callable, write: Callable, benchmarks: dict, floors: Callable) -> None:
    done = script("compare.py", write(benchmarks), floors(MET))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "3 of 3 floors met"
    assert "test_push_uncached[mix]: 0.9 times as fast as socket pair: 0.90" in done.stdout


def test_below(script: Callable, write: Callable, benchmarks: dict, floors: Callable) -> None:
    done = script("compare.py", write(benchmarks), floors(MET.replace("1.2", "1.6")))
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert failed == ["FAILED  test_push_uncached[mix]: 1.6 times as fast as stock pair: 1.50, below the floor"]


def test_absolute_times_do_not_matter(script: Callable, write: Callable, benchmarks: dict, floors: Callable) -> None:
    for recorded in benchmarks.values():
        recorded["median_seconds"] = {name: 1000 * took for name, took in recorded["median_seconds"].items()}
    assert script("compare.py", write(benchmarks), floors(MET)).returncode == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # left out of the run
        (
            '["test_push_uncached[1 x 1 GiB]"]\n"socket pair" = 1',
            "not measured; did you mean 'test_push_uncached[mix]'?",
        ),
        # a peer that was not there
        ('["test_push_uncached[mix]"]\ngloo = 1', "not measured: torch is not installed"),
        # no such peer, no such benchmark
        ('["test_push_uncached[mix]"]\n"sockets pair" = 0.1', "did you mean 'socket pair'?"),
        ('["qqq"]\n"socket pair" = 1', "not measured; the results have 'test_push_uncached[mix]', "),
    ],
)
def test_what_is_missing_fails_by_its_name(
    script: Callable, write: Callable, benchmarks: dict, floors: Callable, text: str, said: str
) -> None:
    done = script("compare.py", write(benchmarks), floors(MET + "\n" if "mix]" not in text else text))
    if "mix]" not in text:
        done = script("compare.py", write(benchmarks), floors(MET + text))
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 1
    assert said in failed[0]


def test_numbers_that_are_none_are_not_measured(
    script: Callable, write: Callable, floors: Callable, tmp_path: Path
) -> None:
    recorded: dict[str, Any] = facts("weightwire", {"socket pair": float("nan"), "stock pair": 1.5})
    recorded["times_as_fast_as"]["gloo"] = None
    done = script(
        "compare.py", write({"b": recorded}), floors('[b]\n"socket pair" = 0.1\ngloo = 0.1\n"stock pair" = 1')
    )
    assert done.returncode == 1
    assert done.stdout.count("not measured") == 2
    assert "1 of 3 floors met" in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not toml",
        "top = 1",
        "[empty]",
        '[b]\np = "1"',
        "[b]\np = 0",
        "[b]\np = -1",
        "[b]\np = nan",
        "[b]\np = true",
    ],
)
def test_floors_that_cannot_be_used(
    script: Callable, write: Callable, benchmarks: dict, floors: Callable, text: str
) -> None:
    done = script("compare.py", write(benchmarks), floors(text))
    assert done.returncode == 2
    assert done.stderr.startswith("compare.py: ")
    assert "floors.toml" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"benchmarks": [1]}', '{"benchmarks": [{"name": "b"}]}'])
def test_results_that_are_none(script: Callable, floors: Callable, tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    done = script("compare.py", path, floors(MET))
    assert done.returncode == 2
    assert "result.json" in done.stderr
    assert script("compare.py", tmp_path / "missing.json", floors(MET)).returncode == 2


def test_several_files_but_nothing_twice(script: Callable, write: Callable, benchmarks: dict, floors: Callable) -> None:
    names = list(benchmarks)
    first = write({name: benchmarks[name] for name in names[:1]}, "first.json")
    second = write({name: benchmarks[name] for name in names[1:]}, "second.json")
    assert script("compare.py", first, second, floors(MET)).returncode == 0
    done = script("compare.py", first, second, write(benchmarks), floors(MET))
    assert done.returncode == 2
    assert "is in another of the files too" in done.stderr


def test_our_floors_can_be_read_and_name_benchmarks_that_exist() -> None:
    import compare

    floors = compare.read_floors(BENCHMARKS / "floors.toml")
    functions = "\n".join(path.read_text() for path in BENCHMARKS.glob("test_*.py"))
    for name in floors:
        assert f"def {name.split('[')[0]}(" in functions
    # Each has its reason.
    text = (BENCHMARKS / "floors.toml").read_text()
    assert tomllib.loads(text) == floors
    assert text.count("#") >= len(floors)
