"""`bench`: what it measures, what it leaves on a server, and how it fails."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.leaks import LeakCheck, eventually

import weightwire
from weightwire.client import BenchLatency, BenchTransfer, bench
from weightwire.errors import AllocationError, ConfigError, IntegrityError, PeerClosed

MIB = 1 << 20


def test_what_it_measures(no_leaks: LeakCheck, tmp_path: Path) -> None:
    with weightwire.Server(port=0, cache=tmp_path) as server, weightwire.connect(server.endpoints[0]) as connection:
        before = connection.device_memory()
        result = bench(connection, nbytes=12 * MIB, rounds=2)
        assert connection.device_memory()[0] == before[0]  # all of it was given back
    assert (result.rounds, result.bytes, result.free) == (2, 12 * MIB, before[0])
    assert list(result.uploads) == ["mix", "large", "small"]
    mix, large, small = result.uploads.values()
    assert (large.tensors, large.bytes, large.largest) == (1, 12 * MIB, 12 * MIB)
    assert (small.tensors, small.bytes, small.largest) == (12 * 256, 12 * MIB, 4096)
    assert mix.tensors == 876
    assert 0.99 * 12 * MIB < mix.bytes <= 12 * MIB
    for transfer in (mix, large, small):
        assert len(transfer.seconds) == len(transfer.profiles) == 2
        assert min(profile.span_ns for profile in transfer.profiles) > 0
        assert min(transfer.seconds) > 0
    assert (result.download.kind, result.download.bytes, len(result.download.seconds)) == ("large", 12 * MIB, 2)
    assert 1 <= len(result.latency.seconds) <= 200
    assert result.questions is not None
    assert result.questions.count > 0
    values = result.as_dict()
    assert values["uploads"]["small"]["tensors_per_s"] == small.tensors / small.median
    assert values["uploads"]["large"]["split_seconds"]["span"] > 0
    assert values["cache"]["questions"] == result.questions.count


def test_what_was_not_measured_is_absent() -> None:
    with weightwire.Server(port=0) as server, weightwire.connect(server.endpoints[0], profile=False) as connection:
        result = bench(connection, nbytes=MIB, rounds=2, tensors=["large"])
    large = result.uploads["large"]
    assert "split_seconds" not in large.as_dict()
    measured = dataclasses.replace(large.profiles[0], measured=True)
    assert "split_seconds" in dataclasses.replace(large, profiles=(measured,)).as_dict()
    assert "split_seconds" not in dataclasses.replace(large, profiles=(measured, large.profiles[1])).as_dict()
    assert result.as_dict()["uploads"]["large"]["median_seconds"] > 0


@pytest.mark.parametrize("protocol", ["1.0.0", "5.0.0", "6.0.0", "7.0.0", "8.0.0"])
def test_no_cache_is_filled(tmp_path: Path, protocol: str) -> None:
    with (
        weightwire.Server(port=0, cache=tmp_path, protocol=protocol) as server,
        weightwire.connect(server.endpoints[0]) as connection,
    ):
        result = bench(connection, nbytes=24 * MIB, rounds=1, tensors=["large", "mix"])
        large = result.uploads["large"]
        assert large.bytes == 24 * MIB
        # Up to 6.0 everything longer than 10 MiB would be kept.
        assert large.largest == (24 * MIB if connection.dialect.cache_flag else 10 * MIB)
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_without_a_cache_none_is_asked() -> None:
    with weightwire.Server(port=0) as server, weightwire.connect(server.endpoints[0]) as connection:
        result = bench(connection, nbytes=MIB, rounds=1, tensors=["small"])
    assert result.questions is None
    assert result.as_dict()["cache"] is None
    assert result.download.kind == "small"
    assert result.download.tensors == 256


def test_it_ends_with_its_time() -> None:
    with weightwire.Server(port=0) as server, weightwire.connect(server.endpoints[0]) as connection:
        assert bench(connection, nbytes=MIB, seconds=1e-6, tensors=["large"]).rounds == 1
        several = bench(connection, nbytes=MIB, seconds=0.5, tensors=["large"])
    assert several.seconds >= 0.5
    assert len(several.uploads["large"].seconds) == several.rounds


def test_a_server_with_little_memory_gets_less() -> None:
    with weightwire.Server(port=0, memory=16 * MIB) as server, weightwire.connect(server.endpoints[0]) as connection:
        result = bench(connection, nbytes=1 << 30, rounds=1)
        assert result.free == connection.device_memory()[0] == 16 * MIB
    assert result.bytes == 8 * MIB
    assert max(transfer.bytes for transfer in result.uploads.values()) == 8 * MIB


def test_a_server_without_memory() -> None:
    with weightwire.Server(port=0, memory=MIB) as server, weightwire.connect(server.endpoints[0]) as connection:
        with pytest.raises(AllocationError, match="too little to measure") as caught:
            bench(connection, nbytes=MIB)
        assert caught.value.hint
        assert not connection.closed


@pytest.mark.parametrize(
    "wrong",
    [
        {"nbytes": MIB - 1}, {"nbytes": 1.5}, {"rounds": 0}, {"rounds": 10_001}, {"seconds": 0.0},
        {"seconds": float("nan")}, {"seconds": "3"}, {"seconds": None}, {"seconds": True}, {"seconds": 10**400},
        {"tensors": []}, {"tensors": ["huge"]}, {"tensors": "huge"}, {"tensors": 5}, {"tensors": [["mix"]]},
        {"device": 1},
    ],
)  # fmt: skip
def test_arguments(wrong: dict[str, object]) -> None:
    with weightwire.Server(port=0) as server, weightwire.connect(server.endpoints[0]) as connection:
        with pytest.raises(ConfigError):
            bench(connection, **{"nbytes": MIB, **wrong})
        assert not connection.closed


class Forgets(weightwire.Destination):
    """Memory that holds nothing."""

    def write(self, offset: int, view: memoryview) -> None:
        pass

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = bytes(view.nbytes)


def test_a_server_that_does_not_keep_what_it_gets_is_not_measured() -> None:
    with (
        weightwire.Server(port=0, destination=lambda nbytes, device: Forgets(nbytes)) as server,
        weightwire.connect(server.endpoints[0]) as connection,
    ):
        before = connection.device_memory()
        with pytest.raises(IntegrityError, match="not those sent"):
            bench(connection, nbytes=MIB, rounds=1)
        assert connection.device_memory() == before


def test_a_server_that_leaves(no_leaks: LeakCheck) -> None:
    gone: list[weightwire.Server] = []

    class Leaves(Forgets):
        def write(self, offset: int, view: memoryview) -> None:
            gone[0].close(timeout=0)

    with weightwire.Server(port=0, destination=lambda nbytes, device: Leaves(nbytes)) as server:
        gone.append(server)
        with weightwire.connect(server.endpoints[0]) as connection:
            with pytest.raises((PeerClosed, weightwire.errors.TransportError)):
                bench(connection, nbytes=64 * MIB, rounds=1)
            assert eventually(lambda: connection.closed)


def test_latency_and_quartiles() -> None:
    latency = BenchLatency(tuple(range(1, 201)))
    assert (latency.median, latency.p99) == (100.5, 198)
    assert (BenchLatency((3.0,)).median, BenchLatency((3.0,)).p99) == (3.0, 3.0)
    transfer = BenchTransfer("large", 1, 100, 100, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert (transfer.median, transfer.quartiles) == (3.0, (2.0, 4.0))
    assert BenchTransfer("large", 1, 100, 100, (2.0,)).quartiles == (2.0, 2.0)
