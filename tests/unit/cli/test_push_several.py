"""``weightwire push`` to several servers at once."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightwire

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def pair() -> Iterator[list[weightwire.Server]]:
    """Two servers that keep what they get."""
    with weightwire.Server(port=0, retain="process") as one, weightwire.Server(port=0, retain="process") as other:
        yield [one, other]


def test_several_servers_each_with_its_layers(invoke, pair, small_gguf: Path) -> None:
    endpoints = [server.endpoints[0] for server in pair]
    words = ("push", str(small_gguf), *endpoints, "--include", "ffn_", "--verify")
    ran = invoke(*words, "--layers", "0-1", "--layers", "2-3", "--json")
    assert (ran.code, ran.err) == (0, "")
    report = ran.json
    assert set(report) == {"endpoints", "totals"}
    assert all(set(each) >= {"endpoint", "transport", "profile"} and each["verified"] for each in report["endpoints"])
    assert [each["endpoint"] for each in report["endpoints"]] == endpoints
    for server, blocks in zip(pair, ((0, 1), (2, 3)), strict=True):
        assert sorted(server.tensors) == sorted(
            f"blk.{block}.ffn_{part}.weight" for block in blocks for part in ("gate", "up", "down")
        )
    totals = report["totals"]
    assert totals["tensors"] == 12
    assert totals["failed"] == 0
    for name in ("bytes", "sent", "hits", "misses"):
        assert totals[name] == sum(each[name] for each in report["endpoints"])
    assert totals["seconds"] >= max(each["seconds"] for each in report["endpoints"])


def test_several_servers_as_text(invoke, pair, small_gguf: Path) -> None:
    ran = invoke("push", str(small_gguf), *(server.endpoints[0] for server in pair))
    assert ran.code == 0
    assert ran.out.count("pushed 876 tensors") == 2
    assert all(server.endpoints[0] in ran.out for server in pair)
    assert all(len(server.tensors) == 876 for server in pair)


def test_one_of_several_that_fails_stops_none_and_is_the_exit_code(
    invoke, server, nowhere: str, liar: str, small_gguf: Path
) -> None:
    words = ("push", str(small_gguf), nowhere, server.endpoints[0])
    ran = invoke(*words, "--json").failed(1, nowhere)
    failed, done = ran.json["endpoints"]
    assert failed["endpoint"] == nowhere
    assert failed["error"]["type"] == "TransportError"
    assert failed["error"]["exit_code"] == 1
    assert done["tensors"] == ran.json["totals"]["tensors"] == len(server.tensors) == 876
    assert ran.json["totals"]["failed"] == 1
    text = invoke(*words).failed(1, nowhere)
    assert text.out.count("pushed 876 tensors") == 1
    ran = invoke(*words, liar, "--verify", "--json")
    assert ran.code == 4, "the worst of 1, 0 and 4"
    assert [each.get("error", {}).get("exit_code", 0) for each in ran.json["endpoints"]] == [1, 0, 4]


def test_ctrl_c_ends_all_of_them(spawn, finish, gated, server, small_gguf: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, and never answers HELLO
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        process = spawn("push", str(small_gguf), gated.endpoint, server.endpoints[0], mute, "-q", "--timeout", "50")
        assert gated.reached.wait(60)
        process.send_signal(signal.SIGINT)
        ran = finish(process)
    assert ran.code == 130
    assert ran.err == "weightwire: interrupted\n"
    assert ran.out == ""


def test_progress_of_several_is_their_sum(spawn, finish, gated, server, small_gguf: Path) -> None:
    process = spawn("push", str(small_gguf), gated.endpoint, server.endpoints[0])
    line = process.stderr.readline()
    assert re.fullmatch(r"pushing: +\d+ %, .* of 32\.0 MiB, \d+\.\d\d GiB/s.*\n", line)
    gated.opened.set()
    assert finish(process).code == 0
