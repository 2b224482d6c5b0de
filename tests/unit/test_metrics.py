"""Metrics for Prometheus: what is written, as its own parser reads it, and the endpoint that serves it."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from support.everywhere import run_script
from support.leaks import LeakCheck, eventually
from support.raw_client import RawClient

import weightwire
from weightwire import metrics
from weightwire.errors import ConfigError, TransportError
from weightwire.metrics import MetricsEndpoint, ServerCollector
from weightwire.server import ServerStats

TREE = Path(__file__).resolve().parents[2]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    """Every sample by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def expected(stats: ServerStats) -> Samples:
    """What a snapshot is to look like, the time aside."""
    found: Samples = {("weightwire_build_info", (("version", weightwire.__version__),)): 1.0}
    for kind, carried in (("tcp", stats.tcp), ("rdma", stats.rdma)):
        label = (("transport", kind),)
        found["weightwire_open_connections", label] = carried.open_connections
        found["weightwire_connections_total", label] = carried.connections
        found["weightwire_rx_bytes_total", label] = carried.bytes_received
        found["weightwire_tx_bytes_total", label] = carried.bytes_sent
    for name, value in {
        "accepted_connections_total": stats.connections_accepted,
        "refused_connections_total": stats.connections_refused,
        "failed_connections_total": stats.connections_failed,
        "waiting_connections": stats.connections_waiting,
        "bad_requests_total": stats.bad_requests,
        "protocol_errors_total": stats.protocol_errors,
        "completed_tensors_total": stats.tensors_completed,
        "retained_tensors": stats.tensors_retained,
        "allocated_bytes": stats.bytes_allocated,
        "memory_limit_bytes": stats.bytes_limit,
        "rdma_pinned_bytes": stats.rdma_pinned_bytes,
        "cache_hits_total": stats.cache_hits,
        "cache_misses_total": stats.cache_misses,
        "cache_filled_bytes_total": stats.cache_filled_bytes,
        "cache_corrupt_entries_total": stats.cache_corrupt,
        "cache_saved_entries_total": stats.cache_saved,
        "cache_save_failures_total": stats.cache_save_failures,
        "cache_pending_entries": stats.cache_pending,
    }.items():
        found[f"weightwire_{name}", ()] = value
    return found


@pytest.fixture
def server(no_leaks: LeakCheck) -> Iterator[weightwire.Server]:
    with weightwire.Server(port=0, memory=1 << 24, retain="process") as running:
        yield running


def test_every_number_of_a_snapshot_is_there() -> None:
    """With numbers that are all different, so that none can stand for another."""
    values = iter(range(1, 1000))

    def filled(kind: type) -> object:
        return kind(
            **{
                name: next(values) if name not in ("tcp", "rdma") else filled(weightwire.server.TransportStats)
                for name in kind.__dataclass_fields__  # type: ignore[attr-defined]
            }
        )

    stats = filled(ServerStats)
    assert isinstance(stats, ServerStats)

    class Frozen:
        def stats(self) -> ServerStats:
            return stats

    registry = CollectorRegistry()
    registry.register(ServerCollector(Frozen()))  # type: ignore[arg-type]
    found = samples(generate_latest(registry).decode())
    assert found == {**expected(stats), ("weightwire_uptime_seconds", ()): stats.uptime}
    # Connections by transport are there; those that have not said HELLO yet are in no metric.
    assert set(found.values()) == {float(number) for number in range(1, next(values))} - {stats.connections_open}


