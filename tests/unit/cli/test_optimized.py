"""``--no-optimized`` of the verbs that have it, and the variable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import weightwire
from weightwire.client.plain import PlainSender

PLAIN = {"GGML_RPC_LOAD_OPT": "0"}


@pytest.mark.parametrize(
    ("options", "environ", "optimized"),
    [
        ((), {}, True),
        (("--no-optimized",), {}, False),
        ((), PLAIN, False),
        (("--optimized",), PLAIN, True),
    ],
)
def test_push_and_warm_say_which(
    invoke, tmp_path: Path, small_gguf: Path, options: tuple[str, ...], environ: dict[str, str], optimized: bool
) -> None:
    with (
        weightwire.Server(port=0, cache=tmp_path, optimized=True) as server,
        weightwire.Server(port=0, optimized=False) as other,
    ):
        endpoint = server.endpoints[0]
        report = invoke("push", str(small_gguf), endpoint, "--verify", "--json", *options, **environ).json
        assert (report["optimized"], report["verified"]) == (optimized, True)
        assert invoke("warm", str(small_gguf), endpoint, "--json", *options, **environ).json["optimized"] is optimized
        endpoints = (endpoint, other.endpoints[0])
        both = invoke("push", str(small_gguf), *endpoints, "--json", *options, **environ).json
        assert [each["optimized"] for each in both["endpoints"]] == [optimized] * 2


def test_a_value_that_cannot_be_meant(invoke, small_gguf: Path) -> None:
    endpoint = "127.0.0.1:1"
    for verb in (
        ("push", str(small_gguf), endpoint),
        ("warm", str(small_gguf), endpoint),
        ("bench", endpoint),
        ("serve",),
    ):
        invoke(*verb, GGML_RPC_LOAD_OPT="maybe").failed(2, "GGML_RPC_LOAD_OPT", "'maybe' is neither 1 (on) nor 0 (off)")


@pytest.mark.parametrize(
    ("options", "environ", "optimized"),
    [((), {}, True), (("--no-optimized",), {}, False), ((), PLAIN, False), (("--optimized",), PLAIN, True)],
)
def test_bench_sends_so(
    invoke, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], environ: dict[str, str], optimized: bool
) -> None:
    plain: list[str] = []
    real = PlainSender.run

    def watched(self: PlainSender) -> None:
        plain.append("run")
        real(self)

    monkeypatch.setattr(PlainSender, "run", watched)
    with weightwire.Server(port=0, optimized=True) as server:
        words = ("bench", server.endpoints[0], "--size", "1MiB", "--rounds", "1", "--tensors", "large", "-q", *options)
        report = invoke(*words, "--json", **environ).json
        text = invoke(*words, **environ).out
    assert report["optimized"] is optimized
    assert ("the plain way" in text) is not optimized
    assert bool(plain) is not optimized


@pytest.mark.parametrize("by", ["option", "variable"])
def test_serve_says_which(spawn, finish, by: str) -> None:
    options, environ = (("--no-optimized",), {}) if by == "option" else ((), PLAIN)
    process = spawn("serve", "--port", "0", "--json", *options, environ=environ)
    assert process.stdout is not None
    announced = json.loads(process.stdout.readline())
    process.terminate()
    assert finish(process).code == 0
    assert announced["optimized"] is False


def test_both_ends_of_the_demo(spawn, finish) -> None:
    ran = finish(spawn("demo", "--size", "1MiB", "--no-optimized", "--json", "-q"))
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert (report["optimized"], report["verified"]) == (False, True)
