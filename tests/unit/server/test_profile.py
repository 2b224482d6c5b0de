"""What a server's profiles say: one for each connection, which adds up, handed over when it ends."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.leaks import LeakCheck, eventually
from support.profiles import assert_adds_up
from support.raw_client import RawClient

from weightwire import LoadProfile, connect
from weightwire.cache import reading, store
from weightwire.errors import ConfigError, ModelError
from weightwire.profile import Stage
from weightwire.ranges import FileRange
from weightwire.server import HostMemory, Server, filling, plain
from weightwire.transport.profiling import LoadRecorder
from weightwire.wire.commands import Command

MIB = 1 << 20
ARRAYS: dict[str, object] = {
    "large": np.random.default_rng(1).integers(0, 256, 11 * MIB, np.uint8),
    **{f"small.{i}": np.full(100, i, np.float32) for i in range(20)},
}
SMALL = 20 * 400
Start = Callable[..., tuple[Server, list[LoadProfile]]]


class Hook(HostMemory):
    """Written to by calls."""


@pytest.fixture
def start(no_leaks: LeakCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a server, and collect what it hands over."""
    monkeypatch.setenv("WEIGHTWIRE_INDEX", str(tmp_path / "index.sqlite3"))
    monkeypatch.delenv("GGML_RPC_LOADPROF", raising=False)
    running: list[Server] = []

    def one(**options: Any) -> tuple[Server, list[LoadProfile]]:
        found: list[LoadProfile] = []
        server = Server(port=0, on_profile=found.append, **options)
        running.append(server)
        return server.start(), found

    yield one
    for server in running:
        server.close()


def load(server: Server, found: list[LoadProfile], **options: Any) -> LoadProfile:
    """Push over a connection of its own; what the server says of it."""
    before = len(found)
    with connect(server.endpoints[0], timeout=60) as connection:
        connection.push(ARRAYS, **options)
    assert eventually(lambda: len(found) > before)
    return found[-1]


@pytest.mark.parametrize("hook", [False, True], ids=["memory", "hook"])
@pytest.mark.parametrize("verify", ["content", "size"])
def test_cold_warm_and_without_a_cache(start: Start, tmp_path: Path, hook: bool, verify: str) -> None:
    server, found = start(cache=tmp_path / "cache", cache_verify=verify, destination=Hook if hook else None)
    cold = load(server, found)
    assert_adds_up(cold)
    assert (cold.side, cold.transport, cold.device, cold.send_depth) == ("server", "tcp", None, 0)
    assert (cold.set_tensor_calls, cold.set_tensor_bytes) == (21, 11 * MIB + SMALL)
    assert (cold.hits, cold.misses, cold.corrupt_hits, cold.bytes_saved) == (0, 1, 0, 0)
    assert cold.wire_ns > 0
    assert cold.staging_ns > 0
    assert cold.alloc_ns > 0
    assert cold.verify_ns == 0
    assert (cold.copies > 0, cold.copied_bytes) == ((True, 11 * MIB + SMALL) if hook else (False, 0))
    assert cold.commands["ALLOC_BUFFER"].count == 1
    assert cold.commands["SET_TENSOR_HASH"].count == 1
    warm = load(server, found, verify=True)
    assert_adds_up(warm)
    assert (warm.set_tensor_calls, warm.set_tensor_bytes) == (20, SMALL)
    assert (warm.hits, warm.misses, warm.bytes_saved) == (1, 0, 11 * MIB)
    assert warm.read_ns > 0
    assert warm.verify_ns > 0
    assert warm.commands["GET_TENSOR"].count >= 21
    without = load(server, found, cache="never")
    assert_adds_up(without)
    assert (without.hits, without.misses) == (0, 0)
    assert (without.read_ns, without.hash_ns, without.ask_ns) == (0, 0, 0)
    assert len(found) == 3, "one for each connection"
    assert len({profile.peer for profile in found}) == 3


def test_an_entry_that_is_wrong_is_counted(start: Start, tmp_path: Path) -> None:
    server, found = start(cache=tmp_path / "cache")
    load(server, found)
    load(server, found)
    (entry,) = [path for path in (tmp_path / "cache").iterdir() if path.is_file()]
    data = bytearray(entry.read_bytes())
    data[5] ^= 1
    entry.write_bytes(data)
    profile = load(server, found)
    assert (profile.hits, profile.misses, profile.corrupt_hits) == (0, 1, 1)
    assert_adds_up(profile)


