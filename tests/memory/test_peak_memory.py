"""Peak memory beyond the tensors: at most 64 MiB for the client and 64 MiB for the server, whatever the tensor's size.

Both run in processes of their own. What counts is memory that is theirs alone: anonymous pages (RssAnon) and shared
ones (RssShmem); pages of the model file's mapping belong to the page cache, and the kernel takes them back when it
needs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
TENSOR = 768 * MIB
ALLOWED = 64 * MIB
SCRIPT = Path(__file__).resolve().parent / "pushing.py"

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def one_large_tensor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A safetensors file with one tensor of 768 MiB, no two MiB of which are alike."""
    path = tmp_path_factory.mktemp("large") / "one.safetensors"
    entry = {"large": {"dtype": "U8", "shape": [TENSOR], "data_offsets": [0, TENSOR]}}
    head = json.dumps(entry).encode()
    block = os.urandom(MIB - 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for number in range(TENSOR // MIB):
            file.write(struct.pack("<Q", number) + block)
    yield path
    path.unlink()


def own_memory(pid: int) -> int:
    """Bytes of memory that belong to the process alone; 0 when it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        return 1024 * sum(int(line.split()[1]) for line in status if line.startswith(("RssAnon:", "RssShmem:")))
    return 0


class Watch:
    """Samples the memory of processes from its making until `stop`; `peak` gives the most that was seen of one."""

    def __init__(self, *pids: int) -> None:
        self._peaks = dict.fromkeys(pids, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.002):
            self._look()

    def _look(self) -> None:
        for pid in self._peaks:
            self._peaks[pid] = max(self._peaks[pid], own_memory(pid))

    def stop(self) -> dict[int, int]:
        """The peaks, bytes by process."""
        self._over.set()
        self._thread.join()
        self._look()
        return self._peaks


@contextlib.contextmanager
def running(*command: object) -> Iterator[subprocess.Popen[str]]:
    """A process spoken to by pipes, ended in any case."""
    process = subprocess.Popen(
        [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def say(process: subprocess.Popen[str], text: str = "") -> None:
    """One line to the process."""
    assert process.stdin
    process.stdin.write(text + "\n")


def hear(process: subprocess.Popen[str]) -> str:
    """One line from the process."""
    assert process.stdout
    line = process.stdout.readline()
    assert line, f"the process ended with exit code {process.wait()}"
    return line.strip()


@contextlib.contextmanager
def a_server(*options: object) -> Iterator[tuple[int, str]]:
    """`weightwire serve` in a process of its own: its pid and endpoint."""
    command = (sys.executable, "-P", "-m", "weightwire", "serve", "--host", "127.0.0.1", "--port", "0", "--json")
    with running(*command, *options) as process:
        port = json.loads(hear(process))["port"]
        yield process.pid, f"127.0.0.1:{port}"
        # In order: what is being written to the cache is finished then.
        process.terminate()
        process.wait(60)


def check_a_push(path: Path, verify: bool, *options: object) -> tuple[int, int]:
    """Push the file to a server, neither of which may grow by more than is allowed: how many bytes were sent, and how
    many hashes known.
    """
    with (
        a_server(*options) as (server, endpoint),
        running(sys.executable, "-P", SCRIPT, path, endpoint, "verify" if verify else "trust") as client,
    ):
        assert hear(client) == "connected"
        before = {pid: own_memory(pid) for pid in (client.pid, server)}
        watch = Watch(client.pid, server)
        say(client)
        sent, known = map(int, hear(client).split())
        peaks = watch.stop()
        grown, held = peaks[client.pid] - before[client.pid], peaks[server] - before[server]
    # The server holds the tensor itself. If it did not, the measure would be wrong.
    assert held >= TENSOR
    assert held - TENSOR <= ALLOWED, f"the server took {(held - TENSOR) / MIB:.1f} MiB beyond the tensor"
    assert grown <= ALLOWED, f"the client took {grown / MIB:.1f} MiB"
    return sent, known


@pytest.mark.parametrize("verify", [False, True], ids=["trusted", "verified"])
def test_beyond_the_tensor(one_large_tensor: Path, verify: bool):
    assert check_a_push(one_large_tensor, verify) == (TENSOR, 0)


@pytest.mark.parametrize("indexed", [False, True], ids=["no index", "index"])
def test_beyond_the_tensor_with_a_cache(
    one_large_tensor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool
):
    """First a cold one and then a warm one, which an index saves the hashing for."""
    monkeypatch.setenv("WEIGHTWIRE_INDEX", str(tmp_path / "index.sqlite3") if indexed else "off")
    options = ("--cache", tmp_path / "entries")
    assert check_a_push(one_large_tensor, False, *options) == (TENSOR, 0)
    assert check_a_push(one_large_tensor, False, *options) == (0, int(indexed))


def test_the_measure_sees_a_copy(tmp_path: Path):
    """A process that copies what it reads is seen to grow by it."""
    pause = "print('here', flush=True); sys.stdin.readline()"
    script = f"import sys; {pause}; x = bytes(96 << 20); y = x[1:]; {pause}"
    with running(sys.executable, "-c", script) as process:
        hear(process)
        before = own_memory(process.pid)
        watch = Watch(process.pid)
        say(process)
        hear(process)
        assert watch.stop()[process.pid] - before >= 96 * MIB
