"""weightwire's own client against its own server, which runs as a process of its own, as operators run it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import weightwire
from weightwire.profile import LoadProfile


class WeightwirePeer:
    """Connect, push a model, barrier, disconnect; the model is opened once, the connection is new every round."""

    def __init__(
        self, path: Path, *, serve: Sequence[str] = (), cache: str = "never", name: str = "weightwire"
    ) -> None:
        self.name = name
        self._cache = cache
        self._model = weightwire.open_model(path)
        self.nbytes = self._model.nbytes
        self.profiles: list[LoadProfile] = []
        self._server = subprocess.Popen(
            [sys.executable, "-m", "weightwire", "serve", "--port", "0", "--json", *serve],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        self.endpoint = json.loads(self._server.stdout.readline())["endpoint"]

    def round(self) -> float:
        started = time.perf_counter()
        with weightwire.connect(self.endpoint) as connection:
            result = connection.push(self._model, cache=self._cache)
            took = time.perf_counter() - started
        self.profiles.append(result.summary.profile)
        return took

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(10)
        self._model.close()
