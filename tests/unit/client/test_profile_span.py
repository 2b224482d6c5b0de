"""The stages of a profile add up to the time that passed, by a clock of the tests' own, on both sides of a push."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.fakeverbs import FakeVerbs
from support.leaks import LeakCheck, eventually
from support.profiles import Spans

from weightwire import LoadProfile, Server, connect, push_all, warm
from weightwire.server import HostMemory

MIB = 1 << 20
ARRAYS = {
    **{f"large.{i}": np.random.default_rng(i).integers(0, 256, 11 * MIB, np.uint8) for i in range(3)},
    **{f"small.{i}": np.full(100 + i, i, np.float32) for i in range(40)},
}
LEAST = 100_000_000
"""Nanoseconds: so much is loaded in each test that what a test asserts of it is no matter of rounding."""


class Slow(HostMemory):
    """Written to by calls that take a while."""

    def write(self, offset: int, view: memoryview) -> None:
        time.sleep(0.01)
        super().write(offset, view)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    return Spans(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(ARRAYS, path)
    return path


def push_in_turn(server: Server, found: list[LoadProfile], file: Path, spans: Spans, **options: Any) -> None:
    """Cold, warm and without the cache, until enough has been loaded; over a connection for each, and with hits not
    looked at: what a server allocates and reads back between is within its span and in none of the span's stages.
    """
    read, number, loaded = options.pop("read", "auto"), 0, 0
    while loaded < LEAST or number < 3:
        with connect(server.endpoints[0], timeout=60, **options) as connection:
            profile = connection.push(
                file, index=False, verify=number == 0, cache="never" if number % 3 == 2 else "auto", read=read
            ).summary.profile
            spans.check(profile, spans.of("client")[-1])
        number += 1
        assert eventually(lambda count=number: len(found) == count)  # type: ignore[misc]
        spans.check(found[-1], spans.of("server")[-1])
        loaded += min(profile.span_ns, found[-1].span_ns)
    assert len(spans.of("client")) == len(spans.of("server")) == number


@pytest.mark.parametrize("hook", [False, True], ids=["memory", "hook"])
@pytest.mark.parametrize("optimized", [True, False], ids=["optimized", "plain"])
@pytest.mark.parametrize("read", ["auto", "read"])
def test_over_tcp(
    spans: Spans, no_leaks: LeakCheck, tmp_path: Path, file: Path, hook: bool, optimized: bool, read: str
) -> None:
    found: list[LoadProfile] = []
    destination = Slow if hook else None
    with Server(
        port=0, cache=tmp_path / "cache", destination=destination, optimized=optimized, on_profile=found.append
    ) as server:
        push_in_turn(server, found, file, spans, optimized=optimized, read=read)


def test_over_rdma(spans: Spans, fake: FakeVerbs, no_leaks: LeakCheck, tmp_path: Path, file: Path) -> None:
    found: list[LoadProfile] = []
    with Server(port=0, cache=tmp_path / "cache", on_profile=found.append) as server:
        push_in_turn(server, found, file, spans, transport="rdma")
    assert {profile.transport for profile in found} == {"rdma"}


def test_several_pushes_over_one_connection(spans: Spans, no_leaks: LeakCheck, tmp_path: Path, file: Path) -> None:
    with Server(port=0, cache=tmp_path / "cache") as server, connect(server.endpoints[0]) as connection:
        for number in range(1, 4):
            profile = connection.push(file, cache="always", verify=True, index=False).summary.profile
            (stretches,) = spans.of("client")
            assert len(stretches) == number
            spans.check(profile, stretches[-1:])
            time.sleep(0.05)
        spans.check(connection.profile, stretches)


def test_to_several_servers(spans: Spans, no_leaks: LeakCheck, tmp_path: Path, file: Path) -> None:
    with Server(port=0, cache=tmp_path / "cache") as one, Server(port=0, destination=Slow) as other:
        endpoints = [one.endpoints[0], other.endpoints[0]]
        with push_all(file, endpoints, index=False, optimized=True) as pushed:
            profiles = [each.result.summary.profile for each in pushed if each.result is not None]
            by_client = spans.of("client")
            assert len(profiles) == len(by_client) == 2
            # Who began first is not known, but the slow one took longer.
            profiles.sort(key=lambda profile: profile.span_ns)
            by_client.sort(key=lambda stretches: stretches[0].mark[1] - stretches[0].begin[0])  # type: ignore[index]
            for profile, stretches in zip(profiles, by_client, strict=True):
                spans.check(profile, stretches)


def test_warming(spans: Spans, no_leaks: LeakCheck, tmp_path: Path, file: Path) -> None:
    with Server(port=0, cache=tmp_path / "cache") as server:
        for _ in range(2):
            (warmed,) = warm(file, server.endpoints[0], index=False)
            assert warmed.summary is not None
            spans.check(warmed.summary.profile, spans.of("client")[-1])
