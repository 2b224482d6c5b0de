"""``--transport`` of the verbs that have it. On the stand-in libibverbs, where a server is in the same process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fakeverbs import FakeVerbs
from support.leaks import LeakCheck

import weightwire

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


def test_a_server_without_a_device(invoke, fake: FakeVerbs) -> None:
    fake.set("devices", 0)
    invoke("serve", "--port", "0", "--transport", "rdma").failed(3, "this machine has no RDMA device")


def test_the_demo_requires_it_of_both_ends(spawn, finish) -> None:
    ran = finish(spawn("demo", "--size", "1MiB", "--transport", "tcp", "--json", "-q"))
    assert ran.code == 0
    assert json.loads(ran.out)["transport"]["reason"] == "TCP was asked for"


@pytest.mark.parametrize("verb", ["push", "info", "serve", "demo"])
def test_a_transport_that_is_none(invoke, verb: str) -> None:
    words = {"push": ("m.gguf", "h:1"), "info": ("h:1",)}.get(verb, ())
    invoke(verb, *words, "--transport", "udp").failed(2, "--transport")
