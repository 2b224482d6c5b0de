"""The plain way of sending: its costs are what it is for. That it sends the same bytes is shown in tests/interop."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import raw_gguf
from support.leaks import LeakCheck
from support.scripted import ScriptedServer, StandIn

import weightwire
from weightwire import connect
from weightwire.client import hashpool, plain
from weightwire.client.channel import Channel
from weightwire.errors import AllocationError, ConfigError, ModelError
from weightwire.transport import memory

MIB = 1 << 20
SIZES = {"a.small": 100, "b.large": 10 * MIB + 5, "c.none": 0, "d.middling": 3 * MIB, "e.large": 66 * MIB}
LARGE = ["b.large", "e.large"]
#: Bytes of command, size and header before the payload.
HEAD = 9 + 305


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    rng = np.random.default_rng(5)
    return {name: rng.bytes(size) for name, size in SIZES.items()}


@pytest.fixture(scope="module", params=["file", "arrays"])
def model(request: pytest.FixtureRequest, contents: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "arrays":
        return {name: np.frombuffer(data, np.int8) for name, data in contents.items()}
    path = tmp_path_factory.mktemp("plain") / "model.gguf"
    tensors, body = [], bytearray()
    for name, data in contents.items():
        tensors.append(raw_gguf.tensor(name, (len(data),), 24, len(body)))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(raw_gguf.build(tensors=tensors) + body)
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, str]]:
    """Of every payload that is hashed its bytes, whether that was the plain loop alone, and the thread."""
    found: list[tuple[int, bool, str]] = []
    real = hashpool.hash_payloads

    def watched(payloads: Any, *, check: Any = None, plain: bool = False) -> list[int]:
        found.extend((payload.nbytes, plain, threading.current_thread().name) for payload in payloads)
        return real(payloads, check=check, plain=plain)

    for module in (hashpool, plain):
        monkeypatch.setattr(module, "hash_payloads", watched)
    return found


@pytest.mark.parametrize("cache", ["never", "auto", "always"])
def test_everything_large_is_hashed_once_in_line_whether_or_not_anybody_asks(
    cache: str, model: Any, hashed: list[tuple[int, bool, str]], tmp_path: Path, no_leaks: LeakCheck
) -> None:
    names: set[str] = set()

    def watch(*_: object) -> None:
        names.update(thread.name for thread in threading.enumerate())

    with ScriptedServer(StandIn()) as scripted, connect(scripted.endpoint, optimized=False) as connection:
        assert connection.optimized is False
        summary = connection.push(
            model, cache=cache, threads=8, index=tmp_path / "index", progress=watch, probe=False
        ).summary
    here = threading.current_thread().name
    assert hashed == [(SIZES[name], True, here) for name in LARGE]
    assert not [name for name in names if name.startswith("weightwire-hash")]
    assert (summary.threads, summary.hashes_known) == (0, 0)
    assert not (tmp_path / "index").exists()


def test_the_optimized_way_hashes_nothing_that_nobody_asks_for(model: Any, hashed: list[tuple[int, bool, str]]) -> None:
    with ScriptedServer(StandIn()) as scripted, connect(scripted.endpoint) as connection:
        assert connection.optimized is True
        connection.push(model, cache="never")
        assert hashed == []
        connection.push(model, cache="always", threads=1)
    assert [(nbytes, plain_) for nbytes, plain_, _ in hashed] == [(SIZES[name], False) for name in LARGE]
    assert all(name.startswith("weightwire-hash") for *_, name in hashed)


def test_each_tensor_is_one_message_in_memory_of_its_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    begin, more = Channel.begin, Channel.more

    def begun(self: Channel, head: Any, payload: Any) -> None:
        # The message has the header in it, in front of the payload, whatever slice is sent from where.
        assert isinstance(payload.obj, bytearray)
        assert payload.obj.startswith(head)
        lengths.append(len(payload.obj))
        begin(self, head, payload)

    def continued(self: Channel, payload: Any) -> None:
        assert len(payload.obj) == lengths[-1]
        more(self, payload)

    monkeypatch.setattr(Channel, "begin", begun)
    monkeypatch.setattr(Channel, "more", continued)
    told: list[tuple[str, int]] = []
    with ScriptedServer(StandIn()) as scripted, connect(scripted.endpoint, optimized=False) as connection:
        connection.push(model, cache="never", progress=lambda name, done, total: told.append((name, done)))
    assert lengths == [HEAD + size for size in SIZES.values() if size]
    # After each tensor, and every 64 MiB within one.
    done = np.cumsum(list(SIZES.values()))
    assert told == [
        *((name, int(upto)) for name, upto in zip(list(SIZES)[:4], done, strict=False)),
        ("e.large", int(done[3]) + 64 * MIB),
        ("e.large", int(done[4])),
    ]


def test_no_memory_for_a_message(model: Any, monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    """It is looked for before it is written to, and the connection can still be used."""
    with (
        ScriptedServer(StandIn()) as scripted,
        connect(scripted.endpoint, optimized=False) as connection,
    ):
        monkeypatch.setattr(memory, "available_memory", lambda: 65 * MIB)
        with pytest.raises(AllocationError, match=r"no memory for the message with tensor 'e\.large'") as caught:
            connection.push(model, cache="never")
        assert caught.value.nbytes == HEAD + SIZES["e.large"]
        monkeypatch.undo()
        assert connection.push(model, cache="never").summary.tensors == len(SIZES)


@pytest.mark.parametrize("nbytes", [3 * MIB, 11 * MIB], ids=["read for its message", "hashed"])
def test_a_file_cut_short_under_it(nbytes: int, tmp_path: Path, no_leaks: LeakCheck) -> None:
    path = tmp_path / "model.gguf"
    tensors = [raw_gguf.tensor("first", (64,), 24, 0), raw_gguf.tensor("second", (nbytes,), 24, 64)]
    path.write_bytes(raw_gguf.build(tensors=tensors) + bytes(64 + nbytes))

    def shorten(name: str, *_: object) -> None:
        assert name == "first"
        os.truncate(path, path.stat().st_size - 1)

    with (
        ScriptedServer(StandIn()) as scripted,
        connect(scripted.endpoint, optimized=False) as connection,
        weightwire.open_model(path) as opened,
        pytest.raises(ModelError, match="shorter than when opened"),
    ):
        connection.push(opened, progress=shorten)


def test_the_variable_and_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    with weightwire.Server(port=0) as server:
        monkeypatch.setenv("GGML_RPC_LOAD_OPT", "0")
        with connect(server.endpoints[0]) as connection:
            assert connection.optimized is False
        with connect(server.endpoints[0], optimized=True) as connection:
            assert connection.optimized is True
        assert weightwire.Server(port=0).optimized is False
        assert weightwire.Server(port=0, optimized=True).optimized is True
        monkeypatch.setenv("GGML_RPC_LOAD_OPT", "maybe")
        with pytest.raises(ConfigError, match=r"GGML_RPC_LOAD_OPT: 'maybe' is neither 1 .on. nor 0 .off."):
            connect(server.endpoints[0])
    with pytest.raises(ConfigError, match="optimized=1 is none of True, False and None"):
        connect("127.0.0.1:1", optimized=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="optimized='no'"):
        weightwire.Server(optimized="no")  # type: ignore[arg-type]


def test_several_servers_and_warming(
    contents: dict[str, bytes], model: Any, tmp_path: Path, no_leaks: LeakCheck
) -> None:
    servers = [weightwire.Server(port=0, cache=tmp_path / str(at), optimized=bool(at)).start() for at in range(2)]
    try:
        endpoints = [server.endpoints[0] for server in servers]
        with weightwire.push_all(model, endpoints, verify=True, optimized=False).check() as pushed:
            assert [each.connection is not None and each.connection.optimized for each in pushed] == [False, False]
            assert [each.result is not None and each.result.summary.misses for each in pushed] == [2, 2]
        warmed = weightwire.warm(model, endpoints, optimized=False)
        assert [(each.optimized, each.summary and each.summary.hits) for each in warmed] == [(False, 2), (False, 2)]
        warmed = weightwire.warm({"w": np.frombuffer(contents["b.large"][1:], np.int8)}, endpoints, optimized=False)
        assert [each.summary and each.summary.sent for each in warmed] == [SIZES["b.large"] - 1] * 2
    finally:
        for server in servers:
            server.close()
