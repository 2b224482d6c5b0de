"""`LoadProfile`: what it says of the numbers in it."""

from __future__ import annotations

import copy
import dataclasses
import json
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import weightwire
from weightwire.config import profile_wanted
from weightwire.errors import ConfigError
from weightwire.profile import CommandStat, LoadProfile

NAMES = {
    *("side", "peer", "transport", "device", "send_depth", "measured", "set_tensor_calls", "set_tensor_bytes"),
    *("span_ns", "read_ns", "hash_ns", "ask_ns", "staging_ns", "wire_ns", "wait_ns", "gap_ns", "blocked_ns"),
    *("alloc_ns", "verify_ns", "index_ns", "hash_thread_ns", "hits", "misses", "corrupt_hits", "bytes_saved"),
    *("copies", "copied_bytes", "direct_bytes", "window_full", "busy_ns", "peer_limited_ns", "buffer_limited_ns"),
    "commands",
}


def test_it_is_public_frozen_and_has_every_field() -> None:
    assert weightwire.LoadProfile is LoadProfile
    profile = LoadProfile(span_ns=5, read_ns=5, commands={"SET_TENSOR": CommandStat(2, 70)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.span_ns = 6  # type: ignore[misc]
    values = profile.as_dict()
    assert set(values) == NAMES | {"bottleneck"}
    assert json.loads(json.dumps(values)) == values
    assert values["commands"] == {"SET_TENSOR": {"count": 2, "ns": 70}}
    assert pickle.loads(pickle.dumps(profile)) == copy.deepcopy(profile) == profile
    assert hash(profile) == hash(copy.deepcopy(profile))


CHANGES: tuple[Callable[[Any], object], ...] = (
    lambda commands: operator.setitem(commands, "HELLO", CommandStat(1, 1)),
    lambda commands: operator.delitem(commands, "SET_TENSOR"),
    lambda commands: commands.__ior__({"HELLO": CommandStat(1, 1)}),
    lambda commands: commands.update(HELLO=CommandStat(1, 1)),
    lambda commands: commands.setdefault("HELLO", CommandStat(1, 1)),
    lambda commands: commands.pop("SET_TENSOR"),
    lambda commands: commands.popitem(),
    lambda commands: commands.clear(),
)


def test_its_commands_cannot_be_changed() -> None:
    mine = {"SET_TENSOR": CommandStat(2, 70)}
    profile = LoadProfile(commands=mine)
    mine.clear()
    for each in (
        profile,
        pickle.loads(pickle.dumps(profile)),
        copy.copy(profile),
        copy.deepcopy(profile),
        dataclasses.replace(profile),
    ):
        for change in CHANGES:
            with pytest.raises(TypeError, match="cannot be changed"):
                change(each.commands)
        assert each.commands == {"SET_TENSOR": CommandStat(2, 70)}


def test_it_is_taken_apart_as_any_dataclass_is() -> None:
    profile = LoadProfile(span_ns=5, commands={"SET_TENSOR": CommandStat(2, 70)})
    values = dataclasses.asdict(profile)
    assert set(values) == NAMES
    assert values["span_ns"] == 5
    assert values["commands"] == {"SET_TENSOR": {"count": 2, "ns": 70}}
    assert json.loads(json.dumps(values)) == values
    assert LoadProfile(*dataclasses.astuple(LoadProfile())) == LoadProfile()
    assert copy.deepcopy(profile.commands) == pickle.loads(pickle.dumps(profile.commands)) == profile.commands


@pytest.mark.parametrize("side", ["client", "server"])
def test_what_was_not_measured_is_not_said_to_be_nothing(side: str) -> None:
    profile = LoadProfile(side=side, measured=False, set_tensor_bytes=60 << 20, misses=3)
    assert profile.lines()[1:] == [
        "  60.0 MiB in SET_TENSOR; times and requests were not measured",
        "  server's cache: 0 hits, 3 misses, 0 bytes not sent",
    ]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"read_ns": 60, "wire_ns": 40}, "source-bound"),
        ({"gap_ns": 40, "read_ns": 20, "hash_ns": 40}, "source-bound"),
        ({"hash_ns": 60, "wire_ns": 40}, "hash-bound"),
        ({"wire_ns": 60, "wait_ns": 40}, "wire-bound"),
        ({"wire_ns": 30, "staging_ns": 30, "wait_ns": 40}, "wire-bound"),
        ({"wire_ns": 10, "wait_ns": 90}, "server-bound"),
        ({"ask_ns": 60, "wire_ns": 40}, "server-bound"),
        ({"wait_ns": 90, "blocked_ns": 80, "wire_ns": 10}, "wire-bound"),
        ({"wait_ns": 90, "blocked_ns": 80, "wire_ns": 10, "peer_limited_ns": 70}, "server-bound"),
        ({"wait_ns": 90, "blocked_ns": 80, "wire_ns": 10, "peer_limited_ns": 20}, "wire-bound"),
        ({"wait_ns": 5, "wire_ns": 95, "peer_limited_ns": 500}, "wire-bound"),
    ],
)
def test_the_bottleneck_of_a_client(values: dict[str, Any], name: str) -> None:
    profile = LoadProfile(span_ns=100, set_tensor_calls=1, **values)
    assert profile.bottleneck == name
    assert profile.lines()[-1].startswith(f"{name}: the time went on ")
    assert profile.as_dict()["bottleneck"] == name


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"wait_ns": 40, "gap_ns": 20, "wire_ns": 40}, "client-bound"),
        ({"read_ns": 60, "wire_ns": 40}, "source-bound"),
        ({"hash_ns": 60, "read_ns": 40}, "hash-bound"),
        ({"wire_ns": 60, "gap_ns": 40}, "wire-bound"),
        ({"staging_ns": 60, "wire_ns": 40}, "server-bound"),
    ],
)
def test_the_bottleneck_of_a_server(values: dict[str, Any], name: str) -> None:
    profile = LoadProfile(side="server", span_ns=100, **values)
    assert profile.bottleneck == name
    assert profile.lines()[-1].startswith(f"{name}: ")