@pytest.mark.parametrize("hook", [False, True], ids=["memory", "hook"])
def test_the_plain_way(start: Start, tmp_path: Path, hook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stages add up too, and each of its costs is where the other way's is: hashing, reading, copying."""
    slow = 0.3
    at: dict[int, int] = {}
    seen: set[tuple[str, Stage]] = set()
    switch = LoadRecorder.switch

    def switched(recorder: LoadRecorder, stage: int) -> int:
        at[threading.get_ident()] = stage
        return switch(recorder, stage)

    def slowed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*arguments: Any, **options: Any) -> Any:
            seen.add((name, Stage(at[threading.get_ident()])))
            time.sleep(slow)
            return real(*arguments, **options)

        return slowly

    monkeypatch.setattr(LoadRecorder, "switch", switched)
    for name in ("hash_payloads", "read_exactly", "_copy", "_hand_over", "cleared_memory"):
        monkeypatch.setattr(plain, name, slowed(name, getattr(plain, name)))
    least = int(slow * 1e9)
    options = {"include": "large"}
    server, found = start(cache=tmp_path / "cache", destination=Hook if hook else None, optimized=False)
    cold = load(server, found, **options)
    assert_adds_up(cold)
    assert (cold.hits, cold.misses) == (0, 1)
    assert cold.hash_ns >= least
    assert cold.staging_ns >= 2 * least, "a message that is cleared, and copied to its place"
    assert cold.read_ns == 0
    # Whatever looking up takes, none of this is part of it.
    copying = {("cleared_memory", Stage.STAGING), ("_hand_over" if hook else "_copy", Stage.STAGING)}
    assert seen == copying | {("hash_payloads", Stage.HASH)}
    seen.clear()
    warm = load(server, found, **options)
    assert_adds_up(warm)
    assert (warm.hits, warm.misses) == (1, 0)
    assert warm.hash_ns >= least
    assert warm.read_ns >= 2 * least, "two pieces"
    assert warm.staging_ns >= 2 * least, "memory for the whole entry, and its copy"
    assert seen == copying | {("hash_payloads", Stage.HASH), ("read_exactly", Stage.READ)}


