"""A system that gives no more threads: what can be done without is done, and what cannot is not called a defect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cachedir import contents, entries_of, files_in, write_model
from support.leaks import LeakCheck

import weightwire
from weightwire.cache.pool import run_each
from weightwire.cli.embedded import EmbeddedServer
from weightwire.cli.failures import ENVIRONMENT, Failure, as_failure
from weightwire.cli.progress import LineDisplay, Progress
from weightwire.errors import TransportError

MIB = 1 << 20

Refuse = Callable[..., None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refuse]:
    """Have no thread started whose name has one of some words in it."""
    refused: list[str] = []
    right = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if any(word in thread.name for word in refused):
            raise RuntimeError("can't start new thread")
        right(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    yield lambda *words: refused.extend(words)
    refused.clear()


@pytest.fixture
def tensors() -> dict[str, bytes]:
    return contents(11 * MIB, 10 * MIB + 1, 10 * MIB + 2)


@pytest.fixture
def model(tmp_path: Path, tensors: dict[str, bytes]) -> Path:
    return write_model(tmp_path / "model.safetensors", tensors)


def is_the_systems(error: Exception) -> bool:
    assert isinstance(error, TransportError)
    failure = as_failure(error)
    assert "can't start new thread" in failure.detail
    assert "ulimit -u" in failure.hint
    assert "ulimit -v" in failure.hint
    return failure.code == ENVIRONMENT


@pytest.mark.parametrize("word", ["weightwire-cache", "weightwire-cache_1", "weightwire-"])
def test_seeding_and_verifying(
    word: str, refuse: Refuse, invoke, model: Path, tensors: dict[str, bytes], tmp_path: Path, no_leaks: LeakCheck
) -> None:
    directory = tmp_path / "entries"
    refuse(word)
    ran = invoke("seed", str(model), "--cache", str(directory), "--threads", "3", WEIGHTWIRE_INDEX="off")
    assert ran.code == 0, ran.err
    assert files_in(directory) == entries_of(*tensors.values())
    ran = invoke("cache", "verify", "--cache", str(directory), "--threads", "3", WEIGHTWIRE_INDEX="off")
    assert ran.code == 0, ran.err
    assert "3" in ran.out


@pytest.mark.parametrize("given", range(4))
def test_each_is_worked_on_by_as_many_threads_as_there_are(
    given: int, refuse: Refuse, no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(*(f"weightwire-cache_{number}" for number in range(given, 3)))
    names: set[str] = set()

    def work(item: int, check: Callable[[], None]) -> int:
        names.add(threading.current_thread().name)
        check()
        return item * item

    took: list[int] = []
    run_each(range(20), work, 3, took=took.append)
    assert sorted(took) == [item * item for item in range(20)]
    allowed = {f"weightwire-cache_{number}" for number in range(given)} or {threading.current_thread().name}
    assert names <= allowed
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (given < 3)


@pytest.mark.parametrize("given", [0, 1])
def test_what_is_raised_ends_all_work(given: int, refuse: Refuse, no_leaks: LeakCheck) -> None:
    refuse(*(f"weightwire-cache_{number}" for number in range(given, 3)))

    def work(item: int, check: Callable[[], None]) -> int:
        raise KeyError(item)

    with pytest.raises(KeyError):
        run_each(range(20), work, 3)


def test_a_push(refuse: Refuse, no_leaks: LeakCheck, invoke, model: Path, tmp_path: Path) -> None:
    with weightwire.Server(port=0, cache=tmp_path / "entries") as server:
        refuse("weightwire-hash", "weightwire-progress", "weightwire-cache", "weightwire-populate", "weightwire-sync")
        for _ in range(2):
            ran = invoke("push", str(model), server.endpoints[0], "--no-index", "--verify")
            assert ran.code == 0, ran.err


def test_one_of_several_servers(refuse: Refuse, no_leaks: LeakCheck, invoke, small_gguf: Path) -> None:
    with weightwire.Server(port=0) as one, weightwire.Server(port=0) as other:
        ends = [one.endpoints[0], other.endpoints[0]]
        refuse(f"-to-{ends[0]}")
        with weightwire.push_all(small_gguf, ends, index=False) as pushed:
            assert pushed[0].error is not None
            assert is_the_systems(pushed[0].error)
            assert pushed[0].error.endpoint == ends[0]  # type: ignore[attr-defined]
            assert pushed[1].error is None
            assert pushed[1].result is not None
        ran = invoke("push", str(small_gguf), *ends, "--no-index")
        ran.failed(ENVIRONMENT, "can't start new thread", "ulimit -u")


def test_looking_up_a_name(refuse: Refuse, no_leaks: LeakCheck, invoke, small_gguf: Path) -> None:
    refuse("-resolve-")
    with pytest.raises(TransportError) as caught:
        weightwire.connect("localhost:1")
    assert is_the_systems(caught.value)
    invoke("push", str(small_gguf), "localhost:1", "--no-index").failed(ENVIRONMENT, "ulimit -u")


def test_a_server_without_an_acceptor(refuse: Refuse, no_leaks: LeakCheck, invoke) -> None:
    refuse("-accept")
    with pytest.raises(TransportError) as caught:
        weightwire.Server(port=0).start()
    assert is_the_systems(caught.value)
    invoke("serve", "--port", "0").failed(ENVIRONMENT, "ulimit -u")


def test_work_without_its_progress(refuse: Refuse, no_leaks: LeakCheck) -> None:
    refuse("weightwire-progress")
    with Progress("working", 10, LineDisplay()) as progress:
        progress.report("a", 10, 10)
    assert progress._thread is None


@pytest.mark.parametrize("word", ["weightwire-server-log", "weightwire-limit"])
def test_a_demo(word: str, refuse: Refuse, no_leaks: LeakCheck) -> None:
    refuse(word)
    server = EmbeddedServer()
    with pytest.raises((TransportError, Failure)) as caught, server:
        pass
    assert as_failure(caught.value).code == ENVIRONMENT  # type: ignore[arg-type]
    assert server.pid == 0
