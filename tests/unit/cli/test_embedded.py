"""The server in a process of its own: never left behind, and heard when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

import weightwire
from weightwire.cli import embedded
from weightwire.cli.embedded import EmbeddedServer
from weightwire.cli.failures import Failure
from weightwire.errors import WeightwireError

pytestmark = pytest.mark.timeout(120)


def script(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is about to end is waited for as long as a busy machine takes."""
    monkeypatch.setattr(embedded, "DEATH_SECONDS", 60.0)


ANNOUNCE = 'print(\'{"endpoint": "127.0.0.1:1"}\', flush=True);'


def test_it_serves_and_ends_and_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with EmbeddedServer() as server:
        pid = server.pid
        with weightwire.connect(server.endpoint) as connection:
            assert connection.push({"t": memoryview(b"abc")}, verify=True).summary.verified
    assert not psutil.pid_exists(pid)
    assert server.pid == 0
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [t for t in threading.enumerate() if t.name == "weightwire-server-log"]


def test_settings_for_other_servers_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_SERVER_PROTOCOL", "2.0")
    with EmbeddedServer() as server, weightwire.connect(server.endpoint) as connection:
        assert connection.protocol == "7.0.0"


def test_it_ends_when_the_work_fails() -> None:
    with pytest.raises(KeyError), EmbeddedServer() as server:
        pid = server.pid
        raise KeyError("the work failed")
    assert not psutil.pid_exists(pid)


@pytest.mark.usefixtures("patient")
def test_one_that_does_not_start_says_why() -> None:
    with pytest.raises(Failure) as caught, EmbeddedServer(command=script("import sys; sys.exit('no room\\nat all')")):
        pytest.fail("it did not start")
    assert caught.value.code == 3
    assert caught.value.detail == "the demo's server did not start (exit code 1); the last it said: no room | at all"
    with pytest.raises(Failure, match="cannot start"), EmbeddedServer(command=["/nonexistent/program"]):
        pytest.fail("it did not start")


def test_one_that_says_what_is_wrong_is_believed() -> None:
    with pytest.raises(Failure) as caught, EmbeddedServer(host="192.0.2.1"):
        pytest.fail("it did not start")
    assert (caught.value.code, caught.value.kind) == (3, "TransportError")
    assert caught.value.detail.startswith("the demo's server did not start: cannot listen on 192.0.2.1:0")
    assert caught.value.hint


@pytest.mark.usefixtures("patient")
def test_one_that_is_slow_to_end_has_its_own_exit_code() -> None:
    code = "import os, time; os.close(1); time.sleep(0.3); os._exit(7)"
    with pytest.raises(Failure, match=r"did not start \(exit code 7\)"), EmbeddedServer(command=script(code)):
        pytest.fail("it did not start")


def test_the_hint_is_the_command_that_was_run() -> None:
    with pytest.raises(Failure) as caught, EmbeddedServer(("--transport", "rdma"), command=script("")):
        pytest.fail("it did not start")
    assert "'weightwire serve --port 0 --host 127.0.0.1 --transport rdma'" in caught.value.hint


def test_one_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_SECONDS", 0.2)
    with pytest.raises(Failure, match="did not start") as caught, EmbeddedServer(command=script("input()")) as server:
        pytest.fail(f"it did not start: {server.pid}")
    assert caught.value.code == 3


@pytest.mark.usefixtures("patient")
def test_a_death_under_a_transfer_is_told_with_the_last_words() -> None:
    with (
        pytest.raises(Failure) as caught,
        EmbeddedServer() as server,
        weightwire.connect(server.endpoint) as connection,
    ):
        os.kill(server.pid, signal.SIGKILL)
        while True:
            connection.barrier()
    assert caught.value.code == 1
    assert caught.value.kind == "ServerDied"
    assert "killed by signal 9" in caught.value.detail
    assert "serving protocol 7.0.0" in caught.value.detail
    assert isinstance(caught.value.error, WeightwireError)


def test_a_failure_of_the_transfer_alone_is_told_as_it_is() -> None:
    with pytest.raises(weightwire.WeightwireError, match="no such thing"), EmbeddedServer():
        raise WeightwireError("no such thing")


@pytest.mark.usefixtures("patient")
def test_only_the_last_lines_are_kept() -> None:
    code = ANNOUNCE + "import sys; [print(i, file=sys.stderr) for i in range(5000)]; sys.exit(9)"
    with pytest.raises(Failure) as caught, EmbeddedServer(command=script(code)):
        raise WeightwireError("cut")
    assert caught.value.detail.endswith("(exit code 9); the last it said: 4995 | 4996 | 4997 | 4998 | 4999")


def test_one_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_SECONDS", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + ANNOUNCE + "time.sleep(600)"
    with EmbeddedServer(command=script(code)) as server:
        pid = server.pid
    assert not psutil.pid_exists(pid)


def test_ctrl_c_while_it_cleans_up_takes_effect_afterwards() -> None:
    code = (
        "import signal, time, os; signal.signal(signal.SIGTERM, lambda *a: os.kill(os.getppid(), signal.SIGINT) or "
        "time.sleep(0.2) or os._exit(0));" + ANNOUNCE + "time.sleep(600)"
    )
    with pytest.raises(KeyboardInterrupt), EmbeddedServer(command=script(code)) as server:
        pid = server.pid
    assert not psutil.pid_exists(pid)
    assert server.pid == 0


def test_ctrl_c_while_it_starts_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    real = subprocess.Popen

    def start(*arguments: object, **options: object) -> object:
        process = real(*arguments, **options)
        started.append(process.pid)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt), EmbeddedServer():
        pytest.fail("it started")
    assert len(started) == 1
    assert not psutil.pid_exists(started[0])
    assert not [t for t in threading.enumerate() if t.name == "weightwire-server-log"]
