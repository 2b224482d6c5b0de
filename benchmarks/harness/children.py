"""Processes that do a round whenever they are told to, at whatever place of the network they were started."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_BENCHMARKS = Path(__file__).resolve().parent.parent
_PATIENCE = 20


class Worker:
    """A module of the harness, run at a ``place`` of the network, that answers each line of JSON with one.

    It ends with its input, and so with this process.
    """

    def __init__(
        self, place: Sequence[str], module: str, *arguments: object, environ: Mapping[str, str] | None = None
    ) -> None:
        command = [*place, sys.executable, "-m", f"harness.{module}", *map(str, arguments)]
        path = os.pathsep.join(filter(None, [str(_BENCHMARKS), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {}), "PYTHONPATH": path},
        )

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def read(self) -> Any:
        """The next line it says. RuntimeError if it ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with exit code {self._process.wait(_PATIENCE)}")
        return json.loads(line)

    def ask(self, request: object) -> Any:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None
        # One that is gone shows in its answer, with its exit code.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        """Close its input and wait for it to end; kill it if it does not. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far, its threads included, in ticks of (mostly) 10 ms (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
