"""``weightwire bench``: what it says, and how it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import weightwire

MIB = 1 << 20


def test_json(invoke: Callable, tmp_path: Path) -> None:
    with weightwire.Server(port=0, cache=tmp_path) as server:
        ran = invoke("bench", server.endpoints[0], "--size", "2MiB", "--rounds", "2", "--json", "-q")
    assert ran.code == 0
    assert ran.err == ""
    value = ran.json
    assert set(value) == {
        *("endpoint", "protocol", "optimized", "transport", "device", "free", "bytes", "rounds", "seconds"),
        *("latency", "uploads", "download", "cache"),
    }
    assert (value["bytes"], value["rounds"]) == (2 * MIB, 2)
    assert value["transport"]["kind"] == "tcp"
    assert set(value["uploads"]) == {"mix", "large", "small"}
    assert value["latency"]["p99_seconds"] >= value["latency"]["median_seconds"] > 0
    large = value["uploads"]["large"]
    assert large["gib_per_s"] == large["bytes"] / large["median_seconds"] / 2**30
    assert len(large["seconds"]) == 2
    assert all(each["split_seconds"]["span"] > 0 for each in value["uploads"].values())
    assert value["download"]["of"] == "large"
    assert "split_seconds" not in value["download"], "nobody has measured it"
    assert value["cache"]["per_s"] > 0


def test_for_people(invoke: Callable) -> None:
    with weightwire.Server(port=0, memory=8 * MIB) as server:
        ran = invoke("bench", server.endpoints[0], "--rounds", "1", "--tensors", "small", "--tensors", "mix")
    assert ran.code == 0
    first, *rest = ran.out.splitlines()
    assert first.startswith(f"measured {server.endpoints[0]} (protocol 7.0.0, tcp): 1 round,")
    assert [text.split()[0] for text in rest] == ["round", "small", "mix", "download", "cache"]
    assert "tensors/s" in rest[1]
    assert "GiB/s" in rest[2]
    assert "8.0 MiB free, so uploads are of 4.0 MiB instead of 1.0 GiB" in ran.err


def test_usage(invoke: Callable) -> None:
    invoke("bench").failed(2)
    invoke("bench", "127.0.0.1:1", "--size", "1KiB", "--timeout", "1").failed(1)
    invoke("bench", "127.0.0.1:1", "--rounds", "1", "--seconds", "1").failed(2, "--rounds and --seconds")
    invoke("bench", "127.0.0.1:1", "--rounds", "0").failed(2)
    invoke("bench", "127.0.0.1:1", "--tensors", "huge").failed(2)
    with weightwire.Server(port=0) as server:
        invoke("bench", server.endpoints[0], "--size", "1KiB").failed(2, "too few to measure")


def test_a_server_without_memory(invoke: Callable) -> None:
    with weightwire.Server(port=0, memory=MIB) as server:
        invoke("bench", server.endpoints[0], "--json").failed(1, "too little to measure with")


def test_ctrl_c(spawn: Callable, finish: Callable, gated: object) -> None:
    process = spawn("bench", gated.endpoint, "--size", "64MiB", "-q")
    assert gated.reached.wait(60)
    process.send_signal(signal.SIGINT)
    ran = finish(process)
    assert (ran.code, ran.out) == (130, "")
    assert ran.err == "weightwire: interrupted\n"
