"""`Server.stats`: every number against what clients are known to have done."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fakeverbs import FakeVerbs
from support.leaks import LeakCheck, eventually
from support.raw_client import RawClient
from support.rdma import request

import weightwire
from weightwire.cache import TensorCache, progress
from weightwire.cache.directory import entry_name
from weightwire.cache.writing import CacheWriter
from weightwire.config import parse_size
from weightwire.errors import ConfigError, TransportError
from weightwire.hashing import fnv1a64
from weightwire.server import Server, ServerStats, TransportStats, listener
from weightwire.transport.rdma import offer_rdma
from weightwire.transport.tcp import connect_tcp
from weightwire.wire import Command

SIZE = 100_000


class Counting(RawClient):
    """A client that knows how many bytes it has exchanged."""

    sent = 0
    received = 0

    def send(self, cmd: int, payload: bytes = b"", *, size: int | None = None) -> None:
        super().send(cmd, payload, size=size)
        self.sent += 9 + len(payload)

    def receive(self, nbytes: int) -> bytes:
        got = super().receive(nbytes)
        self.received += nbytes
        return got


def push(client: RawClient, name: str, payload: bytes, flag: int = 0) -> None:
    client.set(client.place(name, len(payload), client.allocate(len(payload))), payload, flag=flag)


def reached(server: Server, **wanted: object) -> bool:
    """Whether the numbers become these: what a client has seen, the server may count a moment later."""
    return eventually(lambda: all(getattr(server.stats(), name) == value for name, value in wanted.items()))


def numbers(stats: ServerStats) -> dict[str, int]:
    """What never falls, flat."""
    now = {"uptime", "connections_open", "connections_waiting", "tensors_retained", "bytes_allocated", "bytes_limit"}
    now |= {"rdma_pinned_bytes", "cache_pending", "tcp", "rdma"}
    flat = {name: value for name, value in stats.as_dict().items() if name not in now}
    for kind in ("tcp", "rdma"):
        for name in ("connections", "bytes_received", "bytes_sent"):
            flat[f"{kind}.{name}"] = stats.as_dict()[kind][name]
    return flat


@pytest.fixture
def server(no_leaks: LeakCheck) -> Iterator[Server]:
    with Server(port=0, memory=1 << 24) as running:
        yield running


@pytest.fixture
def cached(tmp_path: Path, no_leaks: LeakCheck) -> Iterator[Server]:
    with Server(port=0, memory=parse_size("64MiB"), cache=tmp_path / "cache") as running:
        yield running


def test_before_the_start_and_after_the_end() -> None:
    server = Server(port=0, memory=4096)
    assert server.stats() == ServerStats()
    with server:
        assert eventually(lambda: server.stats().uptime > 0)
        with RawClient(server.port) as client:
            push(client, "x", bytes(100))
            client.barrier()
        assert reached(server, connections_open=0)
        before = server.stats()
    after = server.stats()
    assert numbers(after) == numbers(before)
    assert after.uptime >= before.uptime
    assert server.stats().uptime == after.uptime, "it has ended"
    assert (after.tensors_completed, after.tensors_retained) == (1, 0)
    assert (after.bytes_allocated, after.bytes_limit) == (0, 4096)


def test_it_is_a_snapshot_that_does_not_change(server: Server) -> None:
    stats = server.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.bytes_limit = 0  # type: ignore[misc]
    assert isinstance(stats, weightwire.ServerStats)
    assert isinstance(stats.tcp, TransportStats)
    assert stats.as_dict()["tcp"] == {"open_connections": 0, "connections": 0, "bytes_received": 0, "bytes_sent": 0}
    assert stats.as_dict()["bytes_received"] == 0
    # Whatever comes to be counted for one session is added up for those that have ended, too.
    assert {field.type for field in dataclasses.fields(weightwire.server.stats.Counts)} == {"int"}


def test_several_clients_at_once(server: Server) -> None:
    """Every byte on the wire, while they are there and when they have gone."""
    clients = [Counting(server.port) for _ in range(3)]

    def work(client: Counting, index: int) -> None:
        for number in range(5):
            push(client, f"{index}.{number}", bytes(SIZE + index))
        tensor = client.place("back", 10, client.allocate(10))
        client.set(tensor, bytes(10))
        client.get(tensor)

    with contextlib.ExitStack() as stack:
        for client in clients:
            stack.enter_context(client)
        threads = [threading.Thread(target=work, args=item) for item in zip(clients, range(3), strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sent, received = (sum(getattr(client, name) for client in clients) for name in ("sent", "received"))
        assert sent > 15 * SIZE
        assert received > 0
        done = {"bytes_received": sent, "bytes_sent": received, "tensors_completed": 18, "connections_accepted": 3}
        assert reached(server, **done, tcp=TransportStats(3, 3, sent, received)), server.stats()
        stats = server.stats()
        assert (stats.connections_open, stats.tensors_retained) == (3, 18)
        # Whole pages: five buffers of 25 and one of 1 for each.
        assert stats.bytes_allocated == 3 * (5 * 25 + 1) * 4096
        assert stats.bytes_limit == 1 << 24
    assert reached(server, **done, tcp=TransportStats(0, 3, sent, received), connections_open=0), server.stats()
    assert (server.stats().tensors_retained, server.stats().connections_failed) == (0, 0)
    assert reached(server, bytes_allocated=0)


def test_a_push(server: Server) -> None:
    model = {f"t{index}": memoryview(bytes(SIZE)) for index in range(7)}
    with weightwire.connect(server.endpoints[0]) as connection:
        connection.push(model)
        assert reached(server, tensors_completed=7, tensors_retained=7)
        assert 7 * SIZE < server.stats().bytes_received < 7 * (SIZE + 1000)


def test_a_tensor_under_way_counts(server: Server) -> None:
    with RawClient(server.port) as client:
        nbytes = 10 << 20
        tensor = client.place("x", nbytes, client.allocate(nbytes))
        before = server.stats().bytes_received
        head = client.dialect.encode_set_tensor(tensor, 0, 0)
        client.send(Command.SET_TENSOR, head + bytes(9 << 20), size=len(head) + nbytes)
        assert eventually(lambda: server.stats().bytes_received - before > 8 << 20)
        assert server.stats().tensors_completed == 0
        client.socket.sendall(bytes(1 << 20))
        assert reached(server, tensors_completed=1, bytes_received=before + 9 + len(head) + nbytes)


def test_nothing_falls_while_clients_come_and_go(server: Server) -> None:
    def come_and_go() -> None:
        for _ in range(25):
            with RawClient(server.port) as client:
                push(client, "x", bytes(5000))
                client.barrier()

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    last = numbers(server.stats())
    looks = 0
    while any(thread.is_alive() for thread in threads):
        stats = server.stats()
        now = numbers(stats)
        assert all(now[name] >= last[name] for name in last), (last, now)
        assert stats.connections_open <= stats.connections_accepted
        assert stats.tcp.connections <= stats.connections_accepted
        last, looks = now, looks + 1
    for thread in threads:
        thread.join()
    assert looks
    assert reached(server, tensors_completed=75, connections_accepted=75, connections_open=0)


# How connections end.


def test_one_that_asks_for_what_cannot_be_had(server: Server) -> None:
    with RawClient(server.port) as client:
        client.send(Command.FREE_BUFFER, client.dialect.encode_handle(7))
        assert client.closed()
    assert reached(server, connections_open=0, connections_failed=1, bad_requests=1, protocol_errors=0)


@pytest.mark.parametrize("what", ["no HELLO", "HELLO of another length", "unknown", "length", "header", "again"])
def test_one_that_breaks_the_form(server: Server, what: str) -> None:
    with RawClient(server.port, hello=what not in ("no HELLO", "HELLO of another length")) as client:
        if what == "no HELLO":
            client.send(Command.GET_ALIGNMENT)
        elif what == "HELLO of another length":
            client.send(Command.HELLO, bytes(3))
        elif what == "unknown":
            client.send(200)
        elif what == "again":
            client.send(Command.HELLO, bytes(24))
        else:
            client.send(Command.SET_TENSOR if what == "header" else Command.FREE_BUFFER, bytes(3))
        assert client.closed()
    assert reached(server, connections_open=0, connections_failed=1, bad_requests=0, protocol_errors=1)
    assert server.stats().tcp.connections == (0 if "HELLO" in what else 1)


def test_one_that_goes_inside_a_request(server: Server) -> None:
    with RawClient(server.port) as client:
        client.send(Command.ALLOC_BUFFER, bytes(3), size=12)
    assert reached(server, connections_open=0, connections_failed=1, bad_requests=0, protocol_errors=0)


def test_one_that_goes_between_requests_or_is_ended_has_not_failed() -> None:
    with Server(port=0, memory=4096) as server:
        RawClient(server.port).close()
        RawClient(server.port, hello=False).close()
        assert reached(server, connections_accepted=2, connections_open=0)
        client = RawClient(server.port)
        client.send(Command.ALLOC_BUFFER, bytes(3), size=12)
        assert reached(server, connections_open=1, connections_accepted=3)
    client.close()
    stats = server.stats()
    assert (stats.connections_open, stats.connections_failed, stats.connections_refused) == (0, 0, 0)
    assert stats.tcp.connections == 2, "the one that said no HELLO is none of them"


def test_a_hook_that_fails() -> None:
    class Broken(weightwire.Destination):
        def write(self, offset: int, view: memoryview) -> None:
            raise ValueError("no")

        def read(self, offset: int, view: memoryview) -> None: ...

        def close(self) -> None: ...

    with Server(port=0, destination=lambda nbytes, device: Broken(nbytes)) as server, RawClient(server.port) as client:
        push(client, "x", bytes(10))
        assert client.closed()
        assert reached(server, connections_failed=1, bad_requests=0, protocol_errors=0, connections_open=0)


def test_full() -> None:
    with Server(port=0, memory=4096, max_clients=1, hello_timeout=2.0) as server, RawClient(server.port):
        with RawClient(server.port, hello=False) as second:
            assert reached(server, connections_waiting=1, connections_open=1, connections_accepted=1)
            assert second.closed()
        assert reached(server, connections_waiting=0, connections_refused=1, connections_accepted=1)
        assert server.stats().connections_failed == 0


def test_no_thread_for_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    with RawClient(server.port, hello=False) as client:
        assert client.closed()
    assert reached(server, connections_failed=1, connections_accepted=0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_fork_is_told_to_ask_elsewhere(server: Server) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            server.stats()
        except ConfigError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# The cache.


def test_hits_and_misses(cached: Server, tmp_path: Path) -> None:
    payloads = [os.urandom(SIZE + index) for index in range(3)]
    for payload in payloads[:2]:
        (tmp_path / "cache" / entry_name(fnv1a64(payload))).write_bytes(payload)
    for _ in range(2):
        with RawClient(cached.port) as client:
            at = client.allocate(1 << 20)
            answers = [
                client.set_from_cache(client.place(f"t{index}", len(payload), at, index << 18), fnv1a64(payload))
                for index, payload in enumerate(payloads)
            ]
            assert answers == [True, True, False]
    filled = 2 * (2 * SIZE + 1)
    assert reached(cached, connections_open=0, cache_hits=4, cache_misses=2, cache_filled_bytes=filled)
    stats = cached.stats()
    assert stats.tensors_completed == 4
    assert stats.bytes_received < SIZE, "nothing of them crossed the wire"
    assert (stats.cache_corrupt, stats.cache_saved, stats.cache_save_failures) == (0, 0, 0)


def test_a_bad_entry(tmp_path: Path, no_leaks: LeakCheck) -> None:
    payload = os.urandom(SIZE)
    cache = TensorCache(tmp_path)
    entry = tmp_path / entry_name(fnv1a64(payload))

    def ask(server: Server) -> None:
        entry.write_bytes(bytes(SIZE))
        with RawClient(server.port) as client:
            tensor = client.place("x", SIZE, client.allocate(SIZE))
            assert not client.set_from_cache(tensor, fnv1a64(payload))

    with Server(port=0, memory=1 << 20, cache=cache) as server:
        ask(server)
        assert reached(server, cache_corrupt=1, cache_misses=1, cache_hits=0, cache_filled_bytes=0)
    with Server(port=0, memory=1 << 20, cache=cache) as server:
        assert server.stats().cache_corrupt == 0, "that was before its time"
        ask(server)
        assert reached(server, cache_corrupt=1)
    assert server.stats().cache_corrupt == 1


@pytest.mark.parametrize("optimized", [True, False], ids=["optimised", "plain"])
@pytest.mark.parametrize("hook", [False, True], ids=["host memory", "destination"])
def test_saved_once(tmp_path: Path, hook: bool, optimized: bool) -> None:
    class Memory(weightwire.server.HostMemory):
        """Not the class itself, so not written past."""

    payload = os.urandom(11 << 20)
    destination = (lambda nbytes, device: Memory(nbytes)) if hook else None
    options = {"destination": destination, "optimized": optimized}
    with Server(port=0, cache=tmp_path, memory=1 << 26, **options) as server:
        for _ in range(2):
            with RawClient(server.port) as client:
                push(client, "large", payload, flag=1)
                push(client, "small", bytes(100))
                client.barrier()
            assert reached(server, cache_saved=1, cache_pending=0, connections_open=0)
        assert server.stats().cache_save_failures == 0
    assert os.listdir(tmp_path) == [entry_name(fnv1a64(payload))]


@pytest.mark.parametrize("optimized", [True, False], ids=["optimised", "plain"])
@pytest.mark.parametrize("hook", [False, True], ids=["host memory", "destination"])
def test_what_cannot_be_saved(tmp_path: Path, hook: bool, optimized: bool) -> None:
    class Memory(weightwire.server.HostMemory):
        """As above."""

    destination = (lambda nbytes, device: Memory(nbytes)) if hook else None
    options = {"destination": destination, "optimized": optimized}
    with Server(port=0, cache=tmp_path / "cache", memory=1 << 26, **options) as server:
        shutil.rmtree(tmp_path / "cache")
        with RawClient(server.port) as client:
            push(client, "large", bytes(11 << 20), flag=1)
            client.barrier()
            assert reached(server, cache_save_failures=1, cache_saved=0, cache_pending=0)
        assert server.stats().tensors_completed == 1


def test_a_client_that_leaves_has_not_failed_to_be_saved(cached: Server) -> None:
    with RawClient(cached.port) as client:
        nbytes = 11 << 20
        tensor = client.place("x", nbytes, client.allocate(nbytes))
        head = client.dialect.encode_set_tensor(tensor, 0, 1)
        client.send(Command.SET_TENSOR, head + bytes(9 << 20), size=len(head) + nbytes)
        assert eventually(lambda: cached.stats().bytes_received > 8 << 20)
    assert reached(cached, connections_open=0, connections_failed=1, cache_pending=0)
    assert (cached.stats().cache_saved, cached.stats().cache_save_failures) == (0, 0)


def test_what_is_not_on_the_disk_yet(cached: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = os.fsync

    def slow(fd: int) -> None:
        assert go_on.wait(60)
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    try:
        with RawClient(cached.port) as client:
            push(client, "large", os.urandom(11 << 20), flag=1)
            client.barrier()
            assert reached(cached, cache_pending=1, cache_saved=0)
    finally:
        go_on.set()
    assert reached(cached, cache_pending=0, cache_saved=1)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes nothing until the event is set, and nobody with patience for it."""
    go_on = threading.Event()
    real = CacheWriter.write

    def write(writer: CacheWriter, chunk: memoryview) -> None:
        assert go_on.wait(60)
        real(writer, chunk)

    monkeypatch.setattr(CacheWriter, "write", write)
    monkeypatch.setattr(progress, "PATIENCE", 0.2)
    yield go_on
    go_on.set()


