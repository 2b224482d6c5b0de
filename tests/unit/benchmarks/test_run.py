"""`benchmarks/run.py`: what it starts, how it keeps to its budget, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import BENCHMARKS

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """The module, with its folder of results and its benchmarks elsewhere."""
    import run

    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run, "_HERE", tmp_path)
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--rounds', type=int)\n")
    (tmp_path / "test_good.py").write_text(
        "def test_good(benchmark, request):\n"
        "    benchmark.pedantic(lambda: None, rounds=1)\n"
        "    benchmark.extra_info['rounds'] = request.config.getoption('--rounds')\n"
    )
    (tmp_path / "test_bad.py").write_text("def test_bad(benchmark):\n    assert benchmark.pedantic(int, rounds=1)\n")
    (tmp_path / "test_long.py").write_text(
        "import time\ndef test_long(benchmark):\n    benchmark.pedantic(time.sleep, args=(600,), rounds=1)\n"
    )
    return run


def results(runner: object) -> set[str]:
    return {path.name for path in runner.RESULTS.iterdir()}


def test_steps_are_run_and_their_results_loaded(runner: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.results import load

    monkeypatch.setattr(runner, "STEPS", (runner.Step("good", 1, ("test_good.py",)),))
    reported: list[list[str]] = []
    monkeypatch.setattr(runner.report, "main", lambda arguments: reported.append(arguments) or 0)
    assert runner.main(["--rounds", "7", "--budget", "100"]) == 0
    (path,) = reported[0]
    assert load([Path(path)]).benchmarks["test_good"].facts["rounds"] == 7


def test_one_that_fails_does_not_stop_the_others(runner: object, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (runner.Step("bad", 1, ("test_bad.py",)), runner.Step("good", 1, ("test_good.py",)))
    monkeypatch.setattr(runner, "STEPS", steps)
    assert runner.main(["--no-report", "--budget", "100"]) == 1
    assert "good.json" in results(runner)


def test_what_does_not_fit_the_budget_leaves_no_result(runner: object, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.RESULTS.mkdir()
    for name in ("large.json", "long.json"):
        (runner.RESULTS / name).write_text("of an earlier run")
    steps = (runner.Step("large", 1000, ("test_good.py",)), runner.Step("long", 0.1, ("test_long.py",)))
    monkeypatch.setattr(runner, "STEPS", steps)
    assert runner.main(["--no-report", "--budget", "5"]) == 1
    assert results(runner) == set()


def test_a_step_on_request_is_run_when_it_is_named_alone(runner: object, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (runner.Step("good", 1, ("test_good.py",)), runner.Step("more", 1, ("test_good.py",), on_request=True))
    monkeypatch.setattr(runner, "STEPS", steps)
    for _ in range(2):
        assert runner.main(["--no-report", "--budget", "100"]) == 0
        assert results(runner) == {"good.json"}
        assert runner.main(["--no-report", "--budget", "100", "--only", "more"]) == 0
        assert results(runner) == {"good.json", "more.json"}


def test_an_emulated_machine_has_five_rounds_at_least() -> None:
    import test_rdma

    for asked, taken in ((1, "5"), (3, "5"), (7, "7")):
        words = test_rdma.command("some-kernel", asked)
        assert words[words.index("--rounds") + 1] == taken
        assert words[-2:] == ["--kernel", "some-kernel"]


def test_the_steps_name_benchmarks_that_exist(runner: object) -> None:
    for step in runner.STEPS:
        assert (BENCHMARKS / step.arguments[0]).is_file()
    assert sum(step.seconds for step in runner.STEPS if not step.on_request) <= runner.BUDGET
