"""``weightwire warm``: what it leaves on a server, what it says, and how it fails."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightwire

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
MEMBERS = {
    *("endpoint", "protocol", "spoken", "transport", "tensors", "bytes", "sent", "hits", "misses", "corrupt_hits"),
    *("too_large", "hashes_known", "threads", "optimized", "seconds", "gib_per_s", "profile"),
}


@pytest.fixture(autouse=True)
def own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index for each test."""
    monkeypatch.setenv("WEIGHTWIRE_INDEX", str(tmp_path / "index.sqlite3"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A safetensors file: three tensors over 10 MiB, two of them in layers, and two that no cache holds."""
    random = np.random.default_rng(1)

    def tensor(nbytes: int) -> np.ndarray:
        return random.integers(0, 255, nbytes, dtype=np.uint8)

    path = tmp_path / "model.safetensors"
    save_file(
        {
            "layers.0.w": tensor(11 * MIB),
            "layers.1.w": tensor(12 * MIB),
            "head": tensor(10 * MIB + 1),
            "limit": tensor(10 * MIB),
            "small": tensor(100),
        },
        path,
    )
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[weightwire.Server, Path]]]:
    """Start servers with a cache each."""
    running: list[weightwire.Server] = []

    def one(**options: object) -> tuple[weightwire.Server, Path]:
        folder = tmp_path / f"cache-{len(running)}"
        server = weightwire.Server(port=0, cache=folder, **options)
        server.__enter__()
        running.append(server)
        return server, folder

    yield one
    for server in running:
        server.__exit__(None, None, None)


def entries(folder: Path) -> dict[str, int]:
    """Names and sizes of the entries."""
    return {path.name: path.stat().st_size for path in folder.iterdir() if not path.name.startswith(".")}


def expected(model: Path, *names: str) -> dict[str, int]:
    """What a cache holds of a model."""
    with weightwire.open_model(model) as opened:
        tensors = [opened.tensors[name] for name in names or ("layers.0.w", "layers.1.w", "head")]
        return {f"{weightwire.fnv1a64(tensor.view()):016x}": tensor.nbytes for tensor in tensors}


def test_the_cache_is_filled_once_and_nothing_else_stays(invoke, start, model: Path) -> None:
    server, folder = start(retain="process")
    words = ("warm", str(model), server.endpoints[0], "--json")
    first = invoke(*words)
    assert (first.code, first.err) == (0, "")
    report = first.json
    assert set(report) == MEMBERS
    nbytes = 33 * MIB + 1
    assert (report["tensors"], report["bytes"], report["sent"]) == (3, nbytes, nbytes)
    assert (report["hits"], report["misses"], report["corrupt_hits"], report["too_large"]) == (0, 3, 0, [])
    assert entries(folder) == expected(model)
    again = invoke(*words).json
    assert (again["hits"], again["misses"], again["sent"]) == (3, 0, 0)
    text = invoke(*words[:-1])
    assert "3 tensors of 33.0 MiB are in its cache" in text.out
    assert "3 were there already" in text.out


def test_only_what_is_chosen(invoke, start, model: Path) -> None:
    server, folder = start()
    assert invoke("warm", str(model), server.endpoints[0], "--layers", "1").code == 0
    assert entries(folder) == expected(model, "layers.1.w")
    invoke("warm", str(model), server.endpoints[0], "--layers", "7").failed(2, "layers 0-1")
    report = invoke("warm", str(model), server.endpoints[0], "--include", "^(small|limit)$", "--json")
    assert (report.code, report.json["tensors"]) == (0, 0)
    assert "nothing to warm" in invoke("warm", str(model), server.endpoints[0], "--include", "^small$").out


def test_several_servers(invoke, start, model: Path) -> None:
    (one, first), (other, second) = start(), start()
    ran = invoke(
        *("warm", str(model), one.endpoints[0], other.endpoints[0], "--layers", "0", "--layers", "1,other", "--json")
    )
    assert ran.code == 0
    assert entries(first) == expected(model, "layers.0.w")
    assert entries(second) == expected(model, "layers.1.w", "head")
    assert [set(each) for each in ran.json["endpoints"]] == [MEMBERS, MEMBERS]
    assert ran.json["totals"]["misses"] == 3
    assert ran.json["totals"]["sent"] == 33 * MIB + 1


def test_a_server_without_a_cache_is_noticed_after_one_tensor(invoke, server, start, model: Path) -> None:
    ran = invoke("warm", str(model), server.endpoints[0], "--json").failed(3, "keeps no tensor cache", "-c")
    assert ran.json["error"]["type"] == "CacheUnavailable"
    assert ran.json["error"]["endpoint"] == server.endpoints[0]
    other, folder = start()
    ran = invoke("warm", str(model), server.endpoints[0], other.endpoints[0], "--json")
    assert ran.code == 3
    assert ran.json["totals"]["failed"] == 1
    assert entries(folder) == expected(model)


def test_a_server_without_the_memory(invoke, start, model: Path) -> None:
    server, folder = start(memory=4 * MIB)
    ran = invoke("warm", str(model), server.endpoints[0], "--json").failed(1)
    assert ran.json["error"]["type"] == "AllocationError"
    assert entries(folder) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("warm",), "MODEL"),
        (("warm", "m"), "HOST:PORT"),
        (("warm", "m", "h:1", "h:1"), "twice"),
        (("warm", "m", "h:1", "--cache", "never"), "--cache"),
        (("warm", "m", "h:1", "--layers", "x"), "--layers"),
        (("warm", "missing.gguf", "h:1"), "missing.gguf"),
    ],
)
def test_usage(invoke, words: tuple[str, ...], said: str) -> None:
    invoke(*words).failed(2, said)


def test_nobody_listens(invoke, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = f"127.0.0.1:{listener.getsockname()[1]}"
    invoke("warm", str(model), nowhere, "--json").failed(1, nowhere)


def test_ctrl_c_ends_it_with_130(spawn, finish, gated, model: Path) -> None:
    process = spawn("warm", str(model), gated.endpoint, "-q")
    assert gated.reached.wait(60)
    process.send_signal(signal.SIGINT)
    ran = finish(process)
    assert (ran.code, ran.out, ran.err) == (130, "", "weightwire: interrupted\n")


def test_profile_on_stderr(invoke, start, model: Path) -> None:
    server, _ = start()
    ran = invoke("warm", str(model), server.endpoints[0], "--profile", "--json", "-q")
    assert ran.json["profile"]["misses"] == 3
    assert "server's cache: 0 hits, 3 misses" in ran.err
    assert "-bound: " in ran.err.splitlines()[-1]
