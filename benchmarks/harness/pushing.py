"""weightwire's pair with client and server each in a process of its own, at either end of a network.

``-m harness.pushing ENDPOINT MODEL`` is the client: it opens the model once, and for every line of its input (a JSON
object of options of `Connection.push`) connects, pushes and disconnects. It answers with the seconds from before
connecting to after the push, its processor seconds meanwhile, the push's profile, with how many hashes its index knew,
and whether it loaded the optimised way.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.children import Worker, processor_seconds
from harness.network import LOOPBACK, Network
from harness.rounds import PeerAbsent


def push_when_told(endpoint: str, path: str) -> None:
    """A round for every line of the input."""
    import weightwire

    with weightwire.open_model(path) as model:
        for line in sys.stdin:
            options = json.loads(line)
            started, busy = time.perf_counter(), time.process_time()
            with weightwire.connect(endpoint) as connection:
                result = connection.push(model, **options)
                took, busy = time.perf_counter() - started, time.process_time() - busy
            optimized = getattr(connection, "optimized", True)
            known = {"hashes_known": result.summary.hashes_known}
            print(json.dumps([took, busy, {**result.summary.profile.as_dict(), **known}, optimized]), flush=True)


class Serving:
    """A weightwire server that stays, in a process of its own; ``plain`` has it load the plain way.

    Raises PeerAbsent for ``plain`` where this weightwire has no such way.
    """

    def __init__(
        self,
        *,
        cache: Path | None = None,
        network: Network = LOOPBACK,
        serve: Sequence[str] = (),
        plain: bool = False,
    ) -> None:
        keep = [] if cache is None else ["--cache", str(cache)]
        command = [*network.at_server, sys.executable, "-m", "weightwire", "serve", "--json"]
        self._process = subprocess.Popen(
            [*command, "--host", network.host, "--port", "0", *keep, *serve],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **switch(plain)},
        )
        try:
            assert self._process.stdout is not None
            self.endpoint: str = json.loads(self._process.stdout.readline())["endpoint"]
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def close(self) -> None:
        """End it. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class PushingPeer:
    """A client that connects anew for every round, to a server that stays: ``server``, or one of its own.

    ``options`` are those of `Connection.push`; ``plain`` has the client load the plain way. Raises PeerAbsent for that
    where this weightwire has no such way.
    """

    def __init__(
        self,
        path: Path,
        *,
        cache: Path | None = None,
        network: Network = LOOPBACK,
        serve: Sequence[str] = (),
        name: str = "weightwire",
        options: Mapping[str, object] | None = None,
        server: Serving | None = None,
        plain: bool = False,
    ) -> None:
        self.name = name
        self.profiles: list[dict[str, int]] = []
        #: Whether the client loaded the optimised way, of each round.
        self.optimized: list[bool] = []
        #: Processor seconds of client and server in each round.
        self.processor: list[float] = []
        self._options = dict(options or {})
        with contextlib.ExitStack() as stack:
            environ = switch(plain)
            if server is None:
                server = Serving(cache=cache, network=network, serve=serve)
                stack.callback(server.close)
            self._server = server
            self._client = Worker(network.at_client, "pushing", server.endpoint, path, environ=environ)
            stack.callback(self._client.close)
            self._stack = stack.pop_all()

    def round(self) -> float:
        before = processor_seconds(self._server.pid)
        took, busy, profile, optimized = self._client.ask(self._options)
        self.processor.append(busy + processor_seconds(self._server.pid) - before)
        self.profiles.append(profile)
        self.optimized.append(optimized)
        return float(took)

    def close(self) -> None:
        self._stack.close()


def switch(plain: bool) -> dict[str, str]:
    """The environment of a process that loads the plain way, or the optimised one, whatever this one's says.

    Raises PeerAbsent for the plain way where there is none: what it measured would be the other.
    """
    import weightwire

    if plain and "optimized" not in inspect.signature(weightwire.connect).parameters:
        raise PeerAbsent("this weightwire has no plain way to load (GGML_RPC_LOAD_OPT)")
    return {"GGML_RPC_LOAD_OPT": "0" if plain else "1"}


if __name__ == "__main__":
    push_when_told(sys.argv[1], sys.argv[2])
