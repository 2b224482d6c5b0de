"""What goes over the wire does not depend on how many threads hash, recorded between our client and a stock server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from interop.proxy import RecordingProxy, traffic
from safetensors.numpy import save_file
from support.awkward import MIB
from support.leaks import LeakCheck
from support.shards import write_shards
from support.stock import StockServer

import weightwire
from weightwire import fnv1a64
from weightwire.wire import Command

pytestmark = [pytest.mark.interop]

THREADS = (0, 1, 2, 32)
#: More large tensors than are asked about at once, of sizes that take unlike times to hash; small ones in between.
SIZES = {
    f"{'large' if number % 3 else 'small'}.{number:02}": 10 * MIB + 1 + (number * 7919 % 5) * MIB // 2
    if number % 3
    else 100 + number
    for number in range(21)
}
LARGE = [name for name in SIZES if name.startswith("large")]
#: Hits, misses and bad hits. Two large ones hold what another holds, so that even a cold cache has them by their turn.
COUNTS = {"cold": (2, 12, 0), "partly": (7, 6, 1), "warm": (14, 0, 0)}


@pytest.fixture(scope="module")
def tensors() -> dict[str, bytes]:
    random = np.random.default_rng(7)
    made = {name: random.bytes(size) for name, size in SIZES.items()}
    # The same bytes three times: a later one is a hit if it is asked for once the first is there, and no sooner.
    made["large.19"] = made["large.20"] = made["large.02"]
    return made


@pytest.fixture(scope="module")
def model(tensors: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "traffic.safetensors"
    save_file({name: np.frombuffer(data, np.uint8) for name, data in tensors.items()}, path)
    return path


@pytest.fixture(scope="module")
def shards(tensors: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tensors in three files; any of them is the model."""
    files = write_shards(tmp_path_factory.mktemp("shards"), tensors, 7)
    assert len(files) == 3
    return files[1]


def fill(folder: Path, tensors: dict[str, bytes], state: str) -> Path:
    """A cache with nothing in it, with a part of the model (one entry cut short), or with all of it."""
    folder.mkdir()
    for number, name in enumerate(LARGE):
        if state == "warm" or (state == "partly" and number % 2):
            data = tensors[name]
            (folder / f"{fnv1a64(data):016x}").write_bytes(data[:-1] if state == "partly" and number == 5 else data)
    return folder


def record(server: StockServer, model: object, **options: object) -> tuple[list[tuple[object, ...]], tuple[int, ...]]:
    """Push once; what went by, and the hits, misses and bad hits."""
    with RecordingProxy(server.endpoint, digests=True) as proxy:
        with weightwire.connect(proxy.endpoint, timeout=60) as connection:
            summary = connection.push(model, cache="always", **options).summary
        sent = proxy.sent
    assert {request.connection for request in proxy.requests} == {0}
    seen = traffic(proxy)
    assert sent == sum(9 + size for _, size, _, _ in seen)
    return seen, (summary.hits, summary.misses, summary.corrupt_hits)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("source", ["file", "arrays", "shards", "blocks"])
@pytest.mark.parametrize("state", ["cold", "partly", "warm"])
def test_any_number_of_threads_sends_the_same(
    no_leaks: LeakCheck,
    stock_server: Callable[..., StockServer],
    tensors: dict[str, bytes],
    model: Path,
    shards: Path,
    tmp_path: Path,
    state: str,
    source: str,
) -> None:
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in tensors.items()}
    pushed: object = {"arrays": arrays, "shards": shards}.get(source, model)
    read = "read" if source == "blocks" else "auto"
    recorded = []
    for threads in THREADS if source in ("file", "arrays") else (0, 2):
        server = stock_server(cache=fill(tmp_path / f"{threads}", tensors, state))
        recorded.append(record(server, pushed, threads=threads, index=False, read=read))
        server.stop()
    if source == "file":
        # What the index knows need not be hashed, and is asked for at the same place; the first push teaches it.
        for turn in ("unknown", "known"):
            server = stock_server(cache=fill(tmp_path / turn, tensors, state))
            recorded.append(record(server, pushed, threads=2, index=tmp_path / "index.sqlite3"))
            server.stop()
    seen, counted = recorded[0]
    asked = [tensor.label for command, _, tensor, _ in seen if command is Command.SET_TENSOR_HASH]
    assert set(asked) == set(LARGE)
    assert counted == COUNTS[state]
    for other, counts in recorded[1:]:
        assert counts == counted
        for position, (one, two) in enumerate(zip(seen, other, strict=True)):
            assert one == two, position
