"""``drop_behind``: what of a model's file is in memory after a push, whoever else needs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.pagecache import cache, need_droppable, one_processor, share

import weightwire
from weightwire.client import push as pipeline
from weightwire.client.dropping import Claim

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def packets_are_free_once_received() -> Iterator[None]:
    with one_processor():
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file of 72 MiB, wholly in memory: large tensors and small ones between."""
    need_droppable(tmp_path)
    random = np.random.default_rng(3)
    tensors = {f"layers.{n}.w": random.integers(0, 255, 12 * MIB - n, dtype=np.uint8) for n in range(6)}
    tensors |= {f"small.{n}": np.full(1000, n, np.uint8) for n in range(30)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    cache(path)
    assert share(path) == 1
    return path


@pytest.fixture(params=["no cache", "cold", "warm"])
def server(request: pytest.FixtureRequest, tmp_path: Path, model: Path) -> Iterator[weightwire.Server]:
    """Servers that make a push read tensors to send them, to hash and send them, and to hash them only."""
    folder = None if request.param == "no cache" else tmp_path / "cache"
    with weightwire.Server(port=0, cache=folder) as running:
        if request.param == "warm":
            with weightwire.connect(running.endpoints[0]) as connection:
                connection.push(model, index=False)
        cache(model)
        yield running


@pytest.mark.parametrize("index", ["an index", "no index"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_push_leaves_nothing(server, model: Path, tmp_path: Path, index: str, verify: bool) -> None:
    chosen = tmp_path / "index.sqlite3" if index == "an index" else False
    with weightwire.connect(server.endpoints[0]) as connection:
        connection.push(model, drop_behind=True, verify=verify, index=chosen)
    assert share(model) < 0.05  # the header, before the first tensor


def test_by_default_all_of_it_stays(server, model: Path) -> None:
    with weightwire.connect(server.endpoints[0]) as connection:
        connection.push(model, index=False)
    assert share(model) == 1


def test_a_plain_read_is_dropped_as_well(server, model: Path) -> None:
    with weightwire.connect(server.endpoints[0]) as connection:
        connection.push(model, drop_behind=True, read="read", index=False)
    assert share(model) < 0.05


def test_it_goes_while_the_push_goes_on(tmp_path: Path, model: Path) -> None:
    seen: list[float] = []
    with weightwire.Server(port=0) as running, weightwire.connect(running.endpoints[0]) as connection:
        connection.push(model, drop_behind=True, progress=lambda name, done, total: seen.append(share(model)))
    assert min(seen) < 0.6, "half way, half of it is gone"
    assert seen == sorted(seen, reverse=True)


def test_several_servers_read_it_once_from_memory(tmp_path: Path, model: Path) -> None:
    seen: list[float] = []
    with weightwire.Server(port=0) as one, weightwire.Server(port=0) as other:
        targets = [one.endpoints[0], weightwire.Target(other.endpoints[0], layers="0-1"), "127.0.0.1:1"]
        with weightwire.push_all(
            model, targets, drop_behind=True, index=False, progress=lambda *_: seen.append(share(model))
        ) as pushed:
            assert [each.error is None for each in pushed] == [True, True, False]
    assert share(model) < 0.05
    assert seen == sorted(seen, reverse=True), "what was dropped was not read again"


def test_a_push_that_fails_lets_go(model: Path) -> None:
    def stop(name: str, done: int, total: int) -> None:
        if done > 20 * MIB:
            raise RuntimeError("enough")

    with (
        weightwire.Server(port=0) as running,
        weightwire.connect(running.endpoints[0]) as connection,
        pytest.raises(RuntimeError, match="enough"),
    ):
        connection.push(model, drop_behind=True, progress=stop)
    assert share(model, 28 * MIB, 44 * MIB) == 0, "what was not sent"
    assert share(model) < 0.05


def test_a_claim_can_be_cut_down(model: Path) -> None:
    with weightwire.open_model(model) as opened:
        payloads = [tensor.payload for tensor in opened.tensors.values()][:3]
        with pipeline.dropping(True) as drop:
            assert drop is not None
            claim = Claim(drop, payloads)
            claim.keep([2])
            claim.done(0)
            claim.done(1)
            claim.close()
    assert share(model, payloads[0].offset + MIB, 24 * MIB) == 0


def test_warming_drops_as_well(tmp_path: Path, model: Path) -> None:
    with weightwire.Server(port=0, cache=tmp_path / "cache") as running:
        (outcome,) = weightwire.warm(model, running.endpoints[0], drop_behind=True, index=False)
    assert outcome.error is None
    assert share(model) < 0.05
