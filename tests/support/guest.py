"""What the checks in the soft-RoCE guest share: servers there, and processes with a limit of locked memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

#: The address of the guest's device.
ADDRESS = "10.77.0.1"
#: KiB of locked memory, and how many send slots of 256 KiB fit them beside 24 to receive in. Just enough for each rung,
#: a page less, and a usual limit.
DEPTHS = {16384: 8, 8192: 8, 8188: 4, 7168: 4, 7164: 2, 6656: 2, 6652: 1, 6400: 1}
_NOBODY = 65534
_PATIENCE = 200.0


@contextmanager
def confined(kib: int, work: Callable[[IO[str]], object]) -> Iterator[IO[str]]:
    """Run ``work`` in a process of nobody's with ``kib`` KiB of locked memory; what it writes is to be read here.

    The process is forked, not started anew: nobody may not be able to read this Python's files. It ends with the block.
    """
    # Nor what Python loads only when it is wanted: this is for host names.
    ADDRESS.encode("idna")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with open(writing, "w", buffering=1) as out:
            try:
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (kib << 10, kib << 10))
                os.setgroups([])
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
                work(out)
            except BaseException as error:
                out.write(f"failed: {error!r}")
        os._exit(0)
    os.close(writing)
    try:
        with open(reading) as pipe:
            yield pipe
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class ServeProcess:
    """``weightwire serve`` on the device's address, at a free port."""

    def __init__(self, *options: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by stop)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "weightwire", "serve", "--host", ADDRESS, "--port", "0", "--json", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"weightwire serve did not start:\n{self.log()}"
        self.endpoint = str(json.loads(line)["endpoint"])

    def log(self) -> str:
        """What it logged so far."""
        self._log.seek(0)
        return self._log.read()

    def stop(self) -> str:
        """End it; returns what it logged. Once only."""
        self.process.kill()
        self.process.wait(_PATIENCE)
        assert self.process.stdout
        self.process.stdout.close()
        with self._log:
            return self.log()


def rdma_objects() -> dict[str, int]:
    """What the kernel counts of RDMA objects (by the thread that made them: so all there are), and pinned pages."""
    found = dict.fromkeys(("pd", "cq", "qp", "mr", "ctx"), 0)
    for kind in found:
        listed = subprocess.run(["rdma", "-j", "resource", "show", kind], capture_output=True, text=True, check=True)
        found[kind] = len(json.loads(listed.stdout or "[]"))
    status = Path("/proc/self/status").read_text()
    found["pinned"] = int(status.split("VmPin:")[1].split()[0])
    return found


def weightwire_json(*arguments: str) -> dict[str, Any]:
    """Run the command line to its end and return the object it printed."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "weightwire", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
