"""weightwire's pair with client and server each in a process of its own, at either end of a network.

``-m harness.pushing ENDPOINT MODEL`` is the client: it opens the model once, and for every line of its input (a JSON
object of options of `Connection.push`) connects, pushes and disconnects. It answers with the seconds from before
connecting to after the push, its processor seconds meanwhile, and the push's profile, with how many hashes
its index knew.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.children import Worker, processor_seconds
from harness.network import LOOPBACK, Network


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
            known = {"hashes_known": result.summary.hashes_known}
            print(json.dumps([took, busy, {**result.summary.profile.as_dict(), **known}]), flush=True)


class PushingPeer:
    """A weightwire server that stays, and a client that connects anew for every round.

    ``options`` are those of `Connection.push`.
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
    ) -> None:
        self.name = name
        self.profiles: list[dict[str, int]] = []
        #: Processor seconds of client and server in each round.
        self.processor: list[float] = []
        self._options = dict(options or {})
        keep = [] if cache is None else ["--cache", str(cache)]
        command = [*network.at_server, sys.executable, "-m", "weightwire", "serve", "--json"]
        with contextlib.ExitStack() as stack:
            self._server = subprocess.Popen(
                [*command, "--host", network.host, "--port", "0", *keep, *serve], stdout=subprocess.PIPE, text=True
            )
            stack.callback(self._stop)
            assert self._server.stdout is not None
            endpoint = json.loads(self._server.stdout.readline())["endpoint"]
            self._client = Worker(network.at_client, "pushing", endpoint, path)
            stack.callback(self._client.close)
            self._stack = stack.pop_all()

    def round(self) -> float:
        before = processor_seconds(self._server.pid)
        took, busy, profile = self._client.ask(self._options)
        self.processor.append(busy + processor_seconds(self._server.pid) - before)
        self.profiles.append(profile)
        return float(took)

    def close(self) -> None:
        self._stack.close()

    def _stop(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()


if __name__ == "__main__":
    push_when_told(sys.argv[1], sys.argv[2])
