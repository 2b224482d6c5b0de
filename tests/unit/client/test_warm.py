"""Warming: what goes over the wire, in every version, and what a server may do to it."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import raw_gguf as raw
from support.leaks import LeakCheck
from support.rewriting import rewrite
from support.scripted import Message, ScriptedServer, StandIn

import weightwire
from weightwire import fnv1a64, warm
from weightwire.client import Warmed, WarmSummary
from weightwire.errors import AllocationError, CacheUnavailable, ConfigError, ModelError, PeerClosed, ProtocolError

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
RANDOM = np.random.default_rng(11)
LARGE = {f"layers.{n}.w": RANDOM.integers(0, 255, (10 + n) * MIB + 1, dtype=np.uint8) for n in range(3)}
MODEL = {**LARGE, "limit": np.zeros(10 * MIB, np.uint8), "small": np.ones(7, np.float32)}


def one(outcomes: list[Warmed]) -> WarmSummary:
    """The only summary; raises what went wrong instead."""
    (outcome,) = outcomes
    if outcome.error is not None:
        raise outcome.error
    assert outcome.summary is not None
    return outcome.summary


@pytest.mark.parametrize("version", [(1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0, 0), (6, 0, 0), (7, 0, 0), (8, 0, 0)])
def test_each_version(version: tuple[int, int, int], no_leaks: LeakCheck) -> None:
    peer = StandIn(version=version)
    # Before 4.0 the first form of HELLO is refused.
    with ScriptedServer(*[peer] * (2 if version[0] < 4 else 1)) as server:
        summary = one(warm(MODEL, server.endpoint, index=False))
    assert (summary.tensors, summary.misses, summary.hits, summary.too_large) == (3, 3, 0, ())
    assert peer.cache == {fnv1a64(data): data.tobytes() for data in LARGE.values()}
    (allocation,) = peer.of(0)
    assert struct.unpack("<Q", allocation.payload[-8:]) == (max(data.nbytes for data in LARGE.values()),)
    assert not peer.of(12), "nothing is announced: they are plain bytes"
    sent = [message for message in peer.of(6) if len(message.payload) > MIB]
    assert len(sent) == 3
    if version[0] >= 7:
        assert {message.payload[296] for message in sent} == {1}
        assert {message.payload[296] for message in peer.of(6) if message not in sent} == {0}, "edges are not kept"


def test_it_asks_before_it_sends_and_makes_the_ends_wrong() -> None:
    name, data = next(iter(LARGE.items()))
    peer = StandIn(cache={fnv1a64(data): data.tobytes()})
    with ScriptedServer(peer) as server:
        summary = one(warm({name: data}, server.endpoint, index=False))
    assert (summary.hits, summary.misses, summary.sent) == (1, 0, 0)
    asked = peer.commands.index(7)
    assert [message.command for message in peer.requests[asked - 2 : asked + 3]] == [6, 6, 7, 8, 8]
    assert all(len(message.payload) < 600 for message in peer.of(6))


class _Lossy(StandIn):
    """A server whose cache keeps ``kept`` tensors, and then no more, or the first half of each."""

    def __init__(self, kept: int, cut: bool = False) -> None:
        super().__init__()
        self.kept, self.cut = kept, cut

    def serve(self, message: Message) -> bytes | None:
        before = set(self.cache)
        answer = super().serve(message)
        for value in set(self.cache) - before:
            if self.kept:
                self.kept -= 1
            elif self.cut:
                self.halves = {**getattr(self, "halves", {}), value: self.cache.pop(value)[: 5 * MIB]}
            else:
                del self.cache[value]
        if message.command == 7 and answer == b"\0":
            (value,) = struct.unpack("<Q", message.payload[304:])
            half = getattr(self, "halves", {}).get(value)
            if half is not None:
                self._store(message.payload, 0, half)
                return b"\1"
        return answer


@pytest.mark.parametrize(("kept", "cut", "sent", "said"), [
    (0, False, 1, "keeps no tensor cache"),
    (0, True, 1, "only a part"),
    (1, False, 3, "has not kept"),
    (2, True, 3, "only a part"),
])  # fmt: skip
def test_a_server_that_does_not_keep_it(kept: int, cut: bool, sent: int, said: str) -> None:
    peer = _Lossy(kept, cut)
    with ScriptedServer(peer) as server:
        (outcome,) = warm(MODEL, server.endpoint, index=False)
    assert isinstance(outcome.error, CacheUnavailable)
    assert said in outcome.error.detail
    assert outcome.error.endpoint == server.endpoint
    assert outcome.error.hint
    assert sum(len(message.payload) > MIB for message in peer.of(6)) == sent


def test_what_is_too_large_for_the_server_is_left_out_and_said() -> None:
    peer = StandIn(max_size=11 * MIB + 1)
    with ScriptedServer(peer) as server:
        summary = one(warm(MODEL, server.endpoint, index=False))
    assert summary.too_large == ("layers.2.w",)
    assert (summary.tensors, summary.misses) == (3, 2)
    assert set(peer.cache) == {fnv1a64(LARGE[name]) for name in ("layers.0.w", "layers.1.w")}
    with ScriptedServer(StandIn(max_size=10 * MIB)) as server:
        (outcome,) = warm(MODEL, server.endpoint, index=False)
    assert isinstance(outcome.error, AllocationError)


def test_a_hash_that_is_known_of_what_is_too_large_does_not_count(tmp_path: Path, always_settled: None) -> None:
    path, index = tmp_path / "model.safetensors", tmp_path / "index"
    save_file(MODEL, path)
    with ScriptedServer(StandIn()) as server:
        assert one(warm(path, server.endpoint, index=index)).hashes_known == 0
    with ScriptedServer(StandIn(max_size=11 * MIB + 1)) as server:
        summary = one(warm(path, server.endpoint, index=index))
    assert (summary.too_large, summary.misses, summary.hashes_known) == (("layers.2.w",), 2, 2)


def test_a_server_without_the_memory() -> None:
    with ScriptedServer(StandIn(capacity=11 * MIB)) as server:
        (outcome,) = warm(MODEL, server.endpoint, index=False)
    assert isinstance(outcome.error, AllocationError)
    assert outcome.error.nbytes == 12 * MIB + 1


def test_equal_tensors_are_sent_once() -> None:
    data = LARGE["layers.0.w"]
    peer = StandIn()
    with ScriptedServer(peer) as server:
        summary = one(warm({"a": data, "b": data.copy(), "c": data.copy()}, server.endpoint, index=False))
    assert summary.misses == 1
    assert sum(len(message.payload) > MIB for message in peer.of(6)) == 1


def test_nothing_to_do() -> None:
    peer = StandIn()
    with ScriptedServer(peer) as server:
        summary = one(warm({"small": MODEL["small"]}, server.endpoint, index=False))
    assert (summary.tensors, summary.bytes) == (0, 0)
    assert not peer.of(0)


def test_a_server_that_dies_or_lies_is_an_error() -> None:
    class Dies(StandIn):
        def serve(self, message: Message) -> bytes | None:
            if message.command == 7:
                raise ConnectionError
            return super().serve(message)

    class Lies(StandIn):
        def serve(self, message: Message) -> bytes | None:
            return b"\x05" if message.command == 7 else super().serve(message)

    for peer, kind in ((Dies(), PeerClosed), (Lies(), ProtocolError)):
        with ScriptedServer(peer) as server:
            (outcome,) = warm(MODEL, server.endpoint, index=False, timeout=20)
        assert isinstance(outcome.error, kind)
        assert "layers." in str(outcome.error)


def test_several_at_once(tmp_path: Path, no_leaks: LeakCheck) -> None:
    with (
        weightwire.Server(port=0, cache=tmp_path / "a") as one_server,
        weightwire.Server(port=0) as without,
        weightwire.Server(port=0, cache=tmp_path / "b") as other,
    ):
        outcomes = warm(
            MODEL,
            [weightwire.Target(one_server.endpoints[0], layers="0"), without.endpoints[0], other.endpoints[0]],
            index=False,
        )
    assert [type(outcome.error) for outcome in outcomes] == [type(None), CacheUnavailable, type(None)]
    names = [{path.name for path in (tmp_path / folder).iterdir() if path.is_file()} for folder in "ab"]
    assert names == [{f"{fnv1a64(LARGE['layers.0.w']):016x}"}, {f"{fnv1a64(data):016x}" for data in LARGE.values()}]
    with pytest.raises(ConfigError):
        warm(MODEL, [])


@pytest.mark.parametrize("which", [0, 1])
def test_a_model_that_is_rewritten_with_its_old_date(tmp_path: Path, which: int) -> None:
    """Whether that shows as an entry of another name or not at all: the server is not to blame."""
    path = tmp_path / "model.gguf"
    sizes = [10 * MIB + 32, 11 * MIB]
    header = [raw.tensor("first", (sizes[0],), 24, 0), raw.tensor("last", (sizes[1],), 24, sizes[0])]
    path.write_bytes(raw.build([], header, RANDOM.bytes(sum(sizes))))

    class Rewrites(StandIn):
        """Between the question about a tensor and its bytes."""

        def serve(self, message: Message) -> bytes | None:
            answer = super().serve(message)
            if message.command == 7 and len(self.of(7)) == 1:
                rewrite(path, path.stat().st_size - (sum(sizes) if which == 0 else 8))
            return answer

    with ScriptedServer(Rewrites()) as server:
        (outcome,) = warm(path, server.endpoint, index=False)
    assert isinstance(outcome.error, ModelError)
    assert "though its date is the same" in outcome.error.detail


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_entry_that_cannot_be_made_is_said_and_the_others_are(tmp_path: Path, number: int) -> None:
    names = [f"{fnv1a64(data):016x}" for data in LARGE.values()]
    with weightwire.Server(port=0, cache=tmp_path) as server:
        (tmp_path / names[number]).mkdir()
        (outcome,) = warm(MODEL, server.endpoints[0], index=False)
    if number == 1:
        assert outcome.error is None, "only the first and the last are asked for again"
    else:
        assert isinstance(outcome.error, CacheUnavailable)
        assert f"has not kept tensor 'layers.{number}.w'" in outcome.error.detail
        assert outcome.error.hint
    assert all((tmp_path / name).is_file() for name in names if name != names[number])


def test_a_cache_that_has_gone_is_no_lack_of_a_cache(tmp_path: Path) -> None:
    with weightwire.Server(port=0, cache=tmp_path / "cache") as server:
        shutil.rmtree(tmp_path / "cache")
        (outcome,) = warm(MODEL, server.endpoints[0], index=False)
        assert isinstance(outcome.error, CacheUnavailable)
        assert "has not kept" in outcome.error.detail
        assert "directory gone" in outcome.error.hint
        assert server.stats().tcp.bytes_received < sum(data.nbytes for data in LARGE.values()), "it gave up"
