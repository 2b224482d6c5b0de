"""The report: what was measured is in it, what was not says so, and nothing else is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from support.require import do_without

from weightwire.profile import LoadProfile

from .conftest import BENCHMARKS


def cells(text: str, *begin: str) -> list[list[str]]:
    """The cells of the table rows that begin with ``begin``."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[: len(begin)] == list(begin)]


@pytest.fixture
def report(script: Callable, write: Callable, benchmarks: dict, tmp_path: Path) -> str:
    done = script("report.py", write(benchmarks), "--out", tmp_path, "--no-plots")
    assert done.returncode == 0, done.stderr
    return (tmp_path / "REPORT.md").read_text()


def section(text: str, title: str) -> str:
    """From a heading to the next."""
    return text.split(f"# {title}\n", 1)[1].split("\n#", 1)[0]


def test_loads(report: str) -> None:
    cold = section(report, "Cold cache")
    (head,) = cells(cold, "client")
    assert head[3:-1] == ["upload span", "reading", "hashing", "asking", "staging", "wire", "stalls", "gaps", "wall"]
    (ours,) = cells(cold, "new", "new", "unset")
    assert ours[3:] == ["1.000", "0.010", "0.250", "not measured", "0.125", "0.500", "0.062", "0.052", "1.250", "1"]
    (threads,) = cells(cold, "new", "new", "2")
    assert (threads[5], threads[-1]) == ("0.375", "1.00 (0.90 – 1.10)")
    (stock,) = cells(cold, "stock", "stock", "unset")
    assert stock[3:] == ["not measured"] * 8 + ["1.250", "2.50 (2.25 – 2.75)"]
    (absent,) = cells(cold, "old", "old", "unset")
    assert absent[3:] == ["not measured"] * 10
    assert len(cells(cold, "new", "new", "4")) == 1


def test_a_state_that_was_not_measured_has_its_table(report: str) -> None:
    warm = section(report, "Warm cache")
    rows = [row for row in cells(warm) if row[0] in ("new", "old", "stock")]
    assert len(rows) == 9
    assert all(row[3:] == ["not measured"] * 10 for row in rows)
    # Without a cache nothing is hashed, so there are no rows of threads.
    assert cells(section(report, "No cache"), "new", "new", "2") == []


def test_plots_stack_the_stages_that_profiles_have() -> None:
    import plots
    import report as module

    fields = {field.name for field in dataclasses.fields(LoadProfile)}
    assert list(plots.STAGES) == list(module.COLUMNS)[1:]
    assert {f"{stage}_ns" for stage in plots.STAGES} <= fields
    assert len(plots.STAGES) == len(plots._COLOURS) == len(set(plots._COLOURS))


def test_times_of_a_few_nanoseconds_are_told() -> None:
    import report as module

    assert module._seconds(1.94e-9) == "1.9 ns"
    assert module._seconds(2e-6) == "2 µs"


def test_ratios(report: str) -> None:
    push = section(report, "Pushing 1 GiB over loopback, no cache")
    first, second = cells(push, "876 tensors in a 27B model's proportions")
    assert first[1:] == ["weightwire", "socket pair", "0.90 (0.81 – 0.99)", "1.000 / 0.900", "3"]
    assert second[1:4] == ["weightwire", "stock pair", "1.50 (1.35 – 1.65)"]
    assert cells(push, "one tensor") == [["one tensor", *["not measured"] * 5]]
    hashing = section(report, "Hashing")
    assert (
        cells(hashing, "one buffer of 64 MiB, the fastest way of this processor", "fast", "plain")[0][3]
        == "4.00 (3.60 – 4.40)"
    )
    assert cells(section(report, "Peers that were not there"), "`test_push_uncached[mix]`", "gloo") != []


def test_the_machine(script: Callable, write: Callable, benchmarks: dict, tmp_path: Path, report: str) -> None:
    table = section(report, "Machine and versions")
    for row in (["processor", "Some CPU"], ["cores", "2"], ["memory", "8.0 GiB"], ["measured", "2030-01-02"]):
        assert row in cells(table)
    assert ["commit", "0123456789ab"] in cells(table)
    assert ["version of torch", "not measured"] in cells(table)
    # Whatever else a file says of the machine, it is not told.
    path = write(benchmarks, node="my-host", path="/srv/somebody")
    script("report.py", path, "--out", tmp_path, "--no-plots")
    text = (tmp_path / "REPORT.md").read_text()
    assert "my-host" not in text
    assert str(tmp_path) not in text
    assert "somebody" not in text


def test_what_the_harness_says_of_the_machine() -> None:
    import os
    import platform

    from harness.machine import describe

    found = describe()
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert platform.release().startswith(str(found["kernel"]))
    assert platform.node() not in map(str, found.values())
    assert not any(str(value).startswith("/") for value in found.values())


