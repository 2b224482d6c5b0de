"""Pushing to weightwire's own server, and what a push refuses before it sends anything."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.leaks import LeakCheck, eventually
from support.profiles import assert_adds_up
from support.rewriting import rewrite
from support.scripted import Message, Peer, ScriptedServer, StandIn, serve_hello

from weightwire import Connection, Server, connect, fnv1a64, open_model
from weightwire.client import sender as pipeline
from weightwire.client import verify as verifying
from weightwire.errors import (
    AllocationError,
    ConfigError,
    IntegrityError,
    ModelError,
    TransportError,
    WeightwireError,
)
from weightwire.model.synthetic import write_synthetic_gguf

MIB = 1 << 20
SOME = {"a": np.arange(30, dtype="f4").reshape(5, 6), "b": np.arange(7, dtype="i4")}


@pytest.fixture
def server(no_leaks: LeakCheck) -> Iterator[Server]:
    with Server(port=0) as server:
        yield server


@pytest.fixture
def connection(server: Server) -> Iterator[Connection]:
    with connect(server.endpoints[0], timeout=20) as connection:
        yield connection


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_synthetic_gguf(str(path), 24 * MIB)
    return path


@pytest.mark.parametrize("protocol", ["1.0", "2.0", "3.0", "3.5", "3.6", "4.0", "5.0", "5.1", "6.0", "7.0", "8.0"])
def test_every_byte_arrives(protocol: str, model: Path, tmp_path: Path, no_leaks: LeakCheck) -> None:
    with (
        Server(port=0, protocol=protocol, cache=tmp_path / "cache") as server,
        open_model(model) as opened,
        connect(server.endpoints[0], timeout=20) as connection,
    ):
        result = connection.push(opened, verify=True)
        assert list(result) == list(opened.tensors)
        assert result.summary.bytes == result.summary.sent == opened.nbytes
        assert result.summary.tensors == 876
        for name in list(opened.tensors)[::97]:
            assert result[name].read().tobytes() == bytes(opened.tensors[name].view())


def test_a_path_and_a_mapping(connection: Connection, model: Path) -> None:
    assert len(connection.push(str(model), verify=True)) == 876
    assert len(connection.push(model, include=r"^blk\.0\.")) < 876
    result = connection.push(SOME)
    assert result["a"].numpy().tolist() == SOME["a"].tolist()
    assert result["b"].numpy().dtype == np.int32


def test_the_cache_is_found_by_hello_and_used(tmp_path: Path) -> None:
    arrays = {f"w{i}": np.random.default_rng(i).integers(0, 255, 11 * MIB, np.uint8) for i in range(5)}
    with Server(port=0, cache=tmp_path) as server:
        for round_, (hits, misses) in enumerate([(0, 5), (5, 0)]):
            with connect(server.endpoints[0], timeout=20) as connection:
                assert connection.server_has_cache
                summary = connection.push(arrays, verify=True).summary
                assert (summary.hits, summary.misses) == (hits, misses), round_
                assert summary.sent == misses * 11 * MIB
                assert_adds_up(summary.profile)


def test_progress_is_in_bytes_of_the_whole(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SLICE", MIB)
    arrays = {"big": np.zeros(5 * MIB + 3, np.uint8), "s1": np.zeros(10, np.uint8), "s2": np.zeros(20, np.uint8)}
    calls: list[tuple[str, int, int]] = []
    connection.push(arrays, progress=lambda *call: calls.append(call))
    total = 5 * MIB + 33
    assert calls == [
        *(("big", n * MIB, total) for n in range(1, 6)),
        ("big", 5 * MIB + 3, total),
        ("s1", 5 * MIB + 13, total),
        ("s2", total, total),
    ]


def test_progress_counts_a_second_time_while_verifying(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "READ_CHUNK", MIB)
    monkeypatch.setattr(verifying, "TELL_EVERY", 2 * MIB)
    arrays = {"big": np.zeros(5 * MIB + 3, np.uint8), "s": np.zeros(10, np.uint8)}
    calls: list[tuple[str, int]] = []
    connection.push(arrays, verify=True, progress=lambda name, done, total: calls.append((name, done)))
    both = [("big", 5 * MIB + 3), ("s", 5 * MIB + 13)]
    assert calls == [*both, ("big", 2 * MIB), ("big", 4 * MIB), *both]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"include": "("}, "include"),
        ({"include": "nothing like it"}, "include"),
        ({"include": b"a"}, "include"),
        ({"include": 5}, "include"),
        ({"device": "0"}, "device"),
        ({"cache": "sometimes"}, "cache"),
        ({"progress": 5}, "progress"),
        ({"threads": -1}, "threads"),
        ({"threads": 65}, "threads"),
        ({"threads": "2"}, "threads"),
        ({"in_flight": 0}, "in_flight"),
        ({"index": 5}, "index"),
        ({"probe": 1}, "probe"),
        ({"verify": "no"}, "verify"),
        ({"layers": "x"}, "layers"),
        ({"device": 1}, "device"),
    ],
)
def test_bad_arguments_send_no_tensor(options: dict[str, object], named: str) -> None:
    server = StandIn()
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        with pytest.raises(ConfigError, match=named) as caught:
            connection.push(SOME, **options)  # type: ignore[arg-type]
        assert caught.value.hint or named in ("cache", "probe", "verify")
        connection.barrier()
    assert not {0, 6, 7, 12, 13} & set(server.commands)


def test_a_model_without_tensors(connection: Connection) -> None:
    with pytest.raises(ModelError, match="no tensor"):
        connection.push({})
    connection.barrier()


def test_a_missing_and_a_malformed_file(connection: Connection, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(3))
    for name in ("missing.gguf", "bad.gguf"):
        with pytest.raises(ModelError):
            connection.push(tmp_path / name)
    connection.barrier()


def test_a_tensor_longer_than_the_servers_largest_buffer() -> None:
    server = StandIn(max_size=1000)
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        with pytest.raises(AllocationError, match="'w' takes 1001 bytes"):
            connection.push({"v": np.zeros(999, np.uint8), "w": np.zeros(1001, np.uint8)})
        connection.barrier()
    assert 0 not in server.commands


@pytest.mark.parametrize("version", [(5, 0, 0), (7, 0, 0)])
def test_buffers_are_freed_if_the_next_cannot_be_had(version: tuple[int, int, int]) -> None:
    server = StandIn(version, max_size=1000, capacity=2500)
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        with pytest.raises(AllocationError, match="could not allocate"):
            connection.push({f"w{i}": np.zeros(900, np.uint8) for i in range(3)})
        connection.barrier()
        assert len(server.freed) == 2
        assert not server.buffers
        assert len(connection.push({"w": np.zeros(900, np.uint8)}, verify=True)) == 1


def test_a_file_that_changed_since_it_was_opened_is_not_pushed(connection: Connection, model: Path) -> None:
    with open_model(model) as opened:
        os.utime(model, (1, 1))
        with pytest.raises(ModelError, match="modified"):
            connection.push(opened)
    connection.barrier()


def test_a_file_that_changes_while_it_is_pushed(model: Path) -> None:
    server = StandIn()
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        with pytest.raises(ModelError, match="modified"):
            connection.push(model, progress=lambda *_: os.utime(model, (1, 1)))
        connection.barrier()
        assert not server.buffers, "what had been allocated is freed"


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"read": "read"}, {"cache": "always", "index": False}])
def test_a_file_that_is_rewritten_with_its_old_date_while_it_is_pushed(model: Path, options: dict[str, Any]) -> None:
    with ScriptedServer(StandIn()) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        with pytest.raises(ModelError, match="though its date is the same"):
            connection.push(model, progress=lambda *_: rewrite(model), **options)
        connection.barrier()


def test_a_file_cut_short_while_it_is_pushed(connection: Connection, model: Path) -> None:
    """Must be an error, not a SIGBUS."""
    with pytest.raises(ModelError, match="shorter"):
        connection.push(model, progress=lambda *_: os.truncate(model, 4 * MIB))


def test_a_wrong_byte_is_found_and_named() -> None:
    server = StandIn()
    data = np.random.default_rng(1).integers(0, 255, 9 * MIB, np.uint8)

    def spoil(name: str, done: int, total: int) -> None:
        if done == total:
            (memory,) = server.buffers.values()
            eventually(lambda: memory[64 + 8 * MIB + 6] == data[8 * MIB + 6])
            memory[64 + 8 * MIB + 5] ^= 0xFF

    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        with pytest.raises(IntegrityError, match=rf"'big'.*at byte {8 * MIB + 5} of") as caught:
            connection.push({"a": np.ones(4, "f4"), "big": data}, verify=True, progress=spoil)
        assert caught.value.name == "big"
        assert caught.value.expected == bytes(data[8 * MIB + 5 : 8 * MIB + 13]).hex(" ")
        assert caught.value.actual == bytes([data[8 * MIB + 5] ^ 0xFF, *data[8 * MIB + 6 : 8 * MIB + 13]]).hex(" ")
        connection.barrier()
        assert not server.buffers


@pytest.mark.parametrize("at", [0, 5 * MIB, 11 * MIB - 1])
@pytest.mark.parametrize("probe", [True, False])
def test_a_wrong_byte_out_of_the_cache_is_sent_again(at: int, probe: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With verify nothing wrong stays; the probe sees it, too, at the ends."""
    data = np.random.default_rng(1).integers(0, 255, 11 * MIB, np.uint8)
    bad = bytearray(data)
    bad[at] ^= 1
    value = fnv1a64(data)
    server = StandIn(flags=1, cache={value: bytes(bad)})
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        result = connection.push({"v": np.ones(3, "f4"), "w": data}, verify=True, probe=probe)
        assert result["w"].read().tobytes() == data.tobytes()
        summary = result.summary
        assert (summary.hits, summary.misses, summary.corrupt_hits) == (0, 0, 1)
        assert summary.sent == summary.bytes
        assert server.cache[value] == data.tobytes(), "it is sent with the flag, which mends the entry"
        assert summary.profile.corrupt_hits == 1
        assert_adds_up(summary.profile)
    assert f"{value:016x}" in caplog.text
    assert "'w'" in caplog.text


