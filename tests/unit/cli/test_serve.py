"""``weightwire serve``, as a process of its own: what it announces, how it ends, where it cannot start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.leaks import eventually

import weightwire
from weightwire.cache.directory import make_directory, unmake_directories
from weightwire.cli.serve import _cache_directory
from weightwire.hashing import fnv1a64

pytestmark = pytest.mark.timeout(120)

MEMBERS = {"endpoint", "endpoints", "port", "protocol", "cache", "cache_verify", "retain", "memory", "transport", "pid"}
MEMBERS |= {"metrics", "metrics_port", "optimized"}


def endpoint_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_it_prints_the_port_it_got_and_ends_on_sigterm(spawn, finish) -> None:
    process = spawn("serve", "--port", "0")
    endpoint = endpoint_of(process)
    assert endpoint.startswith("127.0.0.1:")
    assert int(endpoint.rsplit(":")[1]) > 0
    with weightwire.connect(endpoint) as connection:
        assert connection.protocol == "7.0.0"
        assert not connection.server_has_cache
        process.send_signal(signal.SIGTERM)
        ran = finish(process)
    assert ran.code == 0
    assert ran.out == ""
    assert "Traceback" not in ran.err


def test_it_logs_to_stderr(spawn, finish) -> None:
    process = spawn("serve", "--port", "0")
    endpoint_of(process)
    process.terminate()
    assert "INFO weightwire.server" in finish(process).err
    process = spawn("serve", "--port", "0", environ={"WEIGHTWIRE_LOG": "error"})
    endpoint_of(process)
    process.terminate()
    assert finish(process).err == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)])
def test_another_signal_ends_it_in_order_too(spawn, finish, number: signal.Signals, code: int) -> None:
    process = spawn("serve", "--port", "0")
    with weightwire.connect(endpoint_of(process)) as connection:
        process.send_signal(number)
        ran = finish(process)
        with pytest.raises(weightwire.WeightwireError):
            connection.barrier()
    assert ran.code == code
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("option", ["--host", "--metrics-host"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_is_heard_while_a_name_is_looked_up(tmp_path: Path, option: str, number: int, code: int) -> None:
    program = """
import socket, sys, threading
right = socket.getaddrinfo
def getaddrinfo(host, port, *rest, flags=0, **named):
    if host not in ("slow", b"slow"):
        return right(host, port, *rest, flags=flags, **named)
    if flags & socket.AI_NUMERICHOST:
        raise socket.gaierror(socket.EAI_NONAME, "not a number")
    print("asked", flush=True)
    threading.Event().wait()
