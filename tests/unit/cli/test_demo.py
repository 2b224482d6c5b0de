"""``weightwire demo``: does the whole job, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from weightwire.cli import demo, embedded, output
from weightwire.errors import RdmaUnavailable
from weightwire.transport import memory, rdma

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, empty before and, unless a test says otherwise, after."""
    import tempfile

    path = tmp_path / "scratch"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return path


def test_it_verifies_every_byte_and_says_what_the_time_went_on(invoke, scratch: Path) -> None:
    ran = invoke("demo", "--size", "16MiB", "-q")
    assert ran.code == 0
    assert ran.err == ""
    for words in ("876 tensors", "16.0 MiB", "GiB/s", "every byte verified", "verifying", "-bound: the time went on"):
        assert words in ran.out
    assert not os.listdir(scratch)
    assert not psutil.Process().children()


def test_the_object(invoke, scratch: Path) -> None:
    report = invoke("demo", "--size", "2MiB", "--json").json
    assert set(report) >= {
        "model",
        "generated",
        "kept",
        "endpoint",
        "tensors",
        "bytes",
        "seconds",
        "gib_per_s",
        "profile",
    }
    assert (report["tensors"], report["verified"], report["generated"], report["kept"]) == (876, True, True, False)
    assert report["sent"] == report["bytes"]
    assert report["profile"]["verify_ns"] > 0
    assert not os.path.exists(report["model"])


def test_a_model_of_ones_own_is_left_alone(invoke, scratch: Path, small_gguf: Path) -> None:
    before = small_gguf.stat()
    report = invoke("demo", str(small_gguf), "--json").json
    assert (report["model"], report["generated"], report["verified"]) == (str(small_gguf), False, True)
    assert small_gguf.stat().st_mtime_ns == before.st_mtime_ns
    assert not os.listdir(scratch)


def test_keep_keeps_the_model_and_says_where(invoke, scratch: Path) -> None:
    report = invoke("demo", "--size", "1MiB", "--keep", "--json").json
    assert report["kept"] is True
    assert Path(report["model"]).parent.parent == scratch
    assert invoke("info", report["model"], "--json").json["tensors"] == 876
    assert "kept at" in invoke("demo", "--size", "1MiB", "--keep").out


def _kept(scratch: Path) -> str:
    """The model that was left, after which ``scratch`` is empty again."""
    (model,) = scratch.glob("weightwire-demo-*/*")
    shutil.rmtree(model.parent)
    return str(model)