def test_a_server_that_spoils_what_is_sent_again_is_an_error() -> None:
    data = np.random.default_rng(1).integers(0, 255, 11 * MIB, np.uint8)
    bad = bytearray(data)
    bad[5 * MIB] ^= 1

    class Spoiling(StandIn):
        def _store(self, tensor: bytes, offset: int, data: bytes) -> None:
            super()._store(tensor, offset, bytes(bad) if len(data) == len(bad) else data)

    server = Spoiling(flags=1, cache={fnv1a64(data): bytes(bad)})
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        with pytest.raises(IntegrityError, match=f"'w' came back different: at byte {5 * MIB} of"):
            connection.push({"w": data}, verify=True)
        connection.barrier()
        assert not server.buffers
    assert len(server.of(6)) == 1, "sent once: no third time"


class Stop(Exception):
    """What a callback raises."""


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["small", "large"])
def test_a_callback_that_raises_ends_the_connection(
    name: str, error: type[BaseException], server: Server, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "SLICE", MIB)

    def stop(at: str, done: int, total: int) -> None:
        if at == name:
            raise error

    with pytest.raises(error):
        connection.push({"large": np.zeros(3 * MIB, np.uint8), "small": np.zeros(8, np.uint8)}, progress=stop)
    assert connection.closed
    with pytest.raises(TransportError, match=r"given up|closed"):
        connection.barrier()
    with connect(server.endpoints[0], timeout=20) as other:
        other.barrier()