def test_the_names_are_as_prometheus_wants_them(server: weightwire.Server) -> None:
    registry = CollectorRegistry()
    registry.register(ServerCollector(server))
    # The strict form: its parser refuses what the other lets pass.
    families = list(parse_openmetrics(generate_openmetrics(registry).decode()))
    assert {family.type for family in families} == {"counter", "gauge", "info"}
    for family in families:
        assert re.fullmatch(r"weightwire_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        assert ("total" in family.name) is False
        assert all(sample.name.endswith("_total") for sample in family.samples) == (family.type == "counter")


def test_two_servers_do_not_go_into_one_registry(server: weightwire.Server) -> None:
    registry = CollectorRegistry()
    registry.register(ServerCollector(server))
    with pytest.raises(ValueError, match="weightwire_"):
        registry.register(ServerCollector(weightwire.Server(port=0)))


def test_a_scrape_of_a_server_at_work(server: weightwire.Server) -> None:
    with MetricsEndpoint(server) as endpoint:
        model = {f"t{index}": memoryview(bytes(100_000)) for index in range(5)}
        with weightwire.connect(server.endpoints[0]) as one, weightwire.connect(server.endpoints[0]) as two:
            one.push(model)
            two.push(model)
            assert eventually(lambda: server.stats().tensors_completed == 10)

            def seen() -> Samples:
                found = samples(scrape(endpoint.url))
                del found["weightwire_uptime_seconds", ()]
                return found

            assert eventually(lambda: seen() == expected(server.stats())), (seen(), expected(server.stats()))
            assert seen()["weightwire_open_connections", (("transport", "tcp"),)] == 2
        assert eventually(lambda: seen()["weightwire_open_connections", (("transport", "tcp"),)] == 0)
        assert seen()["weightwire_completed_tensors_total", ()] == 10
        assert seen()["weightwire_retained_tensors", ()] == 5
        assert seen()["weightwire_rx_bytes_total", (("transport", "tcp"),)] > 1_000_000
        server.close()
        assert seen()["weightwire_completed_tensors_total", ()] == 10


def test_there_is_nothing_but_the_metrics(server: weightwire.Server) -> None:
    with MetricsEndpoint(server) as endpoint:
        assert endpoint.url == f"http://127.0.0.1:{endpoint.port}/metrics"
        for method, path, status in (
            ("GET", "/", 404),
            ("GET", "/metrics/../etc/passwd", 404),
            ("POST", "/metrics", 501),
            ("GET", "/metrics?name[]=weightwire_uptime_seconds", 200),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=20)
            connection.request(method, path)
            answer = connection.getresponse()
            assert answer.status == status
            body = answer.read().decode()
            connection.close()
        assert {name for name, _ in samples(body)} == {"weightwire_uptime_seconds"}


def test_nothing_of_it_is_global(server: weightwire.Server) -> None:
    before = generate_latest(REGISTRY).decode().count("weightwire_")
    with MetricsEndpoint(server) as one, MetricsEndpoint(server) as two:
        assert one.port != two.port
        assert scrape(one.url)
        assert scrape(two.url)
        assert generate_latest(REGISTRY).decode().count("weightwire_") == before == 0
    with pytest.raises(OSError):
        scrape(one.url)
    one.close()


def test_ipv6(server: weightwire.Server) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        with pytest.raises(TransportError, match="::1"):
            MetricsEndpoint(server, "::1")
        return
    with MetricsEndpoint(server, "::1") as endpoint:
        assert endpoint.url == f"http://[::1]:{endpoint.port}/metrics"
        assert "weightwire_build_info" in scrape(endpoint.url)


def test_a_name_with_several_addresses(server: weightwire.Server) -> None:
    with MetricsEndpoint(server, "localhost") as endpoint:
        assert "weightwire_build_info" in scrape(endpoint.url)


def test_where_it_cannot_listen(server: weightwire.Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=str(port)) as caught:
            MetricsEndpoint(server, port=port)
        assert caught.value.hint
    with pytest.raises(ConfigError):
        MetricsEndpoint(server, "")
    with pytest.raises(ConfigError):
        MetricsEndpoint(server, port=70000)


def test_no_thread_for_it(server: weightwire.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    def cannot(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot)
        with pytest.raises(TransportError, match="can't start new thread"):
            MetricsEndpoint(server)
    with MetricsEndpoint(server) as endpoint:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", cannot)
            with pytest.raises((OSError, http.client.HTTPException)):
                scrape(endpoint.url)
        assert scrape(endpoint.url)


INTERRUPTED = """
import os, threading, traceback
from support.everywhere import Everywhere
from weightwire import metrics, threads
from weightwire.server import Server

def held():
    return len(os.listdir("/proc/self/fd"))

said = []
threading.excepthook = lambda arguments: said.append(arguments.exc_value)
server = Server(port=0)
metrics.MetricsEndpoint(server).close()
made = metrics.MetricsEndpoint.__init__.__code__
everywhere = Everywhere(metrics, threads)
for _ in everywhere:
    before = held()
    endpoint = metrics.MetricsEndpoint.__new__(metrics.MetricsEndpoint)
    try:
        everywhere.trace(lambda: endpoint.__init__(server))
    except KeyboardInterrupt as error:
        everywhere.count += 1
        if all(frame.f_code is not made for frame, _ in traceback.walk_tb(error.__traceback__)):
            endpoint.close()  # it came when that had been made, to whoever made it
    else:
        endpoint.close()
    everywhere.settle(lambda: held() > before)
    assert not said, said
print(everywhere.count)
"""


def test_an_interrupt_while_it_is_made() -> None:
    """It leaves no thread and no socket, though there is nothing to close."""
    assert run_script(INTERRUPTED) > 10


def test_who_says_nothing_holds_up_nobody(server: weightwire.Server) -> None:
    """Neither the others nor the end; that no thread stays, `no_leaks` sees."""
    with MetricsEndpoint(server) as endpoint:
        silent = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(3)]
        assert "weightwire_build_info" in scrape(endpoint.url)
    for connection in silent:
        connection.settimeout(20)
        with connection:
            assert connection.recv(1) == b""


def test_who_says_nothing_is_not_waited_for(server: weightwire.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics._Scrape, "timeout", 0.2)
    with MetricsEndpoint(server) as endpoint, socket.create_connection(("127.0.0.1", endpoint.port)) as silent:
        silent.settimeout(20)
        silent.sendall(b"GET /met")
        assert silent.recv(1) == b""


def test_too_many_at_once(server: weightwire.Server) -> None:
    with MetricsEndpoint(server) as endpoint:
        silent = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(metrics._MAX_SCRAPES)]
        with socket.create_connection(("127.0.0.1", endpoint.port)) as surplus:
            surplus.settimeout(20)
            assert surplus.recv(1) == b"", "they came in order, so this is the last"
        for connection in silent:
            connection.close()

        def served() -> bool:
            try:
                return "weightwire_build_info" in scrape(endpoint.url)
            except (OSError, http.client.HTTPException):
                return False

        assert eventually(served)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_closing_it_in_a_fork(server: weightwire.Server) -> None:
    with MetricsEndpoint(server) as endpoint:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                endpoint.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert scrape(endpoint.url)


