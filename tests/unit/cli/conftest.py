"""What the tests of the command line share: a small model, a server, and ways to run a verb."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import weightwire
from weightwire.cli.root import root
from weightwire.model.synthetic import write_synthetic_gguf

# Settings of whoever runs the tests must not reach them.
for _name in [name for name in os.environ if name.startswith("WEIGHTWIRE_") and "TEST" not in name]:
    del os.environ[_name]


@dataclass
class Ran:
    """What a verb did: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1, "one object, one line"
        value = json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert isinstance(value, dict)
        return value

    def failed(self, code: int, *words: str) -> Ran:
        """Check the exit code, that stderr is one error line and at most one hint, and that it says ``words``."""
        lines = [line for line in self.err.splitlines() if line.startswith("weightwire: ")]
        assert self.code == code, self.err
        assert len([line for line in lines if line.startswith("weightwire: error: ")]) == 1, self.err
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err
        return self


@pytest.fixture
def invoke() -> Callable[..., Ran]:
    """Run a verb in this process."""

    def run(*words: str, **environ: str) -> Ran:
        result = CliRunner().invoke(root, list(words), env=environ or None)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """The words that run a verb in a process of its own, after the Python in ``first``, if any."""

    def words(*arguments: str, first: str = "") -> list[str]:
        if first:
            return [sys.executable, "-c", f"{first}\nfrom weightwire.cli import main\nmain()", *arguments]
        return [sys.executable, "-m", "weightwire", *arguments]

    return words


@pytest.fixture
def spawn(command: Callable[..., list[str]], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a verb in a process of its own, which is gone after the test. ``first`` is Python that has it wait where a
    test wants it to: what is to be interrupted must not be over before the signal is sent.
    """
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str, environ: dict[str, str] | None = None, first: str = "", **options: Any
    ) -> subprocess.Popen[str]:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        process = subprocess.Popen(
            command(*arguments, first=first), text=True, cwd=tmp_path, env=os.environ | (environ or {}), **options
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def finish() -> Callable[[subprocess.Popen[str]], Ran]:
    """Wait for a process and take what it said."""

    def wait(process: subprocess.Popen[str]) -> Ran:
        out, err = process.communicate(timeout=60)
        return Ran(process.returncode, out or "", err or "")

    return wait


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic model of 16 MiB; not to be changed."""
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    write_synthetic_gguf(path, 16 << 20)
    return path


@pytest.fixture
def server() -> Iterator[weightwire.Server]:
    """A server that keeps what it gets."""
    with weightwire.Server(port=0, retain="process") as running:
        yield running


class Gate(weightwire.Destination):
    """Memory whose first write announces itself and waits to be let through."""

    reached: threading.Event
    opened: threading.Event

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.memory = bytearray(nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        self.memory[offset : offset + view.nbytes] = view

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = self.memory[offset : offset + view.nbytes]


@dataclass
class Gated:
    """A server that stops at the first byte: ``reached`` is set then, and ``opened`` lets it go on."""

    endpoint: str
    reached: threading.Event
    opened: threading.Event


@pytest.fixture
def gated() -> Iterator[Gated]:
    """A server that takes nothing until it is let."""
    reached, opened = threading.Event(), threading.Event()
    kind = type("OneGate", (Gate,), {"reached": reached, "opened": opened})
    with weightwire.Server(port=0, destination=lambda nbytes, device: kind(nbytes)) as running:
        yield Gated(running.endpoints[0], reached, opened)
        opened.set()


@pytest.fixture
def nowhere() -> str:
    """An endpoint at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


class Liar(weightwire.Destination):
    """Memory that answers with one byte changed."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.memory = bytearray(nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        self.memory[offset : offset + view.nbytes] = view

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = self.memory[offset : offset + view.nbytes]
        view[0] ^= 1


@pytest.fixture
def liar() -> Iterator[str]:
    """A server that does not give back what it was given."""
    with weightwire.Server(port=0, destination=lambda nbytes, device: Liar(nbytes)) as running:
        yield running.endpoints[0]