socket.getaddrinfo = getaddrinfo
from weightwire.cli import main
main()
"""
    words = ["serve", "--port", "0", "--metrics-port", "0", "--cache", str(tmp_path / "cache"), option, "slow"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert endpoint_of(process) == "asked"
            process.send_signal(number)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (out, process.returncode) == ("", code)
    assert "Traceback" not in err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["a shell's background job", "nohup"])
def test_what_was_ignored_stays_ignored(spawn, finish, number: signal.Signals) -> None:
    process = spawn("serve", "--port", "0", preexec_fn=lambda: signal.signal(number, signal.SIG_IGN))
    endpoint = endpoint_of(process)
    process.send_signal(number)
    with weightwire.connect(endpoint) as connection:
        connection.barrier()
    process.terminate()
    assert finish(process).code == 0


def test_the_object_and_the_settings(spawn, finish, tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "cache"
    process = spawn(
        *("serve", "--host", "localhost", "--port", "0", "--cache", str(cache), "--protocol", "5.1"),
        *("--cache-verify", "size", "--retain", "process", "--memory", "1.5GiB", "--transport", "tcp", "--json"),
    )
    report = json.loads(endpoint_of(process))
    assert set(report) == MEMBERS
    assert report["endpoint"] in report["endpoints"]
    assert report["endpoint"].endswith(f":{report['port']}")
    assert (report["protocol"], report["retain"], report["memory"]) == ("5.1", "process", 3 << 29)
    assert report["cache_verify"] == "size"
    assert report["metrics"] is report["metrics_port"] is None
    assert (report["cache"], report["pid"], report["transport"]) == (str(cache), process.pid, "tcp")
    assert cache.is_dir()
    with weightwire.connect(report["endpoint"]) as connection:
        assert connection.dialect.version == (5, 1)
        assert connection.server_has_cache
    process.terminate()
    assert finish(process).code == 0


def test_the_environment_configures_it(spawn, finish) -> None:
    process = spawn("serve", "--json", environ={"WEIGHTWIRE_SERVER_PORT": "0", "WEIGHTWIRE_SERVER_PROTOCOL": "3.6"})
    report = json.loads(endpoint_of(process))
    assert report["protocol"] == "3.6"
    with weightwire.connect(report["endpoint"]) as connection:
        assert connection.dialect.version == (3, 6)
    process.terminate()
    assert finish(process).code == 0


def test_the_cache_directory_itself_holds_the_entries(spawn, finish, tmp_path: Path) -> None:
    content = os.urandom(11 << 20)
    process = spawn("serve", "--port", "0", "--cache", str(tmp_path / "cache"))
    with weightwire.connect(endpoint_of(process)) as connection:
        connection.push({"large": memoryview(content)})
    process.terminate()
    assert finish(process).code == 0
    assert os.listdir(tmp_path / "cache") == [f"{fnv1a64(content):016x}"]
    assert (tmp_path / "cache" / f"{fnv1a64(content):016x}").read_bytes() == content


def test_a_lifeline_ends_it_with_its_parent(spawn, finish) -> None:
    process = spawn("serve", "--port", "0", "--lifeline", stdin=subprocess.PIPE)
    endpoint_of(process)
    process.stdin.write("whatever comes is not the end\n")
    process.stdin.flush()
    process.stdin.close()
    process.stdin = None
    assert finish(process).code == 0


def test_a_port_in_use(spawn, finish) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = finish(spawn("serve", "--port", port, "--json"))
    ran.failed(3, port, "hint:", "another port")
    assert ran.json["error"]["exit_code"] == 3


def test_an_address_of_another_machine(spawn, finish) -> None:
    finish(spawn("serve", "--host", "192.0.2.1", "--port", "0")).failed(3, "192.0.2.1", "hint:")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--port", "65536"), "65536"),
        (("--protocol", "9.9"), "7.0, 8.0"),
        (("--protocol", "8.9"), "8.9"),
        (("--protocol", "7.0.256"), "255"),
        (("--host", ""), "--host"),
        (("--host", " "), "--host"),
        (("--cache", ""), "--cache"),
        (("--cache", "~nosuchuser/x"), "--cache"),
        (("--protocol", "new"), "protocol version"),
        (("--cache-verify", "nothing"), "nothing"),
        (("--retain", "forever"), "forever"),
        (("--memory", "much"), "size"),
        (("--memory", "0"), "size"),
        (("surplus",), "surplus"),
        (("--metrics-port", "65536"), "65536"),
        (("--metrics-port", "0", "--metrics-host", "a:9"), "--metrics-host"),
    ],
)
def test_usage(invoke, words: tuple[str, ...], said: str) -> None:
    invoke("serve", *words).failed(2, said)


def test_a_bad_variable_is_named(invoke) -> None:
    invoke("serve", WEIGHTWIRE_SERVER_PORT="http").failed(2, "WEIGHTWIRE_SERVER_PORT", "http")
    invoke("serve", WEIGHTWIRE_SERVER_HOST="").failed(2, "WEIGHTWIRE_SERVER_HOST", "empty")
    invoke("serve", WEIGHTWIRE_SERVER_CACHE="").failed(2, "WEIGHTWIRE_SERVER_CACHE", "empty")
    invoke("serve", WEIGHTWIRE_SERVER_CACHE_VERIFY="never").failed(2, "WEIGHTWIRE_SERVER_CACHE_VERIFY", "content")
    invoke("serve", WEIGHTWIRE_SERVER_PROTOCOL="8.9").failed(2, "WEIGHTWIRE_SERVER_PROTOCOL", "8.9")
    invoke("serve", WEIGHTWIRE_SERVER_METRICS_PORT="http").failed(2, "WEIGHTWIRE_SERVER_METRICS_PORT", "http")
    invoke("serve", WEIGHTWIRE_LOG="loud").failed(2, "WEIGHTWIRE_LOG", "loud")


def test_a_cache_that_is_a_file_is_usage_and_one_that_cannot_be_made_is_the_environment(
    invoke: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    invoke("serve", "--port", "0", "--cache", str(tmp_path / "file")).failed(2, "not a directory", "hint:")
    invoke("serve", "--port", "0", "--cache", str(tmp_path / "file" / "below")).failed(3, "cannot create", "hint:")
    invoke("serve", "--port", "0", "--cache", "/proc/weightwire").failed(3, "/proc/weightwire", "hint:")


def test_a_cache_that_cannot_be_written(invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    invoke("serve", "--port", "0", "--cache", str(tmp_path)).failed(3, "cannot write", str(tmp_path))


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
@pytest.mark.parametrize("there", [False, True])
def test_a_server_that_does_not_start_leaves_no_cache_directory(
    invoke, tmp_path: Path, option: str, there: bool
) -> None:
    directory = tmp_path / "a" / "b" / "c"
    if there:
        directory.parent.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--port": "0", "--metrics-port": "0", option: str(taken.getsockname()[1])}
        words = [word for pair in ports.items() for word in pair]
        invoke("serve", *words, "--cache", str(directory)).failed(3, "hint:")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_cache_directory_that_turns_out_to_be_of_no_use_is_not_left(
    invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    invoke("serve", "--port", "0", "--cache", str(tmp_path / "a" / "b")).failed(3, "cannot write")
    name = "x" * 300
    invoke("serve", "--port", "0", "--cache", str(tmp_path / "a" / name)).failed(3, "cannot create")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_directory_that_another_server_unmakes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one had made it, and could not begin."""
    directory = tmp_path / "a" / "b"
    made = make_directory(directory)
    real = os.access

    def unmade_first(path: Path, mode: int) -> bool:
        unmake_directories(made)
        made.clear()
        return real(path, mode)

    monkeypatch.setattr(os, "access", unmade_first)
    with contextlib.ExitStack() as unmaking:
        assert _cache_directory(str(directory), unmaking) == directory
        assert directory.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_nobody_to_announce_to(spawn, finish) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        ran = finish(spawn("serve", "--port", "0", stdout=pipe, environ={"WEIGHTWIRE_LOG": "error"}))
    assert (ran.code, ran.err) == (141, "")


