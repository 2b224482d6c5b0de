"""``weightwire push``: what it sends, what it says, and how it fails."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.profiles import INSIDE, Spans

import weightwire
from weightwire.errors import IntegrityError

pytestmark = pytest.mark.timeout(120)

MEMBERS = {
    "endpoint",
    "protocol",
    "spoken",
    "optimized",
    "transport",
    "tensors",
    "bytes",
    "sent",
    "hits",
    "misses",
    "corrupt_hits",
    "hashes_known",
    "threads",
    "verified",
    "verify_seconds",
    "seconds",
    "gib_per_s",
    "profile",
}


def test_every_tensor_arrives_and_the_report_says_so(invoke, server, small_gguf: Path) -> None:
    ran = invoke("push", str(small_gguf), server.endpoints[0], "--verify")
    assert ran.code == 0
    assert "876 tensors" in ran.out
    assert "every byte verified" in ran.out
    assert ran.err == ""
    with weightwire.open_model(small_gguf) as model:
        assert set(server.tensors) == set(model.tensors)
        for name, tensor in model.tensors.items():
            assert server.tensors[name].view() == tensor.view()


def test_the_object(invoke, server, small_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans(monkeypatch)
    report = invoke("push", str(small_gguf), server.endpoints[0], "--json").json
    assert set(report) == MEMBERS
    assert report["endpoint"] == server.endpoints[0]
    assert report["protocol"] == "7.0.0"
    assert report["transport"]["kind"] == "tcp"
    assert report["transport"]["reason"]
    assert report["tensors"] == 876
    assert report["bytes"] == report["sent"] == sum(t.nbytes for t in server.tensors.values())
    assert report["hits"] == report["misses"] == 0
    assert (report["verified"], report["verify_seconds"]) == (False, 0.0)
    assert report["gib_per_s"] == pytest.approx(report["bytes"] / report["seconds"] / 2**30, abs=0.002)
    profile = report["profile"]
    assert profile["measured"] is True
    assert (profile["side"], profile["peer"], profile["transport"]) == ("client", server.endpoints[0], "tcp")
    assert (profile["set_tensor_calls"], profile["set_tensor_bytes"]) == (876, report["bytes"])
    assert profile["commands"]["SET_TENSOR"]["count"] == 876
    assert 0 < profile["span_ns"] + profile["alloc_ns"] < report["seconds"] * 1e9
    ((stretch,),) = spans.of("client")
    assert stretch.mark is not None
    inside = sum(profile[f"{name}_ns"] for name in INSIDE)
    assert stretch.mark[0] - stretch.begin[1] <= inside <= stretch.mark[1] - stretch.begin[0]
    assert profile["bottleneck"] in ("source-bound", "wire-bound", "server-bound")


def test_the_object_says_how_long_verifying_took(invoke, server, small_gguf: Path) -> None:
    report = invoke("push", str(small_gguf), server.endpoints[0], "--verify", "--json").json
    assert report["verified"] is True
    assert 0 < report["verify_seconds"] < report["seconds"]
    pushing = report["seconds"] - report["verify_seconds"]
    assert report["gib_per_s"] == pytest.approx(report["bytes"] / pushing / 2**30, abs=0.002)


def test_only_what_is_included(invoke, server, small_gguf: Path) -> None:
    report = invoke("push", str(small_gguf), server.endpoints[0], "--include", r"^blk\.[01]\.ffn_", "--json").json
    assert sorted(server.tensors) == sorted(
        f"blk.{block}.ffn_{part}.weight" for block in (0, 1) for part in ("gate", "up", "down")
    )
    assert report["tensors"] == 6


@pytest.fixture
def large_arrays(tmp_path: Path) -> Path:
    """A safetensors file of one tensor over 10 MiB and one under it."""
    import numpy as np
    from safetensors.numpy import save_file

    path = tmp_path / "two.safetensors"
    large = np.arange(3 << 20, dtype=np.float32)
    save_file({"large": large, "small": large[:100].copy()}, path)
    return path


def test_the_cache_is_asked_when_the_server_has_one(invoke, tmp_path: Path, large_arrays: Path) -> None:
    with weightwire.Server(port=0, cache=tmp_path / "cache") as server:
        words = ("push", str(large_arrays), server.endpoints[0], "--json", "--verify")
        cold, warm, never = invoke(*words).json, invoke(*words).json, invoke(*words, "--cache", "never").json
        text = invoke(*words[:-2]).out
    assert (cold["hits"], cold["misses"], cold["sent"]) == (0, 1, cold["bytes"])
    assert (warm["hits"], warm["misses"], warm["sent"]) == (1, 0, 400)
    assert (never["hits"], never["misses"], never["sent"]) == (0, 0, never["bytes"])
    assert "1 hit, 0 misses" in text


def test_the_environment_sets_what_options_do_not(invoke, tmp_path: Path, large_arrays: Path) -> None:
    with weightwire.Server(port=0) as server:
        words = ("push", str(large_arrays), server.endpoints[0], "--json")
        assert invoke(*words).json["misses"] == 0
        assert invoke(*words, WEIGHTWIRE_CACHE="always").json["misses"] == 1
        assert invoke(*words, "--cache", "never", WEIGHTWIRE_CACHE="always").json["misses"] == 0
        invoke(*words, WEIGHTWIRE_CACHE="sometimes").failed(2, "WEIGHTWIRE_CACHE", "sometimes")
        invoke(*words, WEIGHTWIRE_TIMEOUT="-1").failed(2, "WEIGHTWIRE_TIMEOUT")
        invoke(*words, GGML_RPC_LOAD_THREADS="65").failed(2, "GGML_RPC_LOAD_THREADS", "65")
        invoke(*words, WEIGHTWIRE_IN_FLIGHT="none").failed(2, "WEIGHTWIRE_IN_FLIGHT")
        assert invoke(*words, GGML_RPC_LOAD_THREADS="3", WEIGHTWIRE_CACHE="always").json["threads"] == 3
        assert invoke(*words, "--threads", "0", WEIGHTWIRE_CACHE="always").json["threads"] == 0
        invoke(*words, WEIGHTWIRE_PROTOCOL="9.0").failed(2, "WEIGHTWIRE_PROTOCOL", "9.0", "7.0, 8.0")


def test_what_the_cache_cut_short_is_sent_if_it_is_looked_for(invoke, large_arrays: Path) -> None:
    """As a stock server fills a tensor from such a file: it says that it did."""
    from support.scripted import ScriptedServer, StandIn

    class Careless(StandIn):
        def serve(self, message):
            answer = super().serve(message)
            return b"\1" if message.command == 7 else answer

    for options, corrupt in ((["--cache", "always"], 1), (["--cache", "always", "--no-probe"], 0), (["--probe"], 1)):
        with ScriptedServer(Careless(flags=1)) as server:
            report = invoke("push", str(large_arrays), server.endpoint, "--json", *options).json
            assert report["corrupt_hits"] == corrupt, options
            assert report["hits"] == 1 - corrupt


def test_only_the_layers_asked_for(invoke, server, small_gguf: Path) -> None:
    words = ("push", str(small_gguf), server.endpoints[0], "--json")
    report = invoke(*words, "--layers", "1", "--include", "ffn_").json
    assert sorted(server.tensors) == [f"blk.1.ffn_{part}.weight" for part in ("down", "gate", "up")]
    assert report["tensors"] == 3
    invoke(*words, "--layers", "5000-").failed(2, "5000-", "layers 0-")


# How it fails: the exit code, and that both people and programs learn why.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("push",), "MODEL"),
        (("push", "m"), "HOST:PORT"),
        (("push", "m", "h:1", "--cache", "maybe"), "maybe"),
        (("push", "m", "h:1", "--timeout", "0"), "seconds"),
        (("push", "m", "h:1", "--layers", "9-3"), "3-9"),
        (("push", "m", "h:1", "--layers", "all"), "'other'"),
        (("push", "m", "h:1", "--threads", "65"), "64"),
        (("push", "m", "h:1", "h:1"), "h:1"),
        (("push", "m", "h", "h:50052"), "twice"),
        (("push", "m", "h:1", "h:2", "--include", "a", "--include", "b", "--include", "c"), "3 times, for 2 servers"),
        (("push", "m", "h:1", "--layers", "1", "--layers", "2"), "2 times, for 1 server"),
        (("push", "m", "h:1", "--timeout", "nan"), "seconds"),
        (("push", "m", "h:1", "--include", "("), "regular expression"),
        (("push", "m", "h:1", "--protocol", "seven"), "protocol version"),
        (("push", "m", "h:1", "--protocol", "99.0"), "7.0, 8.0"),
        (("push", "m", "h:1", "--protocol", "7.999"), "7.999"),
        (("push", "m", "h:1", "--protocol", "8.0.300"), "255"),
        (("info", "h:1", "--protocol", "8.9"), "8.9"),
        (("push", "m", "h:1", "--include", "a{99999999999999999999}"), "--include"),
        (("push", "m", "h:1", "--include", "(" * 5000 + ")" * 5000), "--include"),
        (("push", "m", "h:1", "--include", "(?L)a"), "--include"),
        (("push", "m", "h:1", "--bandwidth", "1"), "--bandwidth"),
        (("push", "missing.gguf", "h:1"), "missing.gguf"),
        (("push", ".", "h:1"), "."),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_usage(invoke, words: tuple[str, ...], said: str) -> None:
    invoke(*words).failed(2, said)
    ran = invoke(*words, "--json").failed(2, said)
    assert ran.json["error"]["exit_code"] == 2
    assert said in ran.json["error"]["detail"] + ran.json["error"]["hint"]


def test_a_bad_endpoint_is_usage(invoke, small_gguf: Path) -> None:
    invoke("push", str(small_gguf), "host:port:more").failed(2, "hint:")
    invoke("push", str(small_gguf), "127.0.0.1:99999").failed(2, "99999")


def test_a_regex_that_finds_nothing_is_usage(invoke, server, small_gguf: Path) -> None:
    invoke("push", str(small_gguf), server.endpoints[0], "--include", "nosuch").failed(2, "nosuch")
    assert not server.tensors


def test_what_cannot_be_pushed_is_usage_before_a_server_is_asked(
    invoke, nowhere: str, tmp_path: Path, small_gguf: Path
) -> None:
    from safetensors.numpy import save_file

    save_file({}, tmp_path / "empty.safetensors")
    invoke("push", str(tmp_path / "empty.safetensors"), nowhere).failed(2, "no tensor", "empty.safetensors")
    invoke("push", str(small_gguf), nowhere, "--include", "nosuch").failed(2, "nosuch")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"not a model at all"])
def test_a_malformed_model_is_usage_and_names_the_file(invoke, server, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    ran = invoke("push", str(path), server.endpoints[0], "--json").failed(2, str(path))
    assert ran.json["error"]["type"] == "ModelError"
    assert ran.json["error"]["path"] == str(path)


def test_nobody_listens(invoke, nowhere: str, small_gguf: Path) -> None:
    ran = invoke("push", str(small_gguf), nowhere, "--json").failed(1, nowhere)
    assert ran.json["error"]["detail"].count(nowhere) == 1
    assert ran.json["error"]["exit_code"] == 1


@pytest.fixture
def peer() -> Iterator[Callable[[bytes | None], str]]:
    """A peer that reads HELLO and answers with given bytes, or never."""
    listener = socket.create_server(("127.0.0.1", 0))
    answers: list[bytes | None] = []
    clients: list[socket.socket] = []

    def serve() -> None:
        try:
            while True:
                client, _ = listener.accept()
                clients.append(client)
                if answers[0] is not None:
                    client.recv(64)
                    client.sendall(answers[0])
        except OSError:
            return

    thread = threading.Thread(target=serve)

    def start(answer: bytes | None) -> str:
        answers.append(answer)
        thread.start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)
    for client in clients:
        client.close()


def test_a_server_of_an_unknown_version(invoke, peer, small_gguf: Path) -> None:
    endpoint = peer((28).to_bytes(8, "little") + bytes([99, 1, 0, 0]) + bytes(24))
    ran = invoke("push", str(small_gguf), endpoint, "--json").failed(1, "99.1")
    assert ran.json["error"]["type"] == "VersionError"
    assert ran.json["error"]["theirs"].startswith("99.1")
    assert ran.json["error"]["ours"] == "1.0 to 8.0"


def test_a_server_that_is_busy(invoke, peer, small_gguf: Path) -> None:
    ran = invoke("push", str(small_gguf), peer(None), "--timeout", "0.3", "--json").failed(1)
    assert ran.json["error"]["type"] == "ServerBusy"
    assert ran.json["error"]["elapsed"] > 0


def test_a_server_without_the_memory(invoke, small_gguf: Path) -> None:
    with weightwire.Server(port=0, memory=1 << 20) as server:
        ran = invoke("push", str(small_gguf), server.endpoints[0], "--json").failed(1)
    assert ran.json["error"]["type"] == "AllocationError"
    assert ran.json["error"]["nbytes"] > 1 << 20


def test_wrong_content_is_exit_code_4(invoke, liar: str, small_gguf: Path) -> None:
    ran = invoke("push", str(small_gguf), liar, "--verify", "--json").failed(4)
    assert invoke("push", str(small_gguf), liar).code == 0, "unverified, nobody notices"
    error = ran.json["error"]
    assert error["type"] == IntegrityError.__name__
    assert error["name"] == "token_embd.weight"
    assert error["expected"] != error["actual"]


def test_a_model_that_changes_meanwhile_is_a_failed_transfer(invoke, tmp_path: Path, small_gguf: Path) -> None:
    path = tmp_path / "changing.gguf"
    shutil.copy(small_gguf, path)

    class Cutter(weightwire.Destination):
        def write(self, offset: int, view: memoryview) -> None:
            os.truncate(path, 4096)

        def read(self, offset: int, view: memoryview) -> None:
            raise AssertionError("nothing is verified")

    with weightwire.Server(port=0, destination=lambda nbytes, device: Cutter(nbytes)) as server:
        ran = invoke("push", str(path), server.endpoints[0], "--json").failed(1, str(path))
    assert ran.json["error"]["type"] == "ModelError"


def test_a_server_that_goes_away(spawn, finish, gated, small_gguf: Path) -> None:
    proxy = _Proxy(gated.endpoint)
    process = spawn("push", str(small_gguf), proxy.endpoint, "--json", "-q")
    assert gated.reached.wait(60)
    proxy.close()
    ran = finish(process).failed(1)
    assert ran.json["error"]["type"] in ("PeerClosed", "TransportError"), ran.err


class _Proxy:
    """A relay that can be cut."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._target)
        self._ends = [client, server]
        self._threads += [
            threading.Thread(target=self._relay, args=pair) for pair in ((client, server), (server, client))
        ]
        for thread in self._threads[1:]:
            thread.start()

    @staticmethod
    def _relay(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        for end in self._ends:
            end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in (*self._ends, self._listener):
            end.close()


# Interruptions, pipes and progress, in a process of its own.


def test_ctrl_c_ends_it_with_130_and_no_traceback(spawn, finish, gated, small_gguf: Path) -> None:
    process = spawn("push", str(small_gguf), gated.endpoint, "-q")
    assert gated.reached.wait(60)
    process.send_signal(signal.SIGINT)
    ran = finish(process)
    assert ran.code == 130
    assert ran.err == "weightwire: interrupted\n"
    assert ran.out == ""


def test_without_a_terminal_progress_is_a_line_every_two_seconds(spawn, finish, gated, small_gguf: Path) -> None:
    process = spawn("push", str(small_gguf), gated.endpoint)
    line = process.stderr.readline()
    assert re.fullmatch(r"pushing: +\d+ %, .* of 16\.0 MiB, \d+\.\d\d GiB/s.*\n", line)
    gated.opened.set()
    ran = finish(process)
    assert ran.code == 0
    assert "\x1b" not in ran.err
    assert ran.out.startswith("pushed 876 tensors")


def test_on_a_terminal_progress_is_a_bar_and_stdout_stays_clean(spawn, finish, gated, small_gguf: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        process = spawn("push", str(small_gguf), gated.endpoint, stderr=theirs, environ={"TERM": "xterm"})
        shown = b""
        while b"pushing" not in shown:
            shown += os.read(ours, 4096)
        gated.opened.set()
        ran = finish(process)
    finally:
        os.close(ours)
        os.close(theirs)
    assert ran.code == 0
    assert b"\x1b[" in shown
    assert "\x1b" not in ran.out


def test_quiet_is_quiet(spawn, finish, server, small_gguf: Path) -> None:
    ran = finish(spawn("push", str(small_gguf), server.endpoints[0], "-q"))
    assert (ran.code, ran.err) == (0, "")


def test_a_full_disk_behind_stdout_is_the_environments_fault(spawn, finish, server, small_gguf: Path) -> None:
    with open("/dev/full", "w") as full:
        ran = finish(spawn("push", str(small_gguf), server.endpoints[0], stdout=full))
    ran.failed(3, "standard output")


def test_a_closed_pipe_is_quiet(spawn, finish, server, small_gguf: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        ran = finish(spawn("push", str(small_gguf), server.endpoints[0], stdout=pipe))
    assert (ran.code, ran.err) == (141, "")
    assert len(server.tensors) == 876


def test_the_package_can_be_run_from_a_folder_with_a_weightwire_in_it(command, tmp_path: Path) -> None:
    (tmp_path / "weightwire").mkdir()
    script = Path(command()[0]).with_name("weightwire")
    words = [str(script)] if script.exists() else command()
    ran = subprocess.run([*words, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == f"weightwire {weightwire.__version__}\n"


def test_profile_on_stderr(invoke, server, small_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("push", str(small_gguf), server.endpoints[0], "-q")
    monkeypatch.delenv("GGML_RPC_LOADPROF", raising=False)
    assert invoke(*words).err == ""
    ran = invoke(*words, "--profile", "--json")
    assert ran.json["profile"]["bottleneck"] is not None, "stdout has the object and nothing else"
    assert ran.err.count("client, connection with") == 1
    assert "876 SET_TENSOR" in ran.err
    assert "-bound: the time went on" in ran.err.splitlines()[-1]
    monkeypatch.setenv("GGML_RPC_LOADPROF", "1")
    assert "876 SET_TENSOR" in invoke(*words).err
    monkeypatch.setenv("GGML_RPC_LOADPROF", "0")
    ran = invoke(*words, "--json")
    assert (ran.err, ran.json["profile"]["measured"], ran.json["profile"]["bottleneck"]) == ("", False, None)
    assert "876 SET_TENSOR" in invoke(*words, "--profile").err
    monkeypatch.setenv("GGML_RPC_LOADPROF", "perhaps")
    invoke(*words).failed(2, "GGML_RPC_LOADPROF")


def test_a_profile_of_each_server(invoke, server, small_gguf: Path) -> None:
    with weightwire.Server(port=0) as other:
        ran = invoke("push", str(small_gguf), server.endpoints[0], other.endpoints[0], "-q", "--profile")
    assert ran.code == 0
    assert ran.err.count("876 SET_TENSOR") == 2
    assert other.endpoints[0] in ran.err
