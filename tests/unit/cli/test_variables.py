"""Which variables each verb reads: those of its own options, and those for every verb (docs/configuration.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import weightwire
from weightwire.cli.root import root

CONFIGURATION = Path(__file__).parents[3] / "docs" / "configuration.md"
CONNECTION = {"WEIGHTWIRE_TIMEOUT", "WEIGHTWIRE_PROTOCOL", "WEIGHTWIRE_TRANSPORT"}
CHOICE = {"GGML_RPC_LOAD_OPT", "GGML_RPC_LOADPROF"}
HASHING = {"GGML_RPC_LOAD_THREADS", "WEIGHTWIRE_IN_FLIGHT"}
SERVING = {
    *("HOST", "PORT", "CACHE", "CACHE_VERIFY", "PROTOCOL", "RETAIN", "MEMORY", "TRANSPORT"),
    *("METRICS_PORT", "METRICS_HOST"),
}
OWN: dict[str, set[str]] = {
    "serve": {f"WEIGHTWIRE_SERVER_{name}" for name in SERVING} | CHOICE,
    "push": CONNECTION | CHOICE | HASHING | {"WEIGHTWIRE_CACHE"},
    "warm": CONNECTION | CHOICE | HASHING,
    "demo": CHOICE | {"WEIGHTWIRE_TIMEOUT", "WEIGHTWIRE_TRANSPORT"},
    "seed": {"GGML_RPC_LOAD_THREADS"},
    "cache list": set(),
    "cache verify": {"GGML_RPC_LOAD_THREADS"},
    "cache prune": set(),
    "cache stat": set(),
    "hash": set(),
    "info": CONNECTION,
    "info a model": set(),
    "bench": CONNECTION | {"GGML_RPC_LOAD_OPT"},
}
EVERY = set().union(*OWN.values())
ELSEWHERE = {
    *("WEIGHTWIRE_LOG", "WEIGHTWIRE_DEBUG", "WEIGHTWIRE_HASH", "WEIGHTWIRE_LIBIBVERBS", "WEIGHTWIRE_INDEX"),
    *("GGML_RPC_NO_RDMA", "GGML_RPC_LOAD", "LLAMA_CACHE", "XDG_CACHE_HOME", "NO_COLOR", "TMPDIR"),
}
"""Those for every verb and of the system, and the beginning of two names."""


def test_the_lists_are_whole() -> None:
    named = set(re.findall(r"`((?:WEIGHTWIRE|GGML_RPC)_[A-Z_]+[A-Z])`", CONFIGURATION.read_text(encoding="utf-8")))
    assert {name for name in named if name not in ELSEWHERE} == EVERY
    group = root.commands["cache"]
    assert isinstance(group, click.Group)
    verbs = set(root.commands) - {"cache"} | {f"cache {verb}" for verb in group.commands}
    assert verbs == set(OWN) - {"info a model"}


@pytest.fixture
def words(tmp_path: Path, small_gguf: Path) -> Iterator[dict[str, tuple[str, ...]]]:
    """A call of each verb that ends by itself and succeeds."""
    folder = tmp_path / "cache"
    folder.mkdir()
    model, cache = str(small_gguf), ("--cache", str(folder))
    with weightwire.Server(port=0, cache=tmp_path / "server", optimized=True) as server:
        endpoint = server.endpoints[0]
        yield {
            "push": ("push", model, endpoint, "-q"),
            "warm": ("warm", model, endpoint, "-q"),
            "seed": ("seed", model, *cache, "-q"),
            "cache list": ("cache", "list", *cache),
            "cache verify": ("cache", "verify", *cache, "-q"),
            "cache prune": ("cache", "prune", *cache, "--max-size", "0"),
            "cache stat": ("cache", "stat", *cache),
            "hash": ("hash", model, "--include", "output_norm", "-q"),
            "info": ("info", endpoint),
            "info a model": ("info", model),
            "bench": ("bench", endpoint, "--size", "1MiB", "--rounds", "1", "-q"),
        }


@pytest.mark.parametrize("verb", sorted(set(OWN) - {"serve", "demo"}))
def test_no_others_are_read(invoke, words: dict[str, tuple[str, ...]], verb: str) -> None:
    others = dict.fromkeys(EVERY - OWN[verb], "\t no such thing \t")
    ran = invoke(*words[verb], **others)
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("verb", ["serve", "demo"])
def test_no_others_are_read_by_what_starts_a_server(spawn, finish, verb: str) -> None:
    others = dict.fromkeys(EVERY - OWN[verb], "\t no such thing \t")
    if verb == "demo":
        ran = finish(spawn("demo", "--size", "1MiB", "-q", environ=others))
        assert (ran.code, ran.err) == (0, "")
        return
    process = spawn("serve", "--port", "0", environ=others)
    assert process.stdout is not None
    assert "127.0.0.1" in process.stdout.readline()
    process.terminate()
    assert finish(process).code == 0


@pytest.mark.parametrize("verb", sorted(set(OWN) - {"serve", "demo"}))
def test_its_own_are_read(invoke, words: dict[str, tuple[str, ...]], verb: str) -> None:
    for name in OWN[verb]:
        invoke(*words[verb], **{name: "\t no such thing \t"}).failed(2, name)


@pytest.mark.parametrize("verb", ["push", "demo"])
def test_a_profile_is_printed_by_those_who_have_the_option(
    invoke, spawn, finish, words: dict[str, tuple[str, ...]], verb: str
) -> None:
    if verb == "demo":
        ran = finish(spawn("demo", "--size", "1MiB", "-q", environ={"GGML_RPC_LOADPROF": "1"}))
    else:
        ran = invoke(*words[verb], GGML_RPC_LOADPROF="1")
    assert ran.code == 0
    assert "client, connection with 127.0.0.1:" in ran.err


@pytest.mark.parametrize("verb", ["info", "bench"])
def test_and_not_by_others(invoke, words: dict[str, tuple[str, ...]], verb: str) -> None:
    assert invoke(*words[verb], GGML_RPC_LOADPROF="1").err == ""