# Metrics.


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(url, timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def test_metrics_are_served_beside_it(spawn, finish, small_gguf: Path) -> None:
    process = spawn("serve", "--port", "0", "--metrics-port", "0", "--json")
    report = json.loads(endpoint_of(process))
    url = report["metrics"]
    assert url == f"http://127.0.0.1:{report['metrics_port']}/metrics"
    assert metric(url, "weightwire_completed_tensors_total") == 0
    with weightwire.connect(report["endpoint"]) as connection:
        pushed = connection.push(small_gguf)
        tensors, nbytes = pushed.summary.tensors, pushed.summary.bytes
        assert eventually(lambda: metric(url, "weightwire_completed_tensors_total") == tensors)
        assert nbytes < metric(url, "weightwire_rx_bytes_total") < nbytes + 1000 * (tensors + 10)
        # A scraper that hangs does not hold up the end.
        with socket.create_connection(("127.0.0.1", report["metrics_port"])):
            process.terminate()
            ran = finish(process)
    assert ran.code == 0
    assert "Traceback" not in ran.err
    with pytest.raises(OSError):
        metric(url, "weightwire_completed_tensors_total")


def test_where_the_metrics_are_is_no_result(spawn, finish) -> None:
    environ = {"WEIGHTWIRE_SERVER_METRICS_PORT": "0", "WEIGHTWIRE_LOG": "error"}
    process = spawn("serve", "--port", "0", environ=environ)
    assert endpoint_of(process).startswith("127.0.0.1:")
    process.send_signal(signal.SIGINT)
    ran = finish(process)
    assert (ran.code, ran.out) == (130, "")
    assert re.fullmatch(r"weightwire: metrics at http://127\.0\.0\.1:[0-9]+/metrics\n", ran.err)


def test_a_port_for_metrics_that_is_in_use(spawn, finish) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = finish(spawn("serve", "--port", "0", "--metrics-port", port, "--json"))
    ran.failed(3, port, "hint:", "another port")
    assert ran.json["error"]["exit_code"] == 3


def test_metrics_without_prometheus_client(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "weightwire.metrics", raising=False)
    monkeypatch.delattr(weightwire, "metrics", raising=False)
    invoke("serve", "--port", "0", "--metrics-port", "0").failed(3, "prometheus_client", "pip install", "hint:")


def test_a_signal_that_interrupts_another_thread_ends_the_wait_too() -> None:
    """What a handler in Python would sleep through: the signal comes, and the waiting call is not interrupted."""
    code = """
import signal, threading, time
from weightwire.cli.serve import _Stop
with _Stop() as stop:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    def kill():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    threading.Thread(target=kill, daemon=True).start()
    stop.wait(lifeline=False)
    print(stop.signals)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == f"[{signal.SIGTERM:d}]\n", done.stderr


def push_small(endpoint: str, count: int) -> None:
    with weightwire.connect(endpoint) as connection:
        connection.push({f"t{i}": np.zeros(10, "f4") for i in range(count)})


def test_profiles_on_stderr(spawn, finish) -> None:
    process = spawn("serve", "--port", "0", "--profile")
    endpoint = endpoint_of(process)
    push_small(endpoint, 3)
    push_small(endpoint, 5)
    with weightwire.connect(endpoint) as connection:
        connection.devices()
    process.terminate()
    ran = finish(process)
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.count("server, connection with") == 2, "nothing was loaded over the third"
    assert "  3 SET_TENSOR, 120 bytes" in ran.err
    assert "  5 SET_TENSOR, 200 bytes" in ran.err


def test_the_variable_profiles_too_and_leaves_stdout_alone(spawn, finish) -> None:
    process = spawn("serve", "--port", "0", "--json", environ={"GGML_RPC_LOADPROF": "1"})
    push_small(json.loads(endpoint_of(process))["endpoint"], 3)
    process.terminate()
    ran = finish(process)
    assert ran.out == ""
    assert "  3 SET_TENSOR, 120 bytes" in ran.err


def test_profiles_as_objects(spawn, finish) -> None:
    process = spawn("serve", "--port", "0", "--profile", "--json")
    announced = json.loads(endpoint_of(process))
    assert set(announced) == MEMBERS
    push_small(announced["endpoint"], 3)
    # One line for each connection, as soon as it has ended.
    first = json.loads(endpoint_of(process))["profile"]
    assert (first["side"], first["set_tensor_calls"], first["set_tensor_bytes"]) == ("server", 3, 120)
    assert first["bottleneck"].endswith("-bound")
    push_small(announced["endpoint"], 5)
    process.terminate()
    ran = finish(process)
    (line,) = ran.out.splitlines()
    assert json.loads(line)["profile"]["set_tensor_calls"] == 5
    assert "SET_TENSOR," not in ran.err


def test_a_reader_of_profiles_that_left_costs_nothing(spawn, finish) -> None:
    process = spawn("serve", "--port", "0", "--profile", "--json")
    endpoint = json.loads(endpoint_of(process))["endpoint"]
    assert process.stdout is not None
    process.stdout.close()
    for _ in range(3):
        push_small(endpoint, 2)
    process.stdout = None
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err
