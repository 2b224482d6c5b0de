"""What the benchmarks run, once each with a small model: that they work and measure what they say, not how fast."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.cached import CachedPeer, State, empty, entries, file_system
from harness.gloo import GlooPeer
from harness.iperf import IperfPeer
from harness.models import file_ranges, first_blocks, full_cache, whole_blocks, write_random
from harness.network import LOOPBACK, RATE, Network
from harness.pushing import PushingPeer, Serving
from harness.rounds import Peer, PeerAbsent, Rounds, alternate, settle, split, start
from harness.socket_pair import SocketPairPeer
from harness.stock_pair import StockPeer
from support.awkward import MIB
from support.leaks import LeakCheck, eventually

import weightwire

pytestmark = [pytest.mark.interop]

SIZES = {"large": 11 * MIB, "small": 4096, "larger": 12 * MIB + 1, "at the limit": 10 * MIB}
NBYTES = sum(SIZES.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.safetensors"
    write_random(path, SIZES)
    return path


@pytest.fixture
def shaped(shape: Callable[[int], tuple[Network, ...]]) -> Network:
    return shape(1)[0]


@pytest.fixture(params=["loopback", "shaped"])
def network(request: pytest.FixtureRequest) -> Network:
    return LOOPBACK if request.param == "loopback" else request.getfixturevalue("shaped")


def pairs(
    stack: ExitStack, library: Path, model: Path, network: Network, cache: Path | None, index: str | bool = False
) -> tuple[Peer, Peer]:
    """weightwire's pair and the stock pair."""
    ours = PushingPeer(
        model,
        network=network,
        cache=cache / "weightwire" if cache else None,
        options={"cache": "auto" if cache else "never", "index": index},
    )
    stack.callback(ours.close)
    stock = StockPeer(library, model, file_ranges(model), network=network, cache=cache / "stock" if cache else None)
    stack.callback(stock.close)
    return ours, stock


def test_what_a_cache_holds(model: Path) -> None:
    assert sorted(full_cache(model).values()) == [11 * MIB, 12 * MIB + 1]


def test_whole_blocks_are_what_a_cache_is_for() -> None:
    sizes = dict(whole_blocks(1 << 30))
    assert sizes == dict(first_blocks(5)), "the last is a whole one, too"
    assert dict(whole_blocks(1)) == dict(first_blocks(1))
    assert (1 << 30) <= sum(sizes.values()) < (5 << 28)
    assert sum(size for size in sizes.values() if size > 10 * MIB) > 0.95 * sum(sizes.values())


def test_without_a_cache(no_leaks: LeakCheck, model: Path, stock_lib: Path, network: Network, stack: ExitStack) -> None:
    peers = [*pairs(stack, stock_lib, model, network, None), SocketPairPeer(model, populate=True, network=network)]
    stack.callback(peers[-1].close)
    taken = alternate(peers, NBYTES, rounds=2, warmup=1)
    assert {name: len(took) for name, took in taken.seconds.items()} == {peer.name: 2 for peer in peers}
    assert min(min(took) for took in taken.seconds.values()) > 0
    (profile, *_) = peers[0].profiles
    assert (profile["set_tensor_bytes"], profile["bytes_saved"], profile["misses"]) == (NBYTES, 0, 0)
    assert split(peers[0].profiles)["span"] > 0
    summary = taken.summary(peers[0].name)
    assert set(summary["times_as_fast_as"]) == {peer.name for peer in peers[1:]}
    stack.close()


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("iperf3", "" if shutil.which("iperf3") else "iperf3 is not installed"),
        ("gloo", "" if importlib.util.find_spec("torch") else "torch is not installed"),
    ],
)
def test_peers_that_are_there_where_they_are_installed(
    no_leaks: LeakCheck, model: Path, network: Network, stack: ExitStack, name: str, missing: str
) -> None:
    factories = {
        "iperf3": lambda: IperfPeer(NBYTES, network=network),
        "gloo": lambda: GlooPeer(model, network=network),
    }
    peers, absent = start(stack, {name: factories[name]})
    if missing:
        # Nothing else may keep it away, and nothing may stand in for it.
        assert (peers, absent) == ([], {name: missing})
    else:
        assert absent == {}
        taken = alternate(peers, NBYTES, rounds=2, warmup=1)
        assert len(taken.seconds[name]) == 2
        assert min(taken.seconds[name]) > 0
        if network is not LOOPBACK:
            assert NBYTES * 8 / min(taken.seconds[name]) < 1.1 * RATE
    stack.close()


