"""What a connection's profile says of pushes: stages add up, each connection has its own, the bottleneck is named."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.fakeverbs import FakeVerbs
from support.leaks import LeakCheck, eventually
from support.profiles import assert_adds_up

from weightwire import Connection, LoadProfile, Server, connect, push_all, warm
from weightwire.client import hashpool, sources
from weightwire.errors import ConfigError, IntegrityError, WeightwireError
from weightwire.server import HostMemory

MIB = 1 << 20
CACHED = 11 * MIB
ARRAYS: dict[str, object] = {
    **{f"large.{i}": np.random.default_rng(i).integers(0, 256, CACHED, np.uint8) for i in range(3)},
    **{f"small.{i}": np.full(100 + i, i, np.float32) for i in range(40)},
}
LARGE = 3 * CACHED
TOTAL = LARGE + sum(4 * (100 + i) for i in range(40))


@pytest.fixture(autouse=True)
def own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index for each test, and no variable of the environment's."""
    monkeypatch.setenv("WEIGHTWIRE_INDEX", str(tmp_path / "index.sqlite3"))
    monkeypatch.delenv("GGML_RPC_LOADPROF", raising=False)


@pytest.fixture
def server(no_leaks: LeakCheck, tmp_path: Path) -> Iterator[Server]:
    with Server(port=0, cache=tmp_path / "cache") as server:
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(ARRAYS, path)  # type: ignore[arg-type]
    return path


def pushed(connection: Connection, model: Any = ARRAYS, **options: Any) -> LoadProfile:
    profile = connection.push(model, **options).summary.profile
    assert_adds_up(profile)
    assert (profile.side, profile.peer) == ("client", connection.endpoint)
    return profile


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("kind", ["arrays", "file", "blocks"])
def test_cold_warm_and_without_a_cache(server: Server, file: Path, kind: str, threads: int) -> None:
    model = ARRAYS if kind == "arrays" else file
    options = {"threads": threads, "read": "read" if kind == "blocks" else "auto", "index": False}
    with connect(server.endpoints[0], timeout=60) as connection:
        cold = pushed(connection, model, **options)
        assert (cold.set_tensor_calls, cold.set_tensor_bytes) == (43, TOTAL)
        assert (cold.hits, cold.misses, cold.bytes_saved) == (0, 3, 0)
        assert cold.hash_ns > 0
        assert (cold.hash_thread_ns > 0) == (threads > 0)
        assert cold.ask_ns > 0
        assert cold.commands["SET_TENSOR_HASH"].count == 3
        again = pushed(connection, model, **options)
        assert (again.set_tensor_calls, again.set_tensor_bytes) == (40, TOTAL - LARGE)
        assert (again.hits, again.misses, again.bytes_saved) == (3, 0, LARGE)
        plain = pushed(connection, model, cache="never", **options)
        assert (plain.set_tensor_calls, plain.set_tensor_bytes) == (43, TOTAL)
        assert (plain.hash_ns, plain.ask_ns, plain.hash_thread_ns) == (0, 0, 0)
        assert plain.read_ns > 0
        assert plain.wire_ns > 0
        assert plain.wait_ns > plain.blocked_ns, "the barrier is waited for"
        assert plain.verify_ns == 0
        assert "SET_TENSOR_HASH" not in plain.commands
        verified = pushed(connection, model, cache="never", verify=True, **options)
        assert verified.verify_ns > 0
        assert verified.alloc_ns > 0
        # The connection's own has all of them, and not the time between.
        whole = connection.profile
        assert_adds_up(whole)
        for name in (
            "span_ns",
            "set_tensor_calls",
            "set_tensor_bytes",
            "hits",
            "misses",
            "verify_ns",
            "hash_thread_ns",
        ):
            assert getattr(whole, name) == sum(getattr(each, name) for each in (cold, again, plain, verified)), name
    assert connection.profile.span_ns == whole.span_ns, "also when it is closed"


