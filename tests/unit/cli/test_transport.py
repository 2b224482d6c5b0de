"""``--transport`` of the verbs that have it. On the stand-in libibverbs, where a server is in the same process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fakeverbs import FakeVerbs
from support.leaks import LeakCheck

import weightwire
from weightwire.cli import demo

RDMA = {"kind", "device", "gid", "send_depth", "reason", "registration"}


def test_push_and_info_over_rdma(invoke, fake: FakeVerbs, small_gguf: Path, no_leaks: LeakCheck) -> None:
    with weightwire.Server(port=0) as server:
        report = invoke("push", str(small_gguf), server.endpoints[0], "--verify", "--transport", "rdma", "--json").json
        text = invoke("push", str(small_gguf), server.endpoints[0]).out
        seen = invoke("info", server.endpoints[0], "--json").json
        told = invoke("info", server.endpoints[0]).out
    assert report["transport"].keys() >= RDMA
    assert (report["transport"]["kind"], report["transport"]["device"]) == ("rdma", "fake0")
    assert report["transport"]["registration"] == [{"send_slots": 8, "receive_slots": 24, "failed": "", "errno": 0}]
    assert report["profile"]["copied_bytes"] > report["bytes"]
    assert "(protocol 7.0.0, rdma on fake0)" in text
    assert seen["transport"].keys() == report["transport"].keys()
    assert "over rdma on fake0" in told


def test_the_variable_decides(invoke, fake: FakeVerbs, small_gguf: Path) -> None:
    with weightwire.Server(port=0) as server:
        report = invoke("info", server.endpoints[0], "--json", WEIGHTWIRE_TRANSPORT="tcp").json
        assert report["transport"]["reason"] == "TCP was asked for"
        over = invoke("info", server.endpoints[0], "--json", "--transport", "rdma", WEIGHTWIRE_TRANSPORT="tcp").json
        assert over["transport"]["kind"] == "rdma"
        invoke("info", server.endpoints[0], WEIGHTWIRE_TRANSPORT="udp").failed(2, "WEIGHTWIRE_TRANSPORT", "udp")
        # A model has no transport.
        assert invoke("info", str(small_gguf), WEIGHTWIRE_TRANSPORT="udp").code == 0


def test_required_and_not_to_be_had(invoke, server, small_gguf: Path) -> None:
    ran = invoke("push", str(small_gguf), server.endpoints[0], "--transport", "rdma")
    ran.failed(1, "RDMA cannot be used: GGML_RPC_NO_RDMA is set")
    error = invoke("push", str(small_gguf), server.endpoints[0], "--transport", "rdma", "--json").json["error"]
    assert (error["type"], error["reason"]) == ("RdmaUnavailable", "GGML_RPC_NO_RDMA is set")
    assert error["endpoint"] == server.endpoints[0]
    assert error["hint"]


def test_the_text_says_why_it_is_tcp(invoke, fake: FakeVerbs, small_gguf: Path) -> None:
    with weightwire.Server(port=0) as server:
        at = server.endpoints[0]
        for options, environ, reason in [
            (("--transport", "tcp"), {}, "TCP was asked for"),
            ((), {"GGML_RDMA_DEV": "nope"}, "there is no RDMA device 'nope', which GGML_RDMA_DEV names"),
            ((), {"GGML_RPC_NO_RDMA": "1"}, "GGML_RPC_NO_RDMA is set"),
        ]:
            assert f"because   {reason}\n" in invoke("info", at, *options, **environ).out
            assert f"\nover tcp: {reason}\n" in invoke("push", str(small_gguf), at, *options, **environ).out
        assert "because   GID 2 is the local address\n" in invoke("info", at).out
        assert "over tcp" not in invoke("push", str(small_gguf), at).out


def test_a_device_that_is_named_and_not_there_is_warned_of(invoke, fake: FakeVerbs) -> None:
    with weightwire.Server(port=0) as server:
        ran = invoke("info", server.endpoints[0], GGML_RDMA_DEV="nope")
        assert ran.code == 0
        assert "there is no RDMA device 'nope', which GGML_RDMA_DEV names" in ran.err
        assert "on TCP" not in invoke("info", server.endpoints[0], "--transport", "tcp", GGML_RDMA_DEV="nope").err


@pytest.mark.parametrize("value", ["abc", "-1", "1x", "256"])
def test_a_gid_that_is_none(invoke, fake: FakeVerbs, small_gguf: Path, value: str) -> None:
    with weightwire.Server(port=0) as server:
        at = server.endpoints[0]
        for words in (("info", at), ("push", str(small_gguf), at), ("serve", "--port", "0")):
            invoke(*words, GGML_RDMA_GID=value).failed(2, "GGML_RDMA_GID", value)
        invoke("demo", "--size", "1MiB", "--transport", "rdma", GGML_RDMA_GID=value).failed(2, "GGML_RDMA_GID", value)
        assert invoke("info", at, "--transport", "tcp", GGML_RDMA_GID=value).code == 0


def test_rdma_of_a_version_that_has_none(invoke) -> None:
    invoke("info", "127.0.0.1:1", "--transport", "rdma", "--protocol", "3.0").failed(2, "protocol 3.0 has no RDMA")


def test_a_server_without_a_device(invoke, fake: FakeVerbs) -> None:
    fake.set("devices", 0)
    invoke("serve", "--port", "0", "--transport", "rdma").failed(3, "this machine has no RDMA device")


@pytest.mark.parametrize(("setting", "reason"), [("devices", "no RDMA device"), ("port_state", "port 1 of fake0 is")])
def test_the_demo_without_a_device(invoke, fake: FakeVerbs, setting: str, reason: str) -> None:
    fake.set(setting, 0)
    ran = invoke("demo", "--size", "1MiB", "--transport", "rdma", "--json", "-q")
    ran.failed(3, reason)
    assert ran.json["error"]["type"] == "RdmaUnavailable"


def test_the_demo_over_rdma_listens_where_the_device_is(
    invoke, fake: FakeVerbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the loopback of IPv6, where the only GID of this device is."""
    for index in (1, 2):
        fake.gid(index, None)
    asked: list[tuple[str, tuple[str, ...]]] = []

    class Asked(Exception):
        pass

    def server(arguments: tuple[str, ...], *, host: str) -> None:
        asked.append((host, arguments))
        raise Asked

    monkeypatch.setattr(demo, "EmbeddedServer", server)
    invoke("demo", "--size", "1MiB", "--transport", "rdma", "-q")
    invoke("demo", "--size", "1MiB", "-q")
    assert asked == [
        ("::1", ("--transport", "rdma", "--optimized")),
        ("127.0.0.1", ("--transport", "auto", "--optimized")),
    ]


def test_the_demo_requires_it_of_both_ends(spawn, finish) -> None:
    ran = finish(spawn("demo", "--size", "1MiB", "--transport", "tcp", "--json", "-q"))
    assert ran.code == 0
    assert json.loads(ran.out)["transport"]["reason"] == "TCP was asked for"


@pytest.mark.parametrize("verb", ["push", "info", "serve", "demo"])
def test_a_transport_that_is_none(invoke, verb: str) -> None:
    words = {"push": ("m.gguf", "h:1"), "info": ("h:1",)}.get(verb, ())
    invoke(verb, *words, "--transport", "udp").failed(2, "--transport")