@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize("hook", [False, True], ids=["memory", "hook"])
def test_an_entry_that_cannot_be_read_is_missed_and_not_wrong(
    start: Start, tmp_path: Path, hook: bool, optimized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, found = start(cache=tmp_path / "cache", destination=Hook if hook else None, optimized=optimized)
    load(server, found)
    load(server, found)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def no_hash(payloads: Sequence[FileRange], **_: Any) -> list[int]:
        raise ModelError(f"{payloads[0].path}: {os.strerror(errno.EIO)}")

    monkeypatch.setattr(plain, "read_exactly", fail)
    monkeypatch.setattr(reading, "read_fnv1a64", fail)
    monkeypatch.setattr(store, "hash_payloads", no_hash)
    profile = load(server, found)
    assert (profile.hits, profile.misses, profile.corrupt_hits) == (0, 1, 0)
    assert_adds_up(profile)


def test_a_stage_that_fails_is_left(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done about an entry that cannot be read is no reading."""
    server, found = start(cache=tmp_path / "cache", optimized=False)
    load(server, found)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(plain, "read_exactly", fail)
    monkeypatch.setattr(store.TensorCache, "failed", lambda *_: time.sleep(0.3))
    profile = load(server, found)
    assert profile.misses == 1
    assert profile.ask_ns >= int(0.3e9)


def test_each_client_starts_empty_and_without_the_time_between(start: Start) -> None:
    server, found = start()
    first = load(server, found)
    time.sleep(0.3)
    second = load(server, found, include="small")
    assert (first.set_tensor_calls, second.set_tensor_calls) == (21, 20)
    started = time.monotonic_ns()
    third = load(server, found, include="small.1$")
    assert third.set_tensor_calls == 1
    assert third.span_ns < time.monotonic_ns() - started


def test_clients_at_the_same_time_have_their_own(start: Start) -> None:
    server, found = start()
    together = threading.Barrier(3)

    def work(count: int) -> None:
        with connect(server.endpoints[0], timeout=60) as connection:
            together.wait(60)
            connection.push({f"{count}.{i}": np.zeros(MIB, np.uint8) for i in range(count)})
            together.wait(60)

    threads = [threading.Thread(target=work, args=(count,)) for count in (2, 5, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually(lambda: len(found) == 3)
    assert sorted(profile.set_tensor_calls for profile in found) == [2, 5, 9]
    assert sorted(profile.set_tensor_bytes for profile in found) == [2 * MIB, 5 * MIB, 9 * MIB]
    for profile in found:
        assert_adds_up(profile)


def test_a_client_that_breaks_off_is_told_of_too(start: Start) -> None:
    server, found = start()
    with RawClient(server.port) as client:
        client.set(client.place("t", 10, client.allocate(10)), bytes(10))
        client.barrier()
        large = client.place("u", MIB, client.allocate(MIB))
        head = client.dialect.encode_set_tensor(large, 0, 0)
        client.send(Command.SET_TENSOR, head + b"short", size=len(head) + MIB)
    assert eventually(lambda: len(found) == 1)
    assert_adds_up(found[0])
    assert (found[0].set_tensor_calls, found[0].set_tensor_bytes) == (1, 10)


def test_who_never_said_hello_has_none(start: Start) -> None:
    server, found = start()
    RawClient(server.port, hello=False).close()
    with RawClient(server.port) as client:
        client.barrier()
    assert eventually(lambda: len(found) == 1)
    assert not found[0].loaded
    assert found[0].bottleneck is None


class Trouble(BaseException):
    """No Exception, like SystemExit."""


@pytest.mark.parametrize("error", [RuntimeError("no\nthanks"), SystemExit(3), Trouble("stop")])
def test_a_callback_that_fails_costs_a_line(
    no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    called: list[LoadProfile] = []

    def fail(profile: LoadProfile) -> None:
        called.append(profile)
        raise error

    with Server(port=0, on_profile=fail) as server:
        for count in (1, 2):
            with RawClient(server.port) as client:
                client.barrier()
            assert eventually(lambda: len(caplog.records) == len(called) == count)  # noqa: B023
    assert len(called) == 2
    for record in caplog.records:
        assert record.levelno == logging.ERROR
        assert "on_profile failed" in record.getMessage()
        assert "\n" not in record.getMessage()


def test_off_nothing_is_counted(no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LoadProfile] = []
    monkeypatch.setattr("weightwire.server.session.print_profile", made.append)
    with Server(port=0) as server, connect(server.endpoints[0]) as connection:
        connection.push(ARRAYS)
        (session,) = server._sessions
        profile = session._recorder.profile()
        assert not profile.measured
        assert (profile.span_ns, profile.set_tensor_calls, profile.commands) == (0, 0, {})
    assert made == []


@pytest.mark.parametrize(
    ("argument", "text", "printed"), [(True, None, True), (None, "1", True), (None, None, False), (False, "1", False)]
)
def test_printing(
    no_leaks: LeakCheck,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argument: bool | None,
    text: str | None,
    printed: bool,
) -> None:
    monkeypatch.delenv("GGML_RPC_LOADPROF", raising=False)
    with monkeypatch.context() as patch:
        if text is not None:
            patch.setenv("GGML_RPC_LOADPROF", text)
        server = Server(port=0, profile=argument)
    with server:
        with connect(server.endpoints[0]) as connection:
            connection.devices()
        with connect(server.endpoints[0]) as connection:
            connection.push({"a": np.zeros(5, "f4")})
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("server, connection with") == printed, "not of one that loaded nothing"
    if printed:
        assert "-bound: " in err.splitlines()[-1]


def test_what_cannot_be_called() -> None:
    with pytest.raises(ConfigError, match="on_profile"):
        Server(on_profile=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="profile="):
        Server(profile=3)  # type: ignore[arg-type]


# Who is slow, is named. Each is made slow enough that nothing else comes near it.

SLOW = 1.5


def test_client_bound(start: Start) -> None:
    server, found = start()
    slept: list[None] = []

    def slowly(*_: object) -> None:
        if not slept:
            slept.append(None)
            time.sleep(SLOW)

    assert load(server, found, progress=slowly).bottleneck == "client-bound"


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    # Into memory of the server's own an entry is hashed as it is read, which counts as reading.
    [(reading, "read_fnv1a64", "source-bound"), (filling, "fnv1a64", "hash-bound")],
)
def test_the_cache_is_slow(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, expected: str
) -> None:
    options = {} if module is reading else {"destination": Hook}
    server, found = start(cache=tmp_path / "cache", **options)
    load(server, found)
    real = getattr(module, name)

    def slowly(*arguments: Any) -> Any:
        time.sleep(SLOW / 2)
        return real(*arguments)

    monkeypatch.setattr(module, name, slowly)
    profile = load(server, found)
    assert profile.hits == 1
    assert profile.bottleneck == expected, "\n".join(profile.lines())


def test_server_bound(start: Start) -> None:
    server, found = start(on_tensor=lambda tensor: time.sleep(SLOW / 5) if "small" in tensor.name else None)
    assert load(server, found).bottleneck == "server-bound"