def test_plots(script: Callable, write: Callable, benchmarks: dict, tmp_path: Path) -> None:
    _need_matplotlib()
    path = write(benchmarks)
    for _ in range(2):
        done = script("report.py", path, "--out", tmp_path)
        assert done.returncode == 0, done.stderr
    text = (tmp_path / "REPORT.md").read_text()
    made = {each.name for each in (tmp_path / "plots").iterdir()}
    assert made == {"split-cold.png", "ratios.png"}
    for name in made:
        assert f"](plots/{name})" in text
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG\r\n")


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        do_without("matplotlib", "it is not installed")


def test_nothing_to_report(script: Callable, tmp_path: Path) -> None:
    done = script("report.py", "--out", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (tmp_path / "bad.json").write_text("{")
    done = script("report.py", tmp_path / "bad.json", "--out", tmp_path)
    assert done.returncode == 2
    assert "bad.json" in done.stderr
    assert not (tmp_path / "REPORT.md").exists()


def test_benchmarks_nobody_listed_are_reported_too(
    script: Callable, write: Callable, benchmarks: dict, tmp_path: Path
) -> None:
    one = benchmarks["test_push_uncached[mix]"]
    path = write({"test_new[x]": one, "test_many_buffers[1 MiB]": one})
    assert script("report.py", path, "--out", tmp_path, "--no-plots").returncode == 0
    text = (tmp_path / "REPORT.md").read_text()
    assert len(cells(section(text, "Others"), "test_new[x]")) == 2
    assert len(cells(section(text, "Hashing"), "test_many_buffers[1 MiB]")) == 2


def test_splits_and_allocations_of_single_benchmarks(
    script: Callable, write: Callable, benchmarks: dict, tmp_path: Path
) -> None:
    cold = benchmarks["test_push_uncached[mix]"] | {"split_seconds": {"span": 0.5, "read": 0.25, "wire": 0.125}}
    calls = {"allocated_bytes": 96, "calls": 30000}
    rate = {"calls_per_s": 12_300_000.0}
    path = write(
        {"test_cache[blocks-loopback-cold]": cold, "test_no_allocation[off]": calls, "test_from_python[on]": rate}
    )
    assert script("report.py", path, "--out", tmp_path, "--no-plots").returncode == 0
    text = (tmp_path / "REPORT.md").read_text()
    split = cells(section(text, "Through the cache, on loopback"), "cold")[-1]
    assert split == ["cold", "0.500", "0.250", *["not measured"] * 3, "0.125", *["not measured"] * 2]
    profiling = section(text, "Profiling")
    assert "off: 96 bytes allocated at the peak of 30000 calls." in profiling
    assert "on: 12.3 million calls a second." in profiling
    assert cells(profiling, "the clock's calls from Python, off") == []
    assert len(cells(profiling, "the clock's calls from Python, on")) == 1


def test_a_model_on_two_servers_has_a_section_with_the_split_of_each(
    script: Callable, write: Callable, benchmarks: dict, tmp_path: Path
) -> None:
    cold = benchmarks["test_push_uncached[mix]"] | {
        "split_seconds_by_server": {"first server": {"span": 0.5, "wire": 0.25}, "second server": {"span": 0.75}}
    }
    path = write({"test_split[shaped-cold]": cold, "test_split[new-cold]": cold})
    assert script("report.py", path, "--out", tmp_path, "--no-plots").returncode == 0
    split = section((tmp_path / "REPORT.md").read_text(), "A model split over two servers")
    label = "two servers at 2.5 Gbit/s, cold"
    assert [row[1:3] for row in cells(split, label)] == [["weightwire", "socket pair"], ["weightwire", "stock pair"]]
    assert cells(split, "two servers on loopback, cold") == [["two servers on loopback, cold", *["not measured"] * 5]]
    rest = ["not measured"] * 2
    assert cells(split, f"{label}, first server") == [
        [f"{label}, first server", "0.500", *["not measured"] * 4, "0.250", *rest]
    ]
    assert cells(split, f"{label}, second server")[0][1:3] == ["0.750", "not measured"]
    # One that nobody listed is there as well.
    assert len(cells(split, "test_split[new-cold]")) == 2


def test_what_is_measured_on_request_has_a_section_if_it_was(
    script: Callable, write: Callable, benchmarks: dict, tmp_path: Path, report: str
) -> None:
    title = "Through the cache, 876 tensors in a 27B model's proportions"
    assert f"# {title}" not in report
    path = write({"test_cache[mix-shaped-cold]": benchmarks["test_push_uncached[mix]"]})
    assert script("report.py", path, "--out", tmp_path, "--no-plots").returncode == 0
    mix = section((tmp_path / "REPORT.md").read_text(), title)
    assert [row[2] for row in cells(mix, "the mix at 2.5 Gbit/s, cold")] == ["socket pair", "stock pair"]
    assert cells(mix, "the mix on loopback, warm")[0][1:] == ["not measured"] * 5


def test_sections_list_benchmarks_that_exist() -> None:
    import report as module

    functions = "\n".join(path.read_text() for path in BENCHMARKS.glob("test_*.py"))
    for name in [name for _, rows in module.SECTIONS for name in rows] + list(module.MORE):
        assert f"def {name.split('[')[0]}(" in functions
    assert {title for title, _ in module.SECTIONS} >= module.ON_REQUEST
