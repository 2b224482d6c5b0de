"""A server filling tensors from its cache, beside a loop of reads of the same files into memory of the same kind.

The subject is asked for all entries at once, over loopback, and has a process of its own; its time includes the
requests and the answers. The peer reads the files one after the other on one thread with preadv(2), 4 MiB at a time,
into a fresh `HostRegion`: its pages are touched by the reads themselves. The second pair fills memory that has been
filled before, so that neither touches a fresh page. The entries are in the page cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness.rounds import Rounds, record, settle
from pytest_benchmark.fixture import BenchmarkFixture
from support.raw_client import RawClient

from weightwire import fnv1a64
from weightwire.cache import entry_name
from weightwire.transport.memory import HostRegion
from weightwire.wire import Command

NBYTES = 1 << 30
ROUNDS = 9
PIECE = 4 << 20


class Entries:
    """A cache directory with ``count`` entries, 1 GiB together."""

    def __init__(self, directory: Path, count: int) -> None:
        generator = np.random.default_rng(1)
        self.directory = directory
        self.nbytes = NBYTES // count
        self.hashes: list[int] = []
        for _ in range(count):
            payload = generator.integers(0, 256, self.nbytes, dtype=np.uint8)
            self.hashes.append(fnv1a64(payload))
            (directory / entry_name(self.hashes[-1])).write_bytes(payload)


class HitPeer:
    """`weightwire serve`, asked for every entry in one go."""

    def __init__(self, entries: Entries, verify: str) -> None:
        self._entries = entries
        command = (sys.executable, "-m", "weightwire", "serve", "--port", "0", "--json")
        self._server = subprocess.Popen(
            [*command, "--cache", str(entries.directory), "--cache-verify", verify, "--transport", "tcp"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        self._port = json.loads(self._server.stdout.readline())["port"]

    def rounds(self) -> tuple[float, float]:
        """Seconds to fill a buffer that has just been allocated, allocating included, and to fill it once more."""
        with RawClient(self._port) as client:
            started = time.perf_counter()
            at = client.allocate(NBYTES)
            asked = b""
            for index, content_hash in enumerate(self._entries.hashes):
                tensor = client.place(f"t{index}", self._entries.nbytes, at, index * self._entries.nbytes)
                body = client.dialect.encode_set_tensor_hash(tensor, 0, content_hash)
                asked += bytes((Command.SET_TENSOR_HASH,)) + len(body).to_bytes(8, "little") + body
            self._fill(client, asked)
            fresh = time.perf_counter() - started
            started = time.perf_counter()
            self._fill(client, asked)
            return fresh, time.perf_counter() - started

    def _fill(self, client: RawClient, asked: bytes) -> None:
        client.socket.sendall(asked)
        for _ in self._entries.hashes:
            assert client.answer() == b"\1"

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(10)


def read_all(entries: Entries) -> tuple[float, float]:
    """Seconds to read every file into a fresh region, mapping it included, and to read them once more."""
    took = []
    started = time.perf_counter()
    region = memoryview(HostRegion(NBYTES)).cast("B")
    for _ in range(2):
        for index, content_hash in enumerate(entries.hashes):
            fd = os.open(entries.directory / entry_name(content_hash), os.O_RDONLY)
            for done in range(0, entries.nbytes, PIECE):
                at = index * entries.nbytes + done
                want = min(PIECE, entries.nbytes - done)
                assert os.preadv(fd, [region[at : at + want]], done) == want
            os.close(fd)
        took.append(time.perf_counter() - started)
        started = time.perf_counter()
    return took[0], took[1]


@pytest.fixture(scope="module", params=[64, 16, 1], ids=["64 x 16 MiB", "16 x 64 MiB", "1 x 1 GiB"])
def entries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Entries]:
    directory = tmp_path_factory.mktemp("cache")
    yield Entries(directory, request.param)
    for path in directory.iterdir():
        path.unlink()


@pytest.mark.bench
@pytest.mark.timeout(900)
@pytest.mark.parametrize("verify", ["content", "size"])
def test_hits(benchmark: BenchmarkFixture, entries: Entries, verify: str) -> None:
    rounds = Rounds(NBYTES)
    peer = HitPeer(entries, verify)

    def read_loop() -> None:
        settle(NBYTES)
        fresh, touched = read_all(entries)
        rounds.add("read() into fresh memory", fresh)
        rounds.add("read() into touched memory", touched)
        settle(NBYTES)

    def fill() -> None:
        fresh, touched = peer.rounds()
        rounds.add("hits into fresh memory", fresh)
        rounds.add("hits into touched memory", touched)

    try:
        peer.rounds()
        read_all(entries)
        benchmark.pedantic(fill, setup=read_loop, rounds=ROUNDS)
    finally:
        peer.close()
    fresh = {name: rounds.seconds[name] for name in ("hits into fresh memory", "read() into fresh memory")}
    touched = rounds.ratio("hits into touched memory", "read() into touched memory")
    record(
        benchmark, Rounds(NBYTES, fresh), "hits into fresh memory", verify=verify, touched_memory_times_as_fast=touched
    )
    assert min(len(took) for took in rounds.seconds.values()) == ROUNDS
