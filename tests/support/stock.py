"""Stock peers in processes of their own: the server, the client, the model loader."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from prepare.peers import peer_python
from prepare.smoke import free_port, listening

HERE = Path(__file__).resolve().parent
#: Seconds for anything a peer does at once; generous, as the machine may be busy.
PATIENCE = 60.0


class StockServer:
    """A stock ggml-rpc server on a free port of ``host``, running once made. It serves one client at a time.

    ``place`` is a command that it is started through, such as nsenter(1) for another network; one that becomes what it
    starts.
    """

    def __init__(
        self,
        library: Path,
        protocol: str,
        log: Path,
        cache: Path | None = None,
        host: str = "127.0.0.1",
        place: Sequence[str] = (),
    ) -> None:
        self.protocol = protocol
        self.cache = cache
        self._place = place
        self._log = log
        for _ in range(5):
            # The server cannot pick a port, and one that was free may be taken before it listens.
            port = free_port()
            self.endpoint = f"{host}:{port}"
            self._start(library)
            if self._wait_until_listening(port):
                return
            self.stop()
        code = self.process.returncode
        raise AssertionError(f"the stock server of {protocol} does not start (exit code {code}):\n{self.output()}")

    def _start(self, library: Path) -> None:
        command = [*self._place, sys.executable, HERE / "stock_server.py", library, self.endpoint]
        if self.cache:
            self.cache.mkdir(parents=True, exist_ok=True)
            command.append(self.cache)
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def _wait_until_listening(self, port: int) -> bool:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.alive:
            if listening(port, self.process.pid):
                return self.alive
            time.sleep(0.005)
        return False

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.process.poll() is None

    def output(self) -> str:
        """What the server printed so far."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End the process. Idempotent."""
        self.process.kill()
        self.process.wait()


class StockClient:
    """The stock client, connected to an endpoint; a context manager. Each method is one call of upstream's."""

    def __init__(self, library: Path, endpoint: str, scratch: Path) -> None:
        self._scratch = scratch
        self._errors = open(scratch / "stock-client.log", "w+b")  # noqa: SIM115  (closed by close)
        command = [sys.executable, HERE / "stock_client.py", library, endpoint]
        self._process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        # Whatever happens the test ends: a client that hangs is ended and its pipe closes.
        self._guard = threading.Timer(PATIENCE, self._process.kill)
        self._guard.daemon = True
        self._guard.start()
        try:
            assert self._answer() == "ready"
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StockClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the client's process, which closes its connection. Idempotent."""
        self._guard.cancel()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._errors.close()

    def output(self) -> str:
        """What the client printed so far, its answers apart."""
        return (self._scratch / "stock-client.log").read_text(errors="replace")

    def _answer(self) -> Any:
        line = _pipe(self._process.stdout).readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            raise AssertionError(
                f"the stock client ended (exit code {code}):\n{self._errors.read().decode(errors='replace')}"
            )
        return json.loads(line)

    def call(self, *request: object) -> Any:
        """One operation of stock_client.py."""
        # A client that is gone shows in its answer, with what it said last.
        with contextlib.suppress(BrokenPipeError):
            _pipe(self._process.stdin).write(json.dumps(request).encode() + b"\n")
            _pipe(self._process.stdin).flush()
        return self._answer()

    def create(self, tensors: Sequence[tuple[str, int, Sequence[int]]], *, weights: bool) -> list[int]:
        """Make tensors (name, ggml type, ne) in a new buffer; returns the bytes of each."""
        sizes: list[int] = self.call("create", [[name, kind, list(ne)] for name, kind, ne in tensors], weights)
        return sizes

    def set(self, index: int, data: bytes, offset: int = 0) -> None:
        """Write bytes into a tensor."""
        path = self._scratch / "stock-client-set"
        path.write_bytes(data)
        self.call("set", index, str(path), 0, offset, len(data))

    def set_from(self, index: int, path: Path, start: int, size: int) -> None:
        """Write a whole tensor from a range of a file."""
        self.call("set", index, str(path), start, 0, size)

    def get(self, index: int, size: int, offset: int = 0) -> bytes:
        """Read bytes of a tensor."""
        path = self._scratch / "stock-client-get"
        self.call("get", index, str(path), offset, size)
        return path.read_bytes()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe
    return pipe


def run_script(python: Path | str, script: str, *arguments: object, timeout: float = 110.0) -> Any:
    """Run one of the stock_*.py scripts to its end and return the JSON value it printed last."""
    command = [str(python), str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False)
    said = done.stderr.decode(errors="replace")[-4000:]
    assert done.returncode == 0, f"{script}: exit code {done.returncode}\n{said}"
    return json.loads(done.stdout.decode().strip().splitlines()[-1])


def stock_load(model: Path, endpoint: str, tokens: int = 8) -> dict[str, Any]:
    """Load a model with the stock loader onto a server and generate: {"tokens": [...], "text": "..."}."""
    result: dict[str, Any] = run_script(peer_python(), "stock_load.py", model, endpoint, tokens)
    return result
