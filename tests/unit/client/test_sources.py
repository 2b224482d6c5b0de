"""How a model's files are read: what is sent is the same either way; over a network, much is asked for at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save_file
from support.require import do_without

import weightwire
from weightwire.client import sources
from weightwire.client.sources import AHEAD, BLOCK, Sources, hash_blocks, in_blocks
from weightwire.errors import ConfigError, ModelError
from weightwire.model.mounts import is_remote, readahead_bytes
from weightwire.ranges import FileRange

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
SUPPORT = Path(__file__).resolve().parents[2] / "support"

READER = """
import os, sys
import weightwire
from weightwire.model.mounts import is_remote
model, read = sys.argv[1:3]
with open(model, "rb") as file:
    assert is_remote(file.fileno()), "the kernel says where the file is"
for cache in ("never", "always"):
    fd = os.open(model, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    with weightwire.Server(port=0) as server, weightwire.connect(server.endpoints[0]) as connection:
        connection.push(model, read=read, cache=cache, index=False, threads=2, verify=True)
"""


TO_SEVERAL = """
import contextlib, os, sys, tempfile
import weightwire
model, read = sys.argv[1:3]
fd = os.open(model, os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
os.close(fd)
with contextlib.ExitStack() as stack:
    folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(3)]
    servers = [stack.enter_context(weightwire.Server(port=0, cache=folder)) for folder in folders]
    pushed = weightwire.push_all(
        model, [server.endpoints[0] for server in servers], read=read, index=False, drop_behind="drop" in sys.argv
    )
    with pushed:
        assert [each.result.summary.misses for each in pushed.check()] == [4, 4, 4]
        with weightwire.open_model(sys.argv[3]) as source:
            for server in servers:
                assert len(server.tensors) == len(source.tensors) == 36
                assert all(server.tensors[name].view() == each.view() for name, each in source.tensors.items())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 MiB: tensors over 10 MiB, and many of a size that is sent by itself."""
    random = np.random.default_rng(5)
    tensors = {f"layers.{n}.w": random.integers(0, 255, 16 * MIB, dtype=np.uint8) for n in range(4)}
    tensors |= {f"layers.{n}.v": random.integers(0, 255, MIB, dtype=np.uint8) for n in range(32)}
    path = tmp_path_factory.mktemp("sources") / "model.safetensors"
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("read", ["auto", "mmap", "read"])
@pytest.mark.parametrize("threads", [0, 2])
def test_the_same_bytes_and_hashes(model: Path, tmp_path: Path, read: str, threads: int) -> None:
    with (
        weightwire.Server(port=0, cache=tmp_path / "cache") as server,
        weightwire.connect(server.endpoints[0]) as connection,
    ):
        cold = connection.push(model, read=read, threads=threads, index=False, verify=True)
        warm = connection.push(model, read=read, threads=threads, index=False, verify=True)
    assert (cold.summary.misses, warm.summary.hits) == (4, 4)
    with weightwire.open_model(model) as opened:
        expected = {f"{weightwire.fnv1a64(opened.tensors[f'layers.{n}.w'].view()):016x}" for n in range(4)}
    assert expected <= {path.name for path in (tmp_path / "cache").iterdir()}


def test_a_way_to_read_that_there_is_not(model: Path) -> None:
    with (
        weightwire.Server(port=0) as server,
        weightwire.connect(server.endpoints[0]) as connection,
        pytest.raises(ConfigError, match="read"),
    ):
        connection.push(model, read="fast")


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 12345])
def test_hashing_in_blocks(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    (tmp_path / "file").write_bytes(b"head" + data)
    with open(tmp_path / "file", "rb") as file:
        looks: list[int] = []
        found = hash_blocks(FileRange(file.fileno(), 4, size), lambda: looks.append(1), digest=False)
        assert found == (weightwire.fnv1a64(data), b"")
        both = hash_blocks(FileRange(file.fileno(), 4, size), lambda: None, digest=True)
        assert both == (found.fnv1a, blake3(data).digest())
        with pytest.raises(ModelError, match="shorter"):
            hash_blocks(FileRange(file.fileno(), 5, size), lambda: None, digest=True)


def test_hashing_in_blocks_has_what_follows_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a network is between: tens of MiB are on their way whenever something is read."""
    size = 3 * AHEAD
    (tmp_path / "file").write_bytes(b"head" + bytes(size))
    advise, preadv = os.posix_fadvise, os.preadv
    asked, behind = 0, []

    def noted_advice(fd: int, offset: int, nbytes: int, advice: int) -> None:
        nonlocal asked
        if advice == os.POSIX_FADV_WILLNEED:
            asked = max(asked, offset + nbytes)
        advise(fd, offset, nbytes, advice)

    def noted_read(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        behind.append(min(4 + size, offset + AHEAD - BLOCK) - asked)
        return preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(sources, "is_remote", lambda fd: True)
    monkeypatch.setattr(os, "posix_fadvise", noted_advice)
    monkeypatch.setattr(os, "preadv", noted_read)
    with open(tmp_path / "file", "rb") as file:
        hash_blocks(FileRange(file.fileno(), 4, size), lambda: None, digest=True)
    assert len(behind) > 3 * AHEAD // BLOCK
    assert max(behind) <= 0


def test_hashing_in_blocks_looks_around_inside_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of a slow file system can take long."""
    preadv = os.preadv

    def slow(*args: Any) -> int:
        time.sleep(0.06)
        return preadv(*args)

    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", slow)
    (tmp_path / "file").write_bytes(bytes(BLOCK))
    with open(tmp_path / "file", "rb") as file, pytest.raises(KeyboardInterrupt):
        hash_blocks(FileRange(file.fileno(), 0, BLOCK), stop, digest=True)


def test_a_plain_read_of_a_file_that_was_cut_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    with open(tmp_path / "file", "rb") as file:
        sources = Sources([FileRange(file.fileno(), 0, 100)], read="read")
        assert bytes(sources.part(0, 10, 90)) == b"x" * 90
        os.truncate(tmp_path / "file", 50)
        with pytest.raises(ModelError, match="shorter"):
            sources.part(0, 10, 90)


def test_what_is_near_is_left_to_the_kernel(model: Path) -> None:
    with open(model, "rb") as file:
        payloads = [FileRange(file.fileno(), 0, MIB), memoryview(b"abc")]
        assert not is_remote(file.fileno())
        assert readahead_bytes(file.fileno()) >= 64 << 10
        assert in_blocks(payloads, "auto") == in_blocks(payloads, "mmap") == frozenset()
        assert in_blocks(payloads, "read") == {0}
        assert Sources(payloads).part(0, 0, MIB) is payloads[0]
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    assert not is_remote(writer), "no descriptor, no network"


@pytest.fixture
def reads_over(model: Path, tmp_path: Path):
    """Push the model from a file system that takes 5 ms for each read, and return what it was asked for."""

    def run(read: str, script: str = READER, *words: str) -> list[tuple[int, int, int]]:
        folder, log = tmp_path / read, tmp_path / f"{read}.json"
        folder.mkdir()
        command = [
            *("unshare", "--user", "--map-root-user", "--mount", sys.executable, SUPPORT / "fuse_mount.py"),
            *(model, folder, log, "0.005", "--", sys.executable, "-P", "-c", script, folder / model.name, read, model),
            *words,
        ]
        try:
            done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=100)
        except FileNotFoundError:
            do_without("a file system of its own", "there is no unshare here")
        if "unshare:" in done.stderr or "/dev/fuse" in done.stderr or "mount" in done.stderr.splitlines()[-1:]:
            do_without("a file system of its own", done.stderr.strip().splitlines()[-1])
        assert done.returncode == 0, done.stderr
        return [tuple(entry) for entry in json.loads(log.read_text())]

    return run


@pytest.mark.parametrize("read", ["auto", "read"])
def test_beyond_a_network_many_large_requests_are_on_their_way(reads_over, model: Path, read: str) -> None:
    reads = reads_over(read)
    size = model.stat().st_size
    nbytes = sum(nbytes for _, nbytes, _ in reads)
    large = sum(nbytes for _, nbytes, _ in reads if nbytes >= 64 << 10)
    assert large >= 0.95 * nbytes
    assert nbytes <= 2.2 * size, "twice, as it was pushed twice, and not once to hash and once to send"
    crowded = sum(nbytes for _, nbytes, at_once in reads if at_once >= 4)
    assert crowded >= 0.7 * nbytes


def test_left_to_the_kernel_there_is_one_request_or_two(reads_over) -> None:
    reads = reads_over("mmap")
    crowded = sum(nbytes for _, nbytes, at_once in reads if at_once >= 8)
    assert crowded < 0.3 * sum(nbytes for _, nbytes, _ in reads), "or the test above shows nothing"


@pytest.mark.parametrize("words", [(), ("drop",)], ids=["kept", "dropped behind"])
@pytest.mark.parametrize("read", ["auto", "read"])
def test_for_several_servers_the_file_is_asked_for_once(reads_over, model: Path, read: str, words: tuple[str]) -> None:
    """By the one who is first; the others find what they hash and send in the page cache, wherever they are."""
    reads = reads_over(read, TO_SEVERAL, *words)
    nbytes = sum(nbytes for _, nbytes, _ in reads)
    assert model.stat().st_size <= nbytes <= 1.05 * model.stat().st_size
