"""A server in a process of its own, for as long as a ``with`` block lasts."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, Self

from weightwire.cli.failures import ENVIRONMENT, FAILED, Failure
from weightwire.cli.signals import deferred_signals
from weightwire.errors import WeightwireError
from weightwire.threads import Latch, Thread, start

__all__ = ["EmbeddedServer"]

START_SECONDS = 30.0
STOP_SECONDS = 10.0
DEATH_SECONDS = 1.0
TAIL_LINES = 5

_COMMAND = ("-m", "weightwire", "serve", "--port", "0", "--json", "--lifeline")


class EmbeddedServer:
    """``weightwire serve`` on a free port of ``host``, started on entering and always ended on leaving.

    The server watches the pipe on its stdin: should this process be killed, it ends by itself. It is in a session of
    its own, so that Ctrl-C in the terminal reaches only us, who then end it in order. A server that does not start
    raises Failure with exit code 3: what it says is wrong, or else its last lines.
    """

    def __init__(
        self, arguments: Sequence[str] = (), *, host: str = "127.0.0.1", command: Sequence[str] | None = None
    ) -> None:
        self._arguments = ("--host", host, *arguments)
        self._command = [sys.executable, *_COMMAND, *self._arguments] if command is None else list(command)
        self._process: subprocess.Popen[str] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._drain: Thread | None = None
        self.endpoint = ""

    @property
    def pid(self) -> int:
        """The server's process id; 0 while it does not run."""
        return self._process.pid if self._process is not None else 0

    def __enter__(self) -> Self:
        try:
            with deferred_signals():
                self._start()
            self.endpoint = self._read_endpoint()
        except BaseException:
            self._end()
            raise
        return self

    def _start(self) -> None:
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="backslashreplace",
                env=_environment(),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise Failure(error, ENVIRONMENT, detail=f"cannot start the demo's server: {error}") from error
        self._process = process
        drain = Thread(target=self._read_log, args=(process.stderr,), name="weightwire-server-log", daemon=True)
        start(drain)
        self._drain = drain

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        died = isinstance(error, WeightwireError) and self._has_died(DEATH_SECONDS)
        code = self._end()
        if died and error is not None:
            raise self._died(error, code, FAILED) from error

    def _has_died(self, seconds: float) -> bool:
        """Whether the server ended by itself; its connections close a moment before its end can be seen."""
        try:
            self._running().wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read_endpoint(self) -> str:
        process = self._running()
        assert process.stdout is not None
        # A server that neither speaks nor ends is ended for us, which ends the read below.
        spoken = Latch()

        def limit() -> None:
            if not spoken.wait(START_SECONDS):
                process.kill()

        start(Thread(target=limit, name="weightwire-limit", daemon=True))
        try:
            text = process.stdout.readline()
        finally:
            spoken.set()
        try:
            answer = json.loads(text)
            if "endpoint" not in answer and "error" in answer:
                raise self._refused(answer["error"])
            return str(answer["endpoint"])
        except (ValueError, KeyError, TypeError) as error:
            # It is about to end by itself, and its own exit code tells more than that of being ended.
            self._has_died(DEATH_SECONDS)
            code = self._end()
            raise self._died(error, code, ENVIRONMENT, verb="did not start") from error

    def _read_log(self, log: IO[str]) -> None:
        for text in log:
            self._tail.append(text.rstrip())

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process

    def _end(self) -> int | None:
        """End the process and give back what belongs to it; return its exit code."""
        with deferred_signals():
            process, self._process = self._process, None
            if process is None:
                return None
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if self._drain is not None:
                self._drain.join(STOP_SECONDS)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    # A pipe whose reader is gone has nothing left to flush.
                    with contextlib.suppress(OSError):
                        stream.close()
            return process.returncode

    @staticmethod
    def _refused(said: dict[str, Any]) -> Failure:
        """What the server itself says is wrong."""
        detail = f"the demo's server did not start: {said['detail']}"
        return Failure(RuntimeError(detail), ENVIRONMENT, detail=detail, hint=said["hint"], kind=said["type"])

    def _died(self, error: BaseException, code: int | None, exit_code: int, *, verb: str = "died") -> Failure:
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        said = " | ".join(text for text in self._tail if text) or "nothing"
        return Failure(
            error,
            exit_code,
            detail=f"the demo's server {verb} ({how}); the last it said: {said}",
            hint=f"run '{shlex.join(['weightwire', 'serve', '--port', '0', *self._arguments])}' to see it by itself",
            kind="ServerDied",
        )


def _environment() -> dict[str, str]:
    """Our environment, without settings meant for another server, and with our own import path: the child runs in ``/``
    and must find the very package that started it."""
    ours = ("WEIGHTWIRE_SERVER_", "GGML_RPC_LOADPROF")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment["PYTHONSAFEPATH"] = "1"
    environment["PYTHONIOENCODING"] = "utf-8:backslashreplace"
    return environment
