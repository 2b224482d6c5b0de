"""What goes over the wire, and in which order, depends on the tensors and on what the server says; on nothing else."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import raw_gguf
from support.leaks import LeakCheck
from support.scripted import Message, ScriptedServer, StandIn

from weightwire import connect, fnv1a64
from weightwire.client import asking, hashpool
from weightwire.client.channel import Channel

MIB = 1 << 20
LARGE = 10 * MIB + 64


class Recorder(StandIn):
    """Keeps of each request its command, size and digest, and not its bytes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[tuple[int, int, bytes]] = []

    def serve(self, message: Message) -> bytes | None:
        self.requests.clear()
        self.seen.append((message.command, len(message.payload), hashlib.sha256(message.payload).digest()))
        return super().serve(message)


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    """Small, middling and large tensors in turn; a large one occurs four times, twice within a window."""
    rng = np.random.default_rng(7)
    found: dict[str, bytes] = {}
    double = rng.bytes(LARGE)
    for layer in range(9):
        found[f"blk.{layer}.norm"] = rng.bytes(512)
        found[f"blk.{layer}.middling"] = rng.bytes(100_000)
        found[f"blk.{layer}.large"] = double if layer in (2, 3, 5, 8) else rng.bytes(LARGE)
    found["end"] = rng.bytes(32)
    return found


@pytest.fixture(scope="module")
def model(contents: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traffic") / "model.gguf"
    tensors, body = [], bytearray()
    for name, data in contents.items():
        tensors.append(raw_gguf.tensor(name, (len(data),), 24, len(body)))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(raw_gguf.build(tensors=tensors) + body)
    return path


def traffic(model: object, cache: dict[int, bytes], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """What a server with that cache is sent. Hashing takes times that differ from run to run."""
    real = hashpool.HashPool._hash

    def uneven(*args: Any) -> Any:
        time.sleep(random.random() / 50)
        return real(*args)

    monkeypatch.setattr(hashpool.HashPool, "_hash", uneven)
    server = Recorder(cache=dict(cache))
    with ScriptedServer(server) as scripted, connect(scripted.endpoint, timeout=60) as connection:
        connection.push(model, cache="always", **options)  # type: ignore[arg-type]
    return server.seen


@pytest.mark.parametrize("have", ["nothing", "everything", "some"])
@pytest.mark.parametrize("probe", [True, False])
def test_it_is_the_same_for_any_number_of_threads(
    have: str,
    probe: bool,
    contents: dict[str, bytes],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_leaks: LeakCheck,
) -> None:
    layers = {"nothing": (), "everything": range(9), "some": (0, 4, 5, 6)}[have]
    cache = {fnv1a64(contents[f"blk.{layer}.large"]): contents[f"blk.{layer}.large"] for layer in layers}
    first = traffic(model, cache, monkeypatch, threads=0, probe=probe)
    assert len({command for command, *_ in first}) > 4
    for threads in (1, 2, 32):
        assert traffic(model, cache, monkeypatch, threads=threads, probe=probe) == first, threads
    arrays = {name: np.frombuffer(data, np.int8) for name, data in contents.items()}
    for threads in (0, 2):
        assert traffic(arrays, cache, monkeypatch, threads=threads, probe=probe) == first, "arrays as files"


@pytest.mark.parametrize("index", ["cold", "warm"])
def test_it_is_the_same_with_the_index(
    index: str,
    contents: dict[str, bytes],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    always_settled: None,
) -> None:
    cache = {fnv1a64(contents["blk.4.large"]): contents["blk.4.large"]}
    first = traffic(model, cache, monkeypatch, index=False, threads=2)
    path = tmp_path / "index.sqlite3"
    if index == "warm":
        traffic(model, cache, monkeypatch, index=path)
    assert traffic(model, cache, monkeypatch, index=path, threads=2) == first


def test_doubles_are_sent_once_whatever_the_window(contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.frombuffer(contents["blk.2.large"], np.int8)
    for count in (2, 7, 20):
        seen = traffic({f"w{at}": data for at in range(count)}, {}, monkeypatch, probe=False, threads=2)
        assert sum(command == 6 for command, *_ in seen) == 1


def test_questions_run_ahead_in_a_bounded_window(contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warm cache there is nearly always a question on its way while an answer is waited for."""
    waiting: list[int] = []
    read = Channel.read_answer

    def watched(channel: Channel) -> bytes:
        waiting.append(sum(expected.command == 7 for expected in channel._pending))
        return read(channel)

    arrays = {f"w{at}": np.frombuffer(contents[f"blk.{at % 9}.large"], np.int8) for at in range(40)}
    cache = {fnv1a64(data): bytes(data) for data in arrays.values()}  # type: ignore[call-overload]
    monkeypatch.setattr(Channel, "read_answer", watched)
    traffic(arrays, cache, monkeypatch, probe=False, threads=1)
    waits = [count for count in waiting if count]
    assert len(waits) == 40, "one answer each"
    window = min(asking.WINDOW_TENSORS, asking.WINDOW_BYTES // LARGE)
    assert max(waits) <= window
    assert sum(count > window // 2 for count in waits) > 15
    assert sum(count == 1 for count in waits) <= 3, "at the start and at the end"


def test_the_window_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "WINDOW_BYTES", 3 * LARGE)
    arrays = {f"w{at}": np.full(LARGE, at, np.int8) for at in range(9)}
    cache = {fnv1a64(data): bytes(data) for data in arrays.values()}  # type: ignore[call-overload]
    most = 0
    read = Channel.read_answer

    def watched(channel: Channel) -> bytes:
        nonlocal most
        most = max(most, sum(expected.command == 7 for expected in channel._pending))
        return read(channel)

    monkeypatch.setattr(Channel, "read_answer", watched)
    traffic(arrays, cache, monkeypatch)
    assert most == 3
    most = 0
    traffic(arrays, cache, monkeypatch, in_flight=LARGE)
    assert most == 1, "nor may more be asked about than may be hashed ahead"
    most = 0
    monkeypatch.setattr(asking, "WINDOW_BYTES", LARGE)
    traffic(arrays, cache, monkeypatch, in_flight=2 * LARGE)
    assert most == 2, "the next one's question goes out before this one's answer comes, however large they are"
