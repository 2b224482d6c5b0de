"""Arrays in mapped files and the index of hashes: what is written through a mapping shows in no time stamp."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import raw_gguf

from weightwire import Connection, Server, connect, fnv1a64, push_all, warm
from weightwire.cache import seed
from weightwire.index import HashIndex

SIZE = 11 << 20
TIMES = 4

pytestmark = pytest.mark.usefixtures("always_settled")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    return path


@pytest.fixture
def index(tmp_path: Path) -> Iterator[HashIndex]:
    with HashIndex(tmp_path / "index.sqlite3") as made:
        yield made


@pytest.fixture
def entries(tmp_path: Path) -> Path:
    return tmp_path / "entries"


@pytest.fixture
def connection(entries: Path) -> Iterator[Connection]:
    with Server(port=0, cache=entries) as server, connect(server.endpoints[0], timeout=60) as made:
        yield made


def written(path: Path, mode: Any) -> np.memmap[Any, Any]:
    """The file mapped, every page of it written to already: writing again sets no time."""
    array = np.memmap(path, np.uint8, mode)
    array[:: os.sysconf("SC_PAGESIZE")] ^= 1
    return array


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_a_push_of_what_is_written_through_its_mapping(
    mode: str, path: Path, index: HashIndex, connection: Connection
) -> None:
    array = written(path, mode)
    for _ in range(TIMES):
        result = connection.push({"a": array}, index=index)
        assert result["a"].read().tobytes() == array.tobytes()
        assert result.summary.hashes_known == 0
        array[5] ^= 255
    assert index.owners() == {}


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_a_push_to_several_of_what_is_written_through_its_mapping(
    mode: str, path: Path, index: HashIndex, tmp_path: Path
) -> None:
    array = written(path, mode)
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(port=0, cache=tmp_path / str(at))) for at in range(2)]
        for _ in range(TIMES):
            with push_all({"a": array}, [server.endpoints[0] for server in servers], index=index, timeout=60) as pushed:
                for each in pushed:
                    assert each.result is not None, each.error
                    assert each.result["a"].read().tobytes() == array.tobytes()
            array[5] ^= 255
    assert index.owners() == {}


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_warming_with_what_is_written_through_its_mapping(
    mode: str, path: Path, index: HashIndex, entries: Path
) -> None:
    array = written(path, mode)
    with Server(port=0, cache=entries) as server:
        for _ in range(TIMES):
            (warmed,) = warm({"a": array}, server.endpoints[0], index=index, timeout=60)
            assert warmed.error is None
            assert (entries / f"{fnv1a64(array):016x}").read_bytes() == array.tobytes()
            array[5] ^= 255
    assert index.owners() == {}


@pytest.mark.parametrize("mode", ["r+", "c"])
@pytest.mark.parametrize("verify", [False, True])
def test_seeding_with_what_is_written_through_its_mapping(
    mode: str, verify: bool, path: Path, index: HashIndex, entries: Path
) -> None:
    array = written(path, mode)
    for _ in range(TIMES):
        seed({"a": array}, entries, index=index, verify=verify)
        assert (entries / f"{fnv1a64(array):016x}").read_bytes() == array.tobytes()
        array[5] ^= 255
    assert index.owners() == {}


def test_an_array_mapped_to_be_read_is_known_again(path: Path, index: HashIndex, connection: Connection) -> None:
    array = np.memmap(path, np.uint8, "r")
    for known in (0, 1):
        result = connection.push({"a": array}, index=index)
        assert result["a"].read().tobytes() == array.tobytes()
        assert result.summary.hashes_known == known
    del array  # and written to afterwards, it is another file
    other = written(path, "r+")
    other.flush()
    del other
    array = np.memmap(path, np.uint8, "r")
    result = connection.push({"a": array}, index=index)
    assert result["a"].read().tobytes() == array.tobytes() == path.read_bytes()
    assert result.summary.hashes_known == 0


def gguf(path: Path) -> Path:
    data = np.random.default_rng(2).bytes(SIZE)
    path.write_bytes(raw_gguf.build(tensors=[raw_gguf.tensor("a", (SIZE,), 24, 0)]) + data)
    return path


def test_a_file_that_this_process_writes_to_through_a_mapping(
    tmp_path: Path, index: HashIndex, entries: Path, connection: Connection
) -> None:
    """Opened by its name it is the same file: what it hashes to is not known from one push to the next."""
    path = gguf(tmp_path / "model.gguf")
    memory = np.memmap(path, np.uint8, "r+")
    memory[-SIZE:] ^= 1
    for _ in range(TIMES):
        result = connection.push(path, index=index)
        assert result["a"].read().tobytes() == memory[-SIZE:].tobytes()
        seed(path, entries, index=index)
        assert (entries / f"{fnv1a64(memory[-SIZE:]):016x}").read_bytes() == memory[-SIZE:].tobytes()
        memory[-5] ^= 255
    assert index.owners() == {}
