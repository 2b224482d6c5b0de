"""The plain way of loading and the optimized one: the same bytes on the wire, and every pairing of the two sides, and
of either with stock peers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from interop.proxy import RecordingProxy, traffic
from safetensors.numpy import save_file
from support.awkward import MIB, awkward_tensors
from support.leaks import LeakCheck
from support.stock import StockClient, StockServer

import weightwire
from weightwire import fnv1a64
from weightwire.cache.quarantine import FOLDER
from weightwire.wire import CACHE_THRESHOLD, Command

pytestmark = [pytest.mark.interop]

#: Client and server.
PAIRINGS = list(itertools.product((True, False), repeat=2))
PAIRING_NAMES = [f"{'new' if client else 'old'}-{'new' if server else 'old'}" for client, server in PAIRINGS]

#: Large ones, more than are asked about at first; small ones gathered elsewhere, one of no bytes, and one that is sent
#: by itself; so much between them that what no cache is asked for does not wait for the end.
SIZES = {
    "norm.0": 100, "large.0": 10 * MIB + 1, "middling.0": 200_000, "large.1": 11 * MIB, "empty": 0, "norm.1": 4096,
    "large.2": 10 * MIB + 7, "large.3": 12 * MIB + 3, "threshold": 10 * MIB, "norm.2": 1, "large.4": 10 * MIB + 2,
}  # fmt: skip
LARGE = [name for name in SIZES if name.startswith("large")]


@pytest.fixture(scope="module")
def tensors() -> dict[str, bytes]:
    random = np.random.default_rng(11)
    made = {name: random.bytes(size) for name, size in SIZES.items()}
    made["large.4"] = made["large.0"]  # a hit as soon as its double has been sent
    return made


@pytest.fixture(scope="module")
def model(tensors: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "plain.safetensors"
    save_file({name: np.frombuffer(data, np.uint8) for name, data in tensors.items()}, path)
    return path


def fill(folder: Path, tensors: Mapping[str, bytes], state: str) -> Path:
    """A cache with nothing in it, with a part of the model (of the server's entries one is cut short), or all of it."""
    folder.mkdir()
    for number, name in enumerate(LARGE):
        if state == "warm" or (state == "partly" and number % 2):
            data = tensors[name]
            (folder / f"{fnv1a64(data):016x}").write_bytes(data[:-1] if state == "partly" and number == 3 else data)
    return folder


def entries(folder: Path) -> dict[str, bytes]:
    """The files of a cache folder, without what is in quarantine."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != FOLDER}


CASES = [
    *((protocol, state, None, "file") for protocol in ("1.0", "2.0", "8.0") for state in ("none", "cold")),
    *(("7.0", state, probe, "file") for state in ("cold", "partly", "warm") for probe in (False, True)),
    ("7.0", "none", None, "file"),
    ("7.0", "partly", None, "arrays"),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("protocol", "state", "probe", "source"), CASES)
def test_the_switch_changes_no_byte_on_the_wire(
    no_leaks: LeakCheck,
    tensors: dict[str, bytes],
    model: Path,
    tmp_path: Path,
    protocol: str,
    state: str,
    probe: bool | None,
    source: str,
) -> None:
    pushed: object = model if source == "file" else {n: np.frombuffer(data, np.uint8) for n, data in tensors.items()}
    recorded = []
    kept = []
    for new_client, new_server in PAIRINGS:
        folder = None if state == "none" else fill(tmp_path / f"{new_client}-{new_server}", tensors, state)
        with weightwire.Server(port=0, cache=folder, protocol=protocol, optimized=new_server) as server:
            with RecordingProxy(server.endpoints[0], digests=True) as proxy:
                with weightwire.connect(proxy.endpoint, timeout=60, optimized=new_client) as connection:
                    assert (connection.optimized, server.optimized) == (new_client, new_server)
                    cache = "never" if folder is None else "always"
                    summary = connection.push(pushed, cache=cache, probe=probe, verify=True).summary
                    # One without bytes is not sent.
                    assert {name: bytes(served.view()) for name, served in server.tensors.items()} == {
                        name: data for name, data in tensors.items() if data
                    }
                sent = proxy.sent
            seen = traffic(proxy)
            assert sent == sum(9 + size for _, size, _, _ in seen)
            # An old server is asked twice, over two connections, and which of them is recorded first is chance.
            greetings = [request for request in seen if request[0] is Command.HELLO]
            others = [request for request in seen if request[0] is not Command.HELLO]
            seen = sorted(greetings, key=lambda request: request[1]) + others
        recorded.append((seen, proxy.received, (summary.hits, summary.misses, summary.corrupt_hits)))
        kept.append(None if folder is None else entries(folder))
    first, answers, counts = recorded[0]
    asked = [command for command, *_ in first if command is Command.SET_TENSOR_HASH]
    assert bool(asked) == (state != "none")
    assert kept[0] in (None, {f"{fnv1a64(tensors[name]):016x}": tensors[name] for name in LARGE})
    for pairing, (seen, received, counted) in zip(PAIRING_NAMES, recorded, strict=True):
        assert counted == counts, pairing
        for position, (one, two) in enumerate(zip(first, seen, strict=True)):
            assert one == two, (pairing, position)
        assert received == answers, pairing
    assert all(folder == kept[0] for folder in kept)


@pytest.mark.model
@pytest.mark.parametrize(("client", "server"), PAIRINGS, ids=PAIRING_NAMES)
def test_the_real_model_in_every_pairing(
    no_leaks: LeakCheck, gemma_path: Path, tmp_path: Path, client: bool, server: bool
) -> None:
    with weightwire.open_model(gemma_path) as model:
        large = {name for name, tensor in model.tensors.items() if tensor.nbytes > CACHE_THRESHOLD}
        assert large
        for hits in (0, len(large)):
            with (
                weightwire.Server(port=0, cache=tmp_path, optimized=server) as serving,
                weightwire.connect(serving.endpoints[0], optimized=client) as connection,
            ):
                pushed = connection.push(model, verify=True)
                assert (pushed.summary.hits, pushed.summary.misses) == (hits, len(large) - hits)
                assert set(serving.tensors) == set(model.tensors)
                for name, tensor in model.tensors.items():
                    assert serving.tensors[name].view() == tensor.view(), name
        found = entries(tmp_path)
        assert found == {f"{fnv1a64(model.tensors[name].view()):016x}": model.tensors[name].view() for name in large}


def test_a_plain_client_and_a_stock_server(
    no_leaks: LeakCheck,
    stock_protocol: str,
    stock_server: Callable[..., StockServer],
    awkward_gguf: Path,
    tmp_path: Path,
) -> None:
    server = stock_server(stock_protocol, tmp_path / "entries")
    wanted = {tensor.name: tensor.data for tensor in awkward_tensors()}
    large = [name for name, data in wanted.items() if len(data) > CACHE_THRESHOLD]
    with weightwire.connect(server.endpoint, timeout=60, optimized=False) as connection:
        for hits in (0, len(large)):
            pushed = connection.push(awkward_gguf, cache="always", verify=True)
            assert (pushed.summary.hits, pushed.summary.misses) == (hits, len(large) - hits)
            assert {name: bytes(tensor.read()) for name, tensor in pushed.items()} == wanted
    assert entries(tmp_path / "entries") == {f"{fnv1a64(wanted[name]):016x}": wanted[name] for name in large}


def test_a_stock_client_and_a_plain_server(
    no_leaks: LeakCheck, stock_protocol: str, stock_client: Callable[..., StockClient], tmp_path: Path
) -> None:
    tensors = awkward_tensors()
    large = {f"{fnv1a64(tensor.data):016x}": tensor.data for tensor in tensors if len(tensor.data) > CACHE_THRESHOLD}
    with weightwire.Server(port=0, cache=tmp_path / "entries", protocol=stock_protocol, optimized=False) as server:
        for turn in ("cold", "warm"):
            with RecordingProxy(server.endpoints[0]) as proxy:
                client = stock_client(proxy.endpoint, stock_protocol)
                client.create([(tensor.name, tensor.type_code, tensor.ne) for tensor in tensors], weights=True)
                for index, tensor in enumerate(tensors):
                    client.set(index, tensor.data)
                for index, tensor in enumerate(tensors):
                    assert client.get(index, len(tensor.data)) == tensor.data, tensor.name
                    assert server.tensors[tensor.name].view() == tensor.data, tensor.name
                client.close()
                sizes = [request.tensor.nbytes for request in proxy.of(Command.SET_TENSOR) if request.tensor]
                sent = sum(nbytes > CACHE_THRESHOLD for nbytes in sizes)
                assert sent == (len(large) if turn == "cold" else 0)
            assert entries(tmp_path / "entries") == large