def test_a_disk_that_cannot_keep_up(cached: Server, stuck: threading.Event) -> None:
    with RawClient(cached.port) as client:
        for name in ("one", "two", "three"):
            push(client, name, os.urandom(SIZE), flag=1)
        client.barrier()
        assert reached(cached, cache_pending=3, cache_save_failures=0, cache_saved=0)
        stuck.set()
        assert reached(cached, cache_pending=0, cache_save_failures=0, cache_saved=3)
    assert cached.stats().tensors_completed == 3


def test_memory_that_is_wanted_back_before_it_was_written(cached: Server, stuck: threading.Event) -> None:
    with RawClient(cached.port) as client:
        tensor = client.place("x", SIZE, client.allocate(SIZE))
        client.set(tensor, os.urandom(SIZE), flag=1)
        client.set(tensor, bytes(SIZE))
        client.barrier()
        stuck.set()
        assert reached(cached, cache_pending=0, cache_save_failures=1, cache_saved=0)


def test_what_is_given_up_at_the_end(
    tmp_path: Path, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    monkeypatch.setattr(listener, "_JOIN_SECONDS", 0.3)
    with Server(port=0, memory=1 << 20, cache=tmp_path) as server, RawClient(server.port) as client:
        push(client, "x", os.urandom(SIZE), flag=1)
        client.barrier()
        assert reached(server, cache_pending=1)
    stuck.set()
    assert reached(server, cache_pending=0, cache_save_failures=1, cache_saved=0)


# RDMA.


def test_a_client_on_rdma(server: Server, fake: FakeVerbs) -> None:
    with weightwire.connect(server.endpoints[0], transport="rdma") as connection:
        connection.push({"x": memoryview(bytes(SIZE))})
        assert reached(server, tensors_completed=1)
        stats = server.stats()
        assert (stats.rdma.open_connections, stats.rdma.connections) == (1, 1)
        assert stats.tcp.connections == 0
        assert stats.rdma.bytes_received > SIZE
        assert 0 < stats.rdma.bytes_sent < SIZE
        assert stats.tcp.bytes_received == 9 + 24, "HELLO"
        assert stats.tcp.bytes_sent == 8 + 28
        # At least a ring of one chunk each way.
        assert stats.rdma_pinned_bytes >= 2 * (256 << 10)
        assert stats.bytes_received == stats.tcp.bytes_received + stats.rdma.bytes_received
    assert reached(server, connections_open=0)
    after = server.stats()
    assert (after.rdma.open_connections, after.rdma.connections, after.rdma_pinned_bytes) == (0, 1, 0)
    assert after.rdma.bytes_received >= stats.rdma.bytes_received
    assert after.connections_failed == 0


def test_a_client_that_goes_on_over_tcp(server: Server, fake: FakeVerbs) -> None:
    """As a stock one does whose own side failed to activate: it never says so."""
    tcp = connect_tcp(server.endpoints[0], 20.0)
    offer = offer_rdma(tcp, {})
    try:
        tcp.send(request(Command.HELLO, offer.caps))
        assert any(tcp.recv(36)[12:]), "the server has agreed"
        assert reached(server, rdma=TransportStats(), tcp=TransportStats(0, 0, 9 + 24, 36)), "it may come either way"
        assert server.stats().rdma_pinned_bytes > 0
        for _ in range(2):
            tcp.send(request(Command.GET_MAX_SIZE, bytes(4)))
            tcp.recv(16)
        assert reached(server, tcp=TransportStats(1, 1, 9 + 24 + 2 * 13, 36 + 2 * 16), rdma=TransportStats())
        assert server.stats().rdma_pinned_bytes == 0
    finally:
        offer.close()
        tcp.close()
    assert reached(server, connections_open=0, connections_failed=0)


def test_rdma_required(fake: FakeVerbs) -> None:
    with Server(port=0, memory=4096, transport="rdma") as server:
        with pytest.raises((weightwire.WeightwireError, TransportError)):
            weightwire.connect(server.endpoints[0], transport="tcp")
        assert eventually(lambda: server.stats().bad_requests >= 1)
        assert server.stats().tcp.connections == server.stats().rdma.connections == 0