def test_an_iperf3_that_does_not_start_is_absent_with_what_it_said(
    no_leaks: LeakCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in, as the real one starts."""
    command = tmp_path / "iperf3"
    command.write_text("#!/bin/sh\necho no such thing here >&2; exit 1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(PeerAbsent, match="does not start: no such thing here"):
        IperfPeer(NBYTES)


def test_several_clients_share_a_server(no_leaks: LeakCheck, model: Path, stack: ExitStack, tmp_path: Path) -> None:
    serving = Serving(cache=tmp_path)
    stack.callback(serving.close)
    clients = [
        PushingPeer(model, server=serving, name=str(threads), options={"cache": "auto", "threads": threads})
        for threads in (1, 2)
    ]
    for client in clients:
        stack.callback(client.close)
        assert client.round() > 0
    assert [(client.profiles[0]["hits"], client.profiles[0]["misses"]) for client in clients] == [(0, 2), (2, 0)]
    stack.close()


def test_the_plain_way_is_never_the_optimised_one_by_another_name(
    no_leaks: LeakCheck, model: Path, stack: ExitStack
) -> None:
    if "optimized" not in inspect.signature(weightwire.connect).parameters:
        with pytest.raises(PeerAbsent, match="no plain way"):
            Serving(plain=True)
        return
    serving = Serving(plain=True)
    stack.callback(serving.close)
    for plain in (True, False):
        client = PushingPeer(model, server=serving, plain=plain, options={"cache": "never"})
        stack.callback(client.close)
        client.round()
        assert client.optimized == [not plain]
    stack.close()


@pytest.mark.parametrize("state", [State.COLD, State.WARM, State.INDEX])
def test_with_a_cache(
    no_leaks: LeakCheck,
    model: Path,
    stock_lib: Path,
    network: Network,
    stack: ExitStack,
    tmp_path: Path,
    state: State,
) -> None:
    expected = full_cache(model)
    index = tmp_path / "index"
    index.mkdir()
    used = str(index / "index.sqlite3")
    ours, stock = pairs(stack, stock_lib, model, network, tmp_path, used)
    for pair, name in ((ours, "weightwire"), (stock, "stock")):
        peer = CachedPeer(pair, {tmp_path / name: expected}, state, index if pair is ours else None)
        for _ in range(2):
            peer.prepare()
            assert entries(tmp_path / name) == ({} if state is State.COLD else expected)
            settle(NBYTES)
            assert peer.round() > 0
            peer.finish()
            assert entries(tmp_path / name) == expected
        assert len(peer.late) == (2 if state is State.COLD else 0)
    expected_counts = {State.COLD: (0, 2, 0), State.WARM: (2, 0, 0), State.INDEX: (2, 0, 2)}
    counts = {(profile["hits"], profile["misses"], profile["hashes_known"]) for profile in ours.profiles[-2:]}
    assert counts == {expected_counts[state]}
    # Filling it first was a round too.
    assert len(ours.processor) == len(stock.processor) == (3 if state.warm else 2)
    stack.close()


def test_a_cache_that_was_not_used_is_noticed(model: Path, tmp_path: Path) -> None:
    class Rewrites:
        name = "one that writes every time"

        def round(self) -> float:
            empty(tmp_path)
            for entry, size in full_cache(model).items():
                (tmp_path / entry).write_bytes(bytes(size))
            return 1.0

        def close(self) -> None:
            pass

    peer = CachedPeer(Rewrites(), {tmp_path: full_cache(model)}, State.WARM)
    peer.prepare()
    peer.round()
    with pytest.raises(RuntimeError, match="wrote entries"):
        peer.finish()


def test_the_network_is_as_fast_as_it_says_and_no_faster(
    no_leaks: LeakCheck, model: Path, shaped: Network, stack: ExitStack
) -> None:
    """A token bucket lets nothing through early; how late it is depends on the machine."""
    peer = SocketPairPeer(model, populate=False, network=shaped)
    stack.callback(peer.close)
    assert peer.nbytes * 8 / peer.round() < 1.1 * RATE
    stack.close()


def namespaces() -> set[str]:
    """Every network namespace that some process is in, and that this user may see."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns" / "net"))
        except OSError:
            continue
    return found


def test_nothing_is_left_of_a_network_whose_user_was_killed(shaped: Network) -> None:
    script = (
        "import json, os, sys; from harness.network import shaped_network\n"
        "with shaped_network() as network:\n"
        "    print(json.dumps([n[2] for n in (network.at_server, network.at_client)]), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        assert child.stdout is not None
        holders = json.loads(child.stdout.readline())
        made = {os.readlink(f"/proc/{pid}/ns/net") for pid in holders}
        assert len(made) == 2
        assert made <= namespaces()
        child.kill()
    assert eventually(lambda: not made & namespaces())


def test_the_file_system_is_named(tmp_path: Path) -> None:
    assert file_system(tmp_path).isidentifier()
    assert file_system(Path("/proc")) == "proc"


def test_ratios_are_of_rounds_side_by_side() -> None:
    taken = Rounds(1 << 30)
    for ours, theirs in ((1.0, 3.0), (2.0, 4.0), (10.0, 50.0)):
        taken.add("ours", ours)
        taken.add("theirs", theirs)
    assert taken.ratio("ours", "theirs") == 3.0
    assert taken.median("ours") == 2.0
    summary = taken.summary("ours")
    assert summary["subject"] == "ours"
    assert summary["times_as_fast_as"] == {"theirs": 3.0}
    assert summary["quartiles_times_as_fast_as"] == {"theirs": [2.5, 4.0]}
    assert summary["quartiles_seconds"]["ours"] == [1.5, 6.0]
    assert Rounds(0, {"ours": [1.0], "theirs": [2.0]}).summary("ours")["gib_per_s"] == {}
