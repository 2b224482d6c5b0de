"""weightwire's client pushing to several servers at once, each in a process of its own, each with its share of a model.

``-m harness.fanout MODEL ENDPOINT=LAYERS...`` is the client: it opens the model once, and for every line of its input
(a JSON object of options of `push_all`) connects, pushes and disconnects. It answers with the seconds from before
connecting to after the push, its processor seconds meanwhile, and for each server the push's profile, with how many
hashes its index knew.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from harness.children import Worker, processor_seconds
from harness.models import Share
from harness.network import Network
from harness.pushing import Serving


def push_when_told(path: str, targets: Sequence[str]) -> None:
    """A round for every line of the input."""
    import weightwire

    aims = [weightwire.Target(endpoint, layers=layers) for endpoint, layers in (each.split("=") for each in targets)]
    with weightwire.open_model(path) as model:
        for line in sys.stdin:
            options = json.loads(line)
            started, busy = time.perf_counter(), time.process_time()
            with weightwire.push_all(model, aims, **options) as pushed:
                took, busy = time.perf_counter() - started, time.process_time() - busy
                pushed.check()
                profiles = []
                for each in pushed:
                    assert each.result is not None
                    summary = each.result.summary
                    profiles.append({**summary.profile.as_dict(), "hashes_known": summary.hashes_known})
            print(json.dumps([took, busy, profiles]), flush=True)


class FanOutPeer:
    """A client that connects anew to all servers for every round; the servers stay.

    ``shares`` are what each server gets, ``networks`` where it is, ``caches`` its directory, and ``options`` those of
    `push_all`. While ``check`` is set every round also reads everything back and compares it with the file, which is
    part of its time.
    """

    def __init__(
        self,
        path: Path,
        shares: Sequence[Share],
        *,
        networks: Sequence[Network],
        caches: Sequence[Path] | None = None,
        options: Mapping[str, object] | None = None,
        name: str = "weightwire",
    ) -> None:
        self.name = name
        self.check = False
        #: The profile of each server, of each round.
        self.profiles: list[list[dict[str, int]]] = []
        #: Processor seconds of client and servers in each round.
        self.processor: list[float] = []
        self._options = dict(options or {})
        self._servers: list[Serving] = []
        with ExitStack() as stack:
            for number, network in enumerate(networks):
                server = Serving(cache=caches[number] if caches else None, network=network)
                stack.callback(server.close)
                self._servers.append(server)
            targets = [f"{server.endpoint}={share.layers}" for server, share in zip(self._servers, shares, strict=True)]
            self._client = Worker(networks[0].at_client, "fanout", path, *targets)
            stack.callback(self._client.close)
            self._stack = stack.pop_all()

    def round(self) -> float:
        before = self._busy()
        took, busy, profiles = self._client.ask({**self._options, "verify": self.check})
        self.processor.append(busy + self._busy() - before)
        self.profiles.append(profiles)
        return float(took)

    def _busy(self) -> float:
        return sum(processor_seconds(server.pid) for server in self._servers)

    def close(self) -> None:
        self._stack.close()


if __name__ == "__main__":
    push_when_told(sys.argv[1], sys.argv[2:])