def test_a_failure_is_not_hidden(server: weightwire.Server, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    with MetricsEndpoint(server) as endpoint, RawClient(server.port):
        monkeypatch.setattr(server, "stats", lambda: 1 / 0)
        with pytest.raises((OSError, http.client.HTTPException)):
            scrape(endpoint.url)
        assert eventually(lambda: "ZeroDivisionError" in caplog.text)


def test_without_prometheus_client() -> None:
    """In a process that cannot import it."""
    code = """
import sys
sys.modules["prometheus_client"] = None
try:
    import weightwire.metrics
except ImportError as error:
    print(error.name, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("prometheus_client weightwire.metrics needs prometheus_client: pip install ")


def test_nothing_else_imports_it() -> None:
    code = """
import sys
from weightwire import *
import weightwire.cli.root, weightwire.cli.serve, weightwire.server
with Server(port=0) as server:
    server.stats()
print("weightwire.server.listener" in sys.modules, [name for name in sys.modules if "prometheus" in name])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"


def test_the_extra() -> None:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    assert extras["metrics"] == ["prometheus_client"]
    assert "prometheus_client" in extras["test"]
    assert "prometheus_client" in project["dependency-groups"]["test"]
    assert project["project"]["dependencies"] == ["numpy", "click", "rich", "blake3"]
