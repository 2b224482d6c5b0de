"""Several servers at once: what each gets, that tensors are read once, and how it ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.leaks import LeakCheck
from support.scripted import ScriptedServer, StandIn

import weightwire
from weightwire import Target, push_all
from weightwire.client import hashpool
from weightwire.client.crew import SummedProgress, as_targets, run_all
from weightwire.errors import ConfigError, ModelError, TransportError

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of one tensor over 10 MiB each, and a small one of no layer."""
    random = np.random.default_rng(7)
    tensors = {f"layers.{n}.w": random.integers(0, 255, 11 * MIB + n, dtype=np.uint8) for n in range(4)}
    path = tmp_path_factory.mktemp("fanout") / "model.safetensors"
    save_file({**tensors, "head": np.arange(100, dtype=np.float32)}, path)
    return path


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[weightwire.Server]]:
    """Three servers with a cache each, which keep what they get."""
    with (
        weightwire.Server(port=0, cache=tmp_path / "a", retain="process") as a,
        weightwire.Server(port=0, cache=tmp_path / "b", retain="process") as b,
        weightwire.Server(port=0, cache=tmp_path / "c", retain="process") as c,
    ):
        yield [a, b, c]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the range at each offset was hashed."""
    count: Counter[int] = Counter()
    right, both, together = hashpool.hash_payloads, hashpool.hash_with_digest, hashpool.hash_together

    def counting(payloads, **options):
        count.update(payload.offset for payload in payloads)
        return right(payloads, **options)

    def counting_both(payload, *rest):
        count.update([payload.offset])
        return both(payload, *rest)

    monkeypatch.setattr(hashpool, "hash_payloads", counting)

    def counting_together(payloads, *rest):
        count.update(payload.offset for payload in payloads)
        return together(payloads, *rest)

    monkeypatch.setattr(hashpool, "hash_with_digest", counting_both)
    monkeypatch.setattr(hashpool, "hash_together", counting_together)
    return count


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_every_tensor_is_hashed_once_for_all(
    no_leaks: LeakCheck, servers, model: Path, hashed: Counter[int], threads: int
) -> None:
    endpoints = [server.endpoints[0] for server in servers]
    with push_all(model, endpoints, threads=threads, index=False, verify=True) as pushed:
        for each in pushed.check():
            assert each.result is not None
            assert (each.result.summary.tensors, each.result.summary.misses) == (5, 4)
            assert bytes(each.result["head"].read()) == np.arange(100, dtype=np.float32).tobytes()
    assert sorted(hashed.values()) == [1, 1, 1, 1]
    with weightwire.open_model(model) as opened:
        for server in servers:
            assert set(server.tensors) == set(opened.tensors)
            for name, tensor in opened.tensors.items():
                assert server.tensors[name].view() == tensor.view()


def bytes_read() -> int:
    """What this process has read from files by system calls, sendfile among them (proc_pid_io(5))."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize("threads", [0, 2])
def test_the_file_is_read_once_for_all(
    model: Path, always_settled: None, tmp_path: Path, threads: int, no_leaks: LeakCheck
) -> None:
    """With the index, too, which wants another hash of each tensor."""
    with weightwire.open_model(model) as opened:
        payloads = [tensor.view() for tensor in opened.tensors.values() if tensor.nbytes > 10 * MIB]
        cache = {weightwire.fnv1a64(payload): bytes(payload) for payload in payloads}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ScriptedServer(StandIn(flags=1, cache=cache))) for _ in range(3)]
        endpoints = [server.endpoint for server in servers]
        before = bytes_read()
        with push_all(model, endpoints, threads=threads, index=tmp_path / "index", probe=False) as pushed:
            assert [each.result and each.result.summary.hits for each in pushed.check()] == [4, 4, 4]
        assert 44 * MIB < bytes_read() - before < 45 * MIB


def test_each_gets_what_is_for_it(servers, model: Path) -> None:
    targets = [
        Target(servers[0].endpoints[0], layers="0-1"),
        Target(servers[1].endpoints[0], layers="2-,other"),
        Target(servers[2].endpoints[0], include="head"),
    ]
    with push_all(model, targets, index=False) as pushed:
        assert [each.target for each in pushed] == targets
        pushed.check()
    assert [sorted(server.tensors) for server in servers] == [
        ["layers.0.w", "layers.1.w"],
        ["head", "layers.2.w", "layers.3.w"],
        ["head"],
    ]