def test_a_callback_cannot_use_the_connection_it_is_called_from(connection: Connection) -> None:
    with pytest.raises(TransportError, match="inside another call"):
        connection.push(SOME, progress=lambda *_: connection.barrier())


def test_a_callback_may_close(connection: Connection) -> None:
    with pytest.raises(TransportError, match="closed"):
        connection.push(SOME, progress=lambda *_: connection.close())
    assert connection.closed


class StandInThatStops(StandIn):
    """Answers until the first SET_TENSOR, sets ``stopped`` and reads nothing more until ``leave``."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = threading.Event()
        self.leave = threading.Event()

    def __call__(self, peer: Peer) -> None:
        assert serve_hello(peer, self.version)
        while True:
            command, size = peer.head()
            if command == 6:
                self.stopped.set()
                assert self.leave.wait(30)
                return
            answer = self.serve(Message(command, peer.take(size)))
            assert answer is not None
            peer.answer(answer)


def test_close_from_another_thread_wakes_a_push(no_leaks: LeakCheck) -> None:
    """The server takes nothing any more, so the push hangs in a send until close()."""
    server = StandInThatStops()
    caught: list[BaseException] = []
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=60) as connection:

        def run() -> None:
            try:
                connection.push({"w": np.zeros(64 * MIB, np.uint8)})
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert server.stopped.wait(20)
        connection.close()
        thread.join(20)
        server.leave.set()
        assert not thread.is_alive()
    assert isinstance(caught[0], TransportError)
    assert "close()" in str(caught[0])


def test_an_interrupt_ends_a_push_that_hangs(no_leaks: LeakCheck) -> None:
    server = StandInThatStops()

    def interrupt() -> None:
        assert server.stopped.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=60) as connection:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                connection.push({"w": np.zeros(64 * MIB, np.uint8)})
            server.leave.set()
            assert connection.closed
            with pytest.raises(TransportError, match="given up after: KeyboardInterrupt"):
                connection.barrier()
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join(20)


def test_one_connection_from_many_threads(connection: Connection) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            data = np.random.default_rng(seed).integers(0, 255, 200_000, np.uint8)
            for _ in range(5):
                result = connection.push({f"w{seed}": data}, verify=True)
                assert result[f"w{seed}"].read().tobytes() == data.tobytes()
                connection.barrier()
                result[f"w{seed}"].buffer.free()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def test_two_hundred_connections_leave_nothing(server: Server) -> None:
    with connect(server.endpoints[0], timeout=20) as connection:
        connection.push(SOME)  # the server's own threads are there after the first
    check = LeakCheck()
    for _ in range(200):
        with connect(server.endpoints[0], timeout=20) as connection:
            connection.push(SOME)
    assert check.settled(), check.report()


def test_failed_pushes_leave_nothing(server: Server, model: Path) -> None:
    with connect(server.endpoints[0], timeout=20) as connection:
        connection.push(SOME)
    check = LeakCheck()
    for _ in range(20):
        with connect(server.endpoints[0], timeout=20) as connection:
            with pytest.raises(Stop):
                connection.push(model, cache="always", progress=_raise)
            with pytest.raises(WeightwireError):
                connection.push(model)
    assert check.settled(), check.report()


def _raise(*_: object) -> None:
    raise Stop