def test_keep_says_where_if_something_fails_afterwards(invoke, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_COMMAND", ("-c", "import sys; sys.exit('out of luck')"))
    ran = invoke("demo", "--size", "1MiB", "--keep", "--json").failed(3, "out of luck")
    assert f"kept at {_kept(scratch)}\n" in ran.err


def test_keep_says_where_if_nobody_reads_the_result(invoke, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(text: str) -> None:
        raise output.StdoutClosed

    monkeypatch.setattr(demo, "line", gone)
    ran = invoke("demo", "--size", "1MiB", "--keep", "-q")
    assert f"kept at {_kept(scratch)}\n" in ran.err


def test_keep_keeps_no_part_of_a_model(invoke, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    ran = invoke("demo", "--size", "1MiB", "--keep").failed(3, "No space left")
    assert "kept" not in ran.err
    assert not os.listdir(scratch)


def test_what_cannot_be_had_is_found_out_before_a_model_is_written(
    invoke, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(addresses: object) -> str:
        raise RdmaUnavailable("no device", hint="use TCP")

    monkeypatch.setattr(rdma, "usable_address", none)
    monkeypatch.setattr(demo, "_generate", lambda *given: pytest.fail("a model was written"))
    invoke("demo", "--size", "1MiB", "--transport", "rdma").failed(3, "no device")
    assert not os.listdir(scratch)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--size", "1KiB"), "876 tensors"),
        (("--size", "big"), "size"),
        (("missing.gguf",), "missing.gguf"),
        (("missing.gguf", "--size", "1GiB"), "--size"),
        (("missing.gguf", "--keep"), "--keep"),
    ],
)
def test_usage(invoke, scratch: Path, words: tuple[str, ...], said: str) -> None:
    invoke("demo", *words).failed(2, said)
    assert not os.listdir(scratch)


def test_settings_it_does_not_have_do_not_matter(invoke, scratch: Path) -> None:
    others = {"WEIGHTWIRE_CACHE": "x", "WEIGHTWIRE_PROTOCOL": "x", "WEIGHTWIRE_SERVER_PORT": "x"}
    assert invoke("demo", "--size", "1MiB", "-q", **others).code == 0
    invoke("demo", "--size", "1MiB", WEIGHTWIRE_TIMEOUT="x").failed(2, "WEIGHTWIRE_TIMEOUT")


def test_an_empty_model_is_usage_and_starts_no_server(invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import save_file

    monkeypatch.setattr(demo, "EmbeddedServer", lambda: pytest.fail("a server was started"))
    save_file({}, tmp_path / "empty.safetensors")
    invoke("demo", str(tmp_path / "empty.safetensors")).failed(2, "no tensor")


def test_too_little_disk(invoke, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2 << 20, 1 << 20, 1 << 20))
    ran = invoke("demo", "--size", "16MiB", "--json").failed(3, str(1 << 20), str(32 << 20), "TMPDIR")
    assert ran.json["error"]["type"] == "NotEnoughRoom"
    assert not os.listdir(scratch)


def test_too_little_memory(invoke, scratch: Path, small_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 8 << 20)
    invoke("demo", "--size", "16MiB").failed(3, str(8 << 20), "--size")
    invoke("demo", str(small_gguf)).failed(3, str(8 << 20))
    assert not os.listdir(scratch)
    assert not psutil.Process().children()


def test_a_disk_that_fills_up(invoke, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    invoke("demo", "--size", "1MiB").failed(3, "No space left", "TMPDIR")
    assert not os.listdir(scratch)


def test_a_folder_for_temporary_files_that_cannot_be_written(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    monkeypatch.setattr(demo, "_check_disk", lambda directory, size: None)
    invoke("demo", "--size", "1MiB").failed(3, "/proc/weightwire-demo-", "TMPDIR")


def test_a_tmpdir_that_is_no_directory_is_not_passed_over(
    invoke, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch / "file").touch()
    for wrong in ("none", "file"):
        monkeypatch.setenv("TMPDIR", str(scratch / wrong))
        invoke("demo", "--size", "1MiB").failed(2, "TMPDIR", wrong, "no directory that can be written")
    (scratch / "file").unlink()


def test_a_folder_of_that_name_is_somebody_elses(invoke, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = scratch / "weightwire-demo-0"
    theirs.mkdir()
    (theirs / "precious").write_bytes(b"")
    monkeypatch.setattr(demo.secrets, "token_hex", lambda nbytes: "0")
    invoke("demo", "--size", "1MiB").failed(3, "weightwire-demo-0")
    assert (theirs / "precious").exists()


def test_a_server_that_does_not_start(invoke, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_COMMAND", ("-c", "import sys; sys.exit('out of luck')"))
    ran = invoke("demo", "--size", "1MiB", "--json").failed(3, "did not start", "out of luck")
    assert ran.json["error"]["type"] == "ServerDied"
    assert not os.listdir(scratch)


def test_a_server_that_dies_under_it(invoke, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0));"
        'print(\'{"endpoint": "127.0.0.1:%d"}\' % s.getsockname()[1], flush=True);'
        "c, _ = s.accept(); c.recv(64); c.sendall((28).to_bytes(8, 'little') + bytes([7, 0, 0, 0]) + bytes(24));"
        "c.recv(1); print('about to die', file=sys.stderr); sys.exit(9)"
    )
    monkeypatch.setattr(embedded, "_COMMAND", ("-c", code))
    monkeypatch.setattr(embedded, "DEATH_SECONDS", 60.0)  # it is about to end, and has the time it takes
    invoke("demo", "--size", "1MiB", "--json").failed(1, "died (exit code 9)", "about to die")
    assert not os.listdir(scratch)


# Ended from outside: in a process of its own.


HELD_SERVER = """
import pathlib, select
from weightwire.server.receive import Receiver
receive = Receiver._recv_into
def hold(receiver, piece):
    pathlib.Path("REACHED").touch()
    gone = select.poll()
    gone.register(receiver.stream.fileno(), select.POLLRDHUP)
    gone.poll()
    receive(receiver, piece)
Receiver._recv_into = hold
"""


def _held(reached: Path) -> str:
    """Has the demo's server take the first tensor's bytes, and say at ``reached`` that it is there, only once the
    connection has ended: however slow the machine, the demo is not over before it is interrupted.
    """
    server = HELD_SERVER.replace("REACHED", str(reached)) + "from weightwire.cli import main; main()"
    return f"from weightwire.cli import embedded; embedded._COMMAND = ('-c', {server!r}, *embedded._COMMAND[2:])"


def _wait_for(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not what():
        if process.poll() is not None:
            pytest.fail(f"it ended before it could be interrupted: {process.communicate()}")
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)]
)
@pytest.mark.parametrize("stage", ["generating", "starting", "pushing"])
def test_interrupted_it_leaves_nothing(
    spawn, finish, scratch: Path, tmp_path: Path, number: signal.Signals, code: int, stage: str
) -> None:
    reached = tmp_path / "reached"
    process = spawn("demo", "--size", "256MiB", "-q", first=_held(reached))
    watched = psutil.Process(process.pid)
    child: list[psutil.Process] = []

    def begun() -> object:
        if stage == "generating":
            return os.listdir(scratch)
        child[:] = watched.children()
        return child and (stage == "starting" or reached.exists())

    _wait_for(begun, process)
    process.send_signal(number)
    # As when a terminal closes: its shell sends one too.
    process.send_signal(number)
    ran = finish(process)
    assert ran.code == code, ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""
    assert not os.listdir(scratch)
    psutil.wait_procs(child, timeout=20)
    assert not [c for c in child if c.is_running()]


def test_interrupted_it_says_where_the_kept_model_is(spawn, finish, scratch: Path, tmp_path: Path) -> None:
    process = spawn("demo", "--size", "8MiB", "--keep", "-q", first=_held(tmp_path / "reached"))
    watched = psutil.Process(process.pid)
    _wait_for(watched.children, process)
    process.send_signal(signal.SIGINT)
    ran = finish(process)
    assert ran.code == 130, ran.err
    assert f"kept at {_kept(scratch)}\n" in ran.err
    assert "Traceback" not in ran.err


def test_killed_it_leaves_no_process(spawn, finish, scratch: Path, tmp_path: Path) -> None:
    process = spawn("demo", "--size", "256MiB", "-q", first=_held(tmp_path / "reached"))
    watched = psutil.Process(process.pid)
    _wait_for(watched.children, process)
    (child,) = watched.children()
    process.kill()
    finish(process)
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not alive


def test_profile_on_stderr(invoke, scratch: Path) -> None:
    ran = invoke("demo", "--size", "2MiB", "-q", "--profile", "--json")
    assert ran.json["profile"]["set_tensor_calls"] == 876
    assert ran.err.count("client, connection with") == 1