def test_the_index_learns_from_several(servers, model: Path, tmp_path: Path, hashed: Counter[int]) -> None:
    endpoints = [server.endpoints[0] for server in servers[:2]]
    time.sleep(max(0.0, 2.5 - (time.time() - model.stat().st_mtime)))  # older than the coarsest time stamps
    for hits in (0, 4):
        with push_all(model, endpoints, index=tmp_path / "index.sqlite3") as pushed:
            assert [each.result.summary.hits for each in pushed.check()] == [hits, hits]
    assert sorted(hashed.values()) == [1, 1, 1, 1], "the second time none was read"


def test_one_that_fails_stops_no_other(no_leaks: LeakCheck, servers, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = f"127.0.0.1:{listener.getsockname()[1]}"
    targets = [nowhere, servers[0].endpoints[0], Target(servers[1].endpoints[0], device=7)]
    with push_all(model, targets, index=False) as pushed:
        assert isinstance(pushed[0].error, TransportError)
        assert pushed[0].connection is pushed[0].result is None
        assert pushed[1].error is None
        assert isinstance(pushed[2].error, ConfigError)
        with pytest.raises(TransportError):
            pushed.check()
    assert len(servers[0].tensors) == 5
    assert all(each.connection is None or each.connection.closed for each in pushed)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"layers": "x"}, "layers"),
        ({"layers": "9-2"}, "layers"),
        ({"layers": ""}, "layers"),
        ({"include": "("}, "regular expression"),
        ({"device": "0"}, "device"),
    ],
)
def test_a_target_that_cannot_be_is_refused_when_it_is_made(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Target("h", **wrong)
    assert caught.value.hint


def test_what_cannot_be_is_said_before_anybody_is_connected_to(
    servers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = servers[0].endpoints[0]
    for targets in (
        [], [endpoint, endpoint], [5], None, 5, b"h:1", ["a:b:c"],
        [Target(endpoint, include="nosuch")], [Target(endpoint, layers="77")],
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            push_all(model, targets)
    for options in ({"cache": "maybe"}, {"threads": -1}, {"progress": 5}, {"read": "x"}):
        with pytest.raises(ConfigError):
            push_all(model, endpoint, index=False, **options)
    for options in (
        {"timeout": -3}, {"transport": "x"}, {"protocol": "0.1"}, {"protocol": 7},
        {"transport": "rdma", "protocol": "3.0"},
    ):  # fmt: skip
        for call in (push_all, weightwire.warm):
            with pytest.raises(ConfigError, match=next(iter(options))):
                call(model, [endpoint, servers[1].endpoints[0]], index=False, **options)
    with monkeypatch.context() as patch:
        patch.setenv("GGML_RDMA_GID", "x")
        patch.delenv("GGML_RPC_NO_RDMA", raising=False)
        for call in (push_all, weightwire.warm):
            with pytest.raises(ConfigError, match="GGML_RDMA_GID"):
                call(model, endpoint, index=False)
    with pytest.raises(ModelError):
        push_all(model.with_name("missing.safetensors"), endpoint)
    assert not servers[0].tensors


def test_endpoints_are_compared_as_they_are_meant() -> None:
    with pytest.raises(ConfigError, match="twice"):
        as_targets(["host", Target("host:50052", layers="1")])
    assert [target.endpoint for target in as_targets(("a", "b:1"))] == ["a", "b:1"]
    for wrong in ("x:y", "", "http://host"):
        with pytest.raises(ConfigError, match="endpoint"):
            Target(wrong)
    assert as_targets(Target("a")) == as_targets("a") == [Target("a")]


@pytest.mark.parametrize("verify", [False, True])
def test_progress_is_the_sum_and_never_goes_back(servers, model: Path, verify: bool) -> None:
    seen: list[tuple[int, int]] = []
    inside = threading.Lock()

    def progress(name: str, done: int, total: int) -> None:
        assert inside.acquire(blocking=False), "one at a time"
        seen.append((done, total))
        inside.release()

    endpoints = [server.endpoints[0] for server in servers]
    with push_all(model, endpoints, index=False, verify=verify, progress=progress) as pushed:
        total = 3 * pushed.check()[0].result.summary.bytes * (2 if verify else 1)
    assert {total for _, total in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


def test_a_callback_that_raises_ends_all_of_it(no_leaks: LeakCheck, servers, model: Path) -> None:
    def progress(name: str, done: int, total: int) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        push_all(model, [server.endpoints[0] for server in servers], index=False, progress=progress)


def test_an_interrupt_closes_every_connection(no_leaks: LeakCheck, model: Path) -> None:
    class Interrupt(BaseException):
        pass

    stuck, connected = threading.Event(), []

    class Stuck(weightwire.Destination):
        def write(self, offset: int, view: memoryview) -> None:
            stuck.wait(60)

        def read(self, offset: int, view: memoryview) -> None:
            view[:] = bytes(view.nbytes)

    def connect(target: Target) -> weightwire.Connection:
        connection = weightwire.connect(target.endpoint)
        connected.append(connection)
        return connection

    def fatal() -> BaseException | None:
        return Interrupt() if len(connected) == 2 else None

    with (
        weightwire.Server(port=0, destination=lambda nbytes, device: Stuck(nbytes)) as one,
        weightwire.Server(port=0, destination=lambda nbytes, device: Stuck(nbytes)) as other,
    ):
        targets = as_targets([one.endpoints[0], other.endpoints[0]])
        with pytest.raises(Interrupt):
            run_all(targets, connect, lambda number, connection: connection.push(model, index=False), fatal)
        stuck.set()
        assert [connection.closed for connection in connected] == [True, True]


def test_who_still_connects_is_left_behind_and_closed(no_leaks: LeakCheck) -> None:
    begun, go_on = threading.Event(), threading.Event()
    with weightwire.Server(port=0) as server:
        made: list[weightwire.Connection] = []

        def connect(target: Target) -> weightwire.Connection:
            begun.set()
            assert go_on.wait(60)
            made.append(weightwire.connect(target.endpoint))
            return made[0]

        def fatal() -> BaseException | None:
            return KeyboardInterrupt() if begun.is_set() else None

        def work(number: int, connection: weightwire.Connection) -> None:
            raise AssertionError("nobody waits for it any more")

        with pytest.raises(KeyboardInterrupt):
            run_all(as_targets(server.endpoints[0]), connect, work, fatal)
        go_on.set()
        deadline = time.monotonic() + 30
        while not (made and made[0].closed):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_model_that_changes_is_an_error_of_each(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "changing.safetensors"
    path.write_bytes(model.read_bytes())

    class Changer(weightwire.Destination):
        def write(self, offset: int, view: memoryview) -> None:
            path.touch()

        def read(self, offset: int, view: memoryview) -> None:
            view[:] = bytes(view.nbytes)

    with (
        weightwire.Server(port=0, destination=lambda nbytes, device: Changer(nbytes)) as one,
        weightwire.Server(port=0, destination=lambda nbytes, device: Changer(nbytes)) as other,
        push_all(path, [one.endpoints[0], other.endpoints[0]], index=False) as pushed,
    ):
        assert all(isinstance(each.error, ModelError) for each in pushed)


@pytest.mark.parametrize(
    "wrong", [{"layers": 5}, {"include": b"x"}, {"endpoint": None}, {"device": "0"}, {"device": True}]
)
def test_a_target_of_wrong_types_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Target(**{"endpoint": "x:1", **wrong})


def test_the_sum_of_rounds() -> None:
    seen: list[int] = []
    summed = SummedProgress(lambda name, done, total: seen.append(done), [10, 20], rounds=2)
    one, other = summed.of(0), summed.of(1)
    assert one is not None
    assert other is not None
    one("a", 10, 10)
    one("a", 10, 10)  # an empty tensor behind it
    one("a", 4, 10)
    other("b", 20, 20)
    summed.finish(0)
    summed.finish(1)
    summed.finish(1)
    assert seen == [10, 10, 14, 34, 40, 60]
    assert SummedProgress(None, [1]).of(0) is None