@pytest.mark.parametrize("call", ["push", "warm"])
def test_threads_that_are_done_before_the_first_request_are_counted(
    server: Server, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """However fast they are: the only sender of hashes is told all that was spent on them."""
    real = hashpool.HashPool.start

    def start_and_finish(pool: hashpool.HashPool) -> None:
        real(pool)
        assert eventually(lambda: pool.spent_ns > 0 and None not in map(pool.hash_of, range(3)))

    monkeypatch.setattr(hashpool.HashPool, "start", start_and_finish)
    options: dict[str, Any] = {"threads": 2, "index": False}
    if call == "push":
        with connect(server.endpoints[0], timeout=60) as connection:
            profile = pushed(connection, **options)
    else:
        (warmed,) = warm(ARRAYS, server.endpoints[0], **options)
        assert warmed.summary is not None
        profile = warmed.summary.profile
    assert profile.misses == 3
    assert profile.hash_thread_ns > 0


def test_a_new_connection_has_nothing_of_the_last_one(server: Server) -> None:
    with connect(server.endpoints[0]) as first:
        pushed(first)
        before = first.profile
    time.sleep(0.2)
    with connect(server.endpoints[0]) as second:
        empty = second.profile
        assert not empty.loaded
        assert empty.span_ns == empty.set_tensor_calls == 0
        assert empty == LoadProfile(peer=second.endpoint, busy_ns=empty.busy_ns)
        profile = pushed(second, {"a": np.zeros(5, "f4")})
        assert (profile.set_tensor_calls, profile.set_tensor_bytes) == (1, 20)
    assert first.profile.span_ns == before.span_ns


def test_two_at_the_same_time(server: Server) -> None:
    found: list[LoadProfile] = []

    def work(count: int) -> None:
        with connect(server.endpoints[0], timeout=60) as connection:
            pushed(connection, {f"{count}.{i}": np.zeros(MIB, np.uint8) for i in range(count)})
            found.append(connection.profile)

    threads = [threading.Thread(target=work, args=(count,)) for count in (3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(profile.set_tensor_calls for profile in found) == [3, 7]
    for profile in found:
        assert_adds_up(profile)


def test_time_outside_of_pushes_is_in_no_span(server: Server) -> None:
    with connect(server.endpoints[0]) as connection:
        tensor = connection.push({"a": np.zeros(5, "f4")})["a"]
        before = connection.profile
        started = time.monotonic_ns()
        time.sleep(0.3)
        tensor.read()
        connection.devices()
        assert connection.profile.span_ns == before.span_ns
        tensor.write(np.ones(5, "f4"))
        connection.barrier()
        after = connection.profile
        assert_adds_up(after)
        assert (after.set_tensor_calls, after.set_tensor_bytes) == (2, 40)
        assert 0 < after.span_ns - before.span_ns < time.monotonic_ns() - started - 300_000_000


def test_during_a_push_it_can_be_looked_at(server: Server) -> None:
    seen: list[LoadProfile] = []
    with connect(server.endpoints[0]) as connection:
        pushed(connection, progress=lambda *_: seen.append(connection.profile), cache="never")
    assert [profile.set_tensor_calls for profile in seen] == sorted(profile.set_tensor_calls for profile in seen)
    assert seen[0].span_ns < seen[-1].span_ns
    assert seen[-1].set_tensor_calls == 43


def test_a_push_that_failed_leaves_the_clock_in_order(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(server.endpoints[0]) as connection:
        with monkeypatch.context() as patch:
            patch.setattr("weightwire.client.verify.first_difference", lambda *_: 3)
            with pytest.raises(IntegrityError):
                connection.push({"a": np.zeros(5, "f4")}, verify=True)
        verified = connection.profile.verify_ns
        time.sleep(0.1)
        assert connection.profile.verify_ns == verified, "it does not go on"
        pushed(connection)


def test_off_measures_no_time_and_counts_the_cache(server: Server) -> None:
    with connect(server.endpoints[0], profile=False) as connection:
        summary = connection.push(ARRAYS, verify=True).summary
        profile = summary.profile
        assert not profile.measured
        assert profile == connection.profile
        assert profile == LoadProfile(peer=connection.endpoint, measured=False, misses=3, set_tensor_bytes=TOTAL)
        assert (summary.hits, summary.misses, summary.sent) == (0, 3, TOTAL)
        assert summary.seconds > summary.verify_seconds > 0
        assert profile.lines()[1].endswith("; times and requests were not measured")


def test_several_servers(server: Server) -> None:
    with Server(port=0) as other, push_all(ARRAYS, [server.endpoints[0], other.endpoints[0]]) as all_:
        for each in all_:
            assert each.result is not None
            assert each.connection is not None
            assert_adds_up(each.result.summary.profile)
            assert each.connection.profile.set_tensor_calls == 43


def test_warming(server: Server) -> None:
    (warmed,) = warm(ARRAYS, server.endpoints[0])
    assert warmed.summary is not None
    profile = warmed.summary.profile
    assert_adds_up(profile)
    assert profile.misses == 3
    assert profile.set_tensor_bytes > LARGE, "the ends are made wrong before each question"
    assert profile.set_tensor_calls == profile.commands["SET_TENSOR"].count > 3


def test_answered_requests_wait_for_their_answers(no_leaks: LeakCheck) -> None:
    with Server(port=0, protocol="1.0.0") as server, connect(server.endpoints[0]) as connection:
        profile = pushed(connection, {f"{i}": np.zeros(40, "f4") for i in range(100)})
        assert profile.set_tensor_calls == 100
        assert profile.wait_ns > 0


def test_rdma(fake: FakeVerbs, no_leaks: LeakCheck, file: Path) -> None:
    found: list[LoadProfile] = []
    with Server(port=0, on_profile=found.append) as server:
        with connect(server.endpoints[0], timeout=20, transport="rdma") as connection:
            profile = pushed(connection, file, verify=True)
            assert (profile.transport, profile.device) == ("rdma", "fake0")
            assert 1 <= profile.send_depth <= 8
            assert profile.read_ns > profile.staging_ns > 0, "files are read into the ring, what else is copied"
            assert (profile.busy_ns, profile.peer_limited_ns) == (0, 0)
            assert profile.copies > LARGE // (256 << 10)
            arrays = pushed(connection, ARRAYS)
            assert arrays.staging_ns > 0
            assert arrays.copied_bytes > TOTAL
            before = connection.profile
        assert connection.profile.copied_bytes >= before.copied_bytes > 2 * TOTAL
    (theirs,) = found
    assert_adds_up(theirs)
    assert (theirs.side, theirs.transport, theirs.device) == ("server", "rdma", "fake0")
    assert theirs.set_tensor_bytes == 2 * TOTAL
    assert theirs.copied_bytes > 2 * TOTAL, "out of its ring"


# Who is slow, is named. Each is made slow enough that nothing else comes near it.

SLOW = 1.5


def test_source_bound(server: Server, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = sources.read_range
    slept: list[None] = []

    def slowly(*arguments: Any) -> memoryview:
        if len(slept) < 3:
            slept.append(None)
            time.sleep(SLOW / 3)
        return read(*arguments)

    monkeypatch.setattr(sources, "read_range", slowly)
    with connect(server.endpoints[0]) as connection:
        profile = pushed(connection, file, cache="never", read="read", include="large")
    assert len(slept) == 3
    assert profile.bottleneck == "source-bound"
    assert profile.read_ns > profile.span_ns // 2


def test_source_bound_by_the_caller(server: Server) -> None:
    with connect(server.endpoints[0]) as connection:
        profile = pushed(connection, {"a": np.zeros(5, "f4")}, progress=lambda *_: time.sleep(SLOW))
    assert profile.bottleneck == "source-bound"
    assert profile.gap_ns > profile.span_ns // 2


@pytest.mark.parametrize("threads", [0, 1])
def test_hash_bound(server: Server, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    hash_payloads = hashpool.hash_payloads

    def slowly(*arguments: Any, **options: Any) -> list[int]:
        time.sleep(SLOW)
        return hash_payloads(*arguments, **options)

    monkeypatch.setattr(hashpool, "hash_payloads", slowly)
    with connect(server.endpoints[0]) as connection:
        profile = pushed(connection, threads=threads)
    assert profile.bottleneck == "hash-bound"


def test_wire_bound(server: Server) -> None:
    with connect(server.endpoints[0]) as connection:
        with socket.socket(fileno=os.dup(connection._stream.fileno())) as twin:
            # The kernel sends no faster than this, as over a slow line: 47 is SO_MAX_PACING_RATE, bytes per second.
            twin.setsockopt(socket.SOL_SOCKET, 47, 8 * MIB)
        profile = pushed(connection, {"a": np.zeros(16 * MIB, np.uint8)}, cache="never")
        text = "\n".join(profile.lines())
    assert profile.bottleneck == "wire-bound", text
    assert profile.blocked_ns > profile.span_ns // 2


@pytest.mark.parametrize(("mib", "seconds"), [(1, SLOW), (32, SLOW / 8)], ids=["in the buffers", "beyond them"])
def test_server_bound(no_leaks: LeakCheck, mib: int, seconds: float) -> None:
    class Slow(HostMemory):
        """A destination that takes its time, as a device may."""

        def write(self, offset: int, view: memoryview) -> None:
            time.sleep(seconds)
            super().write(offset, view)

    found: list[LoadProfile] = []
    with (
        Server(port=0, destination=Slow, on_profile=found.append) as server,
        connect(server.endpoints[0], timeout=60) as connection,
    ):
        profile = pushed(connection, {"a": np.zeros(mib * MIB, np.uint8)}, cache="never")
    assert profile.bottleneck == "server-bound", "\n".join(profile.lines())
    (theirs,) = found
    assert theirs.bottleneck == "server-bound"
    assert_adds_up(theirs)
    assert theirs.copied_bytes == mib * MIB


# Printing.


def test_printed_once_when_it_is_closed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with connect(server.endpoints[0], profile=True) as connection:
        pushed(connection)
        pushed(connection, {"a": np.zeros(5, "f4")})
        assert capsys.readouterr() == ("", "")
        expected = connection.profile
    connection.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("client, connection with") == 1
    assert f"{expected.set_tensor_calls} SET_TENSOR" in err
    assert err.splitlines()[-1].split(":")[0] == expected.bottleneck


@pytest.mark.parametrize(("text", "argument", "printed"), [("1", None, True), ("1", False, False), ("0", True, True)])
def test_the_argument_wins_over_the_variable(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    argument: bool | None,
    printed: bool,
) -> None:
    monkeypatch.setenv("GGML_RPC_LOADPROF", text)
    with connect(server.endpoints[0], profile=argument) as connection:
        connection.push({"a": np.zeros(5, "f4")})
    assert ("client, connection" in capsys.readouterr().err) is printed


def test_nothing_is_said_of_a_connection_that_loaded_nothing(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with connect(server.endpoints[0], profile=True) as connection:
        connection.devices()
    assert capsys.readouterr().err == ""


def test_a_stderr_that_is_gone_is_no_failure(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connect(server.endpoints[0], profile=True)
    connection.push({"a": np.zeros(5, "f4")})
    monkeypatch.setattr("sys.stderr", None)
    connection.close()


@pytest.mark.parametrize("value", [1, "yes"])
def test_what_is_no_choice(server: Server, value: Any) -> None:
    with pytest.raises(ConfigError, match="profile="):
        connect(server.endpoints[0], profile=value)
    with pytest.raises(ConfigError, match="profile="):
        push_all(ARRAYS, server.endpoints[0], profile=value)
    with pytest.raises(WeightwireError, match="profile="):
        warm(ARRAYS, server.endpoints[0], profile=value)