def test_lines_for_people() -> None:
    profile = LoadProfile(
        peer="10.0.0.2:50052", set_tensor_calls=12, set_tensor_bytes=4 << 30, span_ns=2_000_000_000,
        wire_ns=500_000_000, hash_ns=1_000_000_000, wait_ns=500_000_000, blocked_ns=400_000_000,
        peer_limited_ns=7_000_000, busy_ns=600_000_000, hash_thread_ns=1_900_000_000, verify_ns=40_000, hits=3,
        misses=1, bytes_saved=2 << 30, commands={"SET_TENSOR": CommandStat(12, 900_000_000)},
    )  # fmt: skip
    text = "\n".join(profile.lines())
    assert profile.lines()[:3] == [
        "client, connection with 10.0.0.2:50052 over tcp",
        "  12 SET_TENSOR, 4.00 GiB in 2.000 s, 2.00 GiB/s",
        "  server's cache: 3 hits, 1 miss, 2.00 GiB not sent",
    ]
    assert profile.lines()[3].split() == ["hashing", "1.000", "s", "50.0", "%"]
    for words in (
        *("for room to send: 0.400 s", "window was closed for 0.007 s", "threads hashed for 1.900 s"),
        *("verifying 40 us", "SET_TENSOR 12 in 0.900 s"),
    ):
        assert words in text
    assert "laying out" not in text
    assert profile.lines()[-1] == "hash-bound: the time went on hashing large tensors"


def test_lines_over_rdma() -> None:
    profile = LoadProfile(
        transport="rdma", device="mlx5_0", send_depth=8, direct_bytes=4 << 20, copied_bytes=1 << 20, window_full=17
    )
    assert profile.lines()[0].endswith("over rdma on mlx5_0")
    assert (
        "  over RDMA: 4.0 MiB sent where they lay, 1.0 MiB copied; 8 SENDs in flight at most, window full 17 times"
        in (profile.lines())
    )


@pytest.mark.parametrize("values", [{}, {"set_tensor_bytes": 5}, {"measured": False}])
@pytest.mark.parametrize("side", ["client", "server"])
def test_without_a_span_there_is_no_bottleneck(side: str, values: dict[str, Any]) -> None:
    profile = LoadProfile(side=side, **values)
    assert profile.bottleneck is None
    assert profile.lines()
    assert "-bound" not in "\n".join(profile.lines())
    assert not profile.loaded


def test_since_is_what_was_added() -> None:
    before = LoadProfile(
        peer="a:1",
        span_ns=10,
        read_ns=10,
        hits=1,
        send_depth=3,
        commands={"A": CommandStat(1, 5), "B": CommandStat(2, 7)},
    )
    now = LoadProfile(
        peer="a:1", span_ns=25, read_ns=12, hash_ns=13, hits=1, misses=2, send_depth=4,
        commands={"A": CommandStat(4, 50), "B": CommandStat(2, 7), "C": CommandStat(1, 1)},
    )  # fmt: skip
    added = now.since(before)
    assert (added.span_ns, added.read_ns, added.hash_ns) == (15, 2, 13)
    assert (added.hits, added.misses, added.send_depth, added.peer, added.measured) == (0, 2, 4, "a:1", True)
    assert added.commands == {"A": CommandStat(3, 45), "C": CommandStat(1, 1)}
    assert now.since(LoadProfile(peer="a:1")) == now


@pytest.mark.parametrize(
    ("text", "wanted"), [("1", True), ("on", True), (" Yes ", True), ("0", False), ("off", False), ("false", False)]
)
def test_the_variable(text: str, wanted: bool) -> None:
    environ = {"GGML_RPC_LOADPROF": text}
    assert profile_wanted(None, environ) is wanted
    assert profile_wanted(not wanted, environ) is not wanted
    assert profile_wanted(None, {}) is None


@pytest.mark.parametrize("text", ["", "2", "maybe"])
def test_a_variable_that_cannot_be_used_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="GGML_RPC_LOADPROF"):
        profile_wanted(None, {"GGML_RPC_LOADPROF": text})
    with pytest.raises(ConfigError, match="profile="):
        profile_wanted(text, {})
