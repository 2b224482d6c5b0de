"""Fixtures that more than one folder of tests uses: the real model, the stock peers, and a check for leaks."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from prepare import peers, realmodel
from prepare.run import why_no_model
from support.leaks import LeakCheck
from support.require import do_without
from support.stock import StockClient, StockServer


def pytest_configure() -> None:
    """Undo signals that are ignored because the run is in the background or under nohup: processes that the tests start
    would inherit it.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Take what thousands of tests are made of out of the collector's sight: looking for leaks collects very often."""
    gc.collect()
    gc.freeze()


class StartServer(Protocol):
    """Starts a stock server: protocol, and its cache folder if it is to have one."""

    def __call__(self, protocol: str = peers.FULL_PROTOCOL, cache: Path | None = None) -> StockServer: ...


class StartClient(Protocol):
    """Connects a stock client of some protocol to an endpoint."""

    def __call__(self, endpoint: str, protocol: str = peers.FULL_PROTOCOL) -> StockClient: ...


@pytest.fixture(autouse=True)
def rdma_only_where_asked_for() -> Iterator[None]:
    """Keep on TCP what does not ask for more: it must not depend on the machine, nor on the stand-in libibverbs that
    another test opened.
    """
    os.environ["GGML_RPC_NO_RDMA"] = "1"
    yield
    os.environ.pop("GGML_RPC_NO_RDMA", None)


@pytest.fixture(autouse=True)
def no_index_of_the_users() -> Iterator[None]:
    """Keep what the tests do out of the index of hashes of whoever runs them, and that out of the tests."""
    os.environ["WEIGHTWIRE_INDEX"] = "off"
    yield
    os.environ.pop("WEIGHTWIRE_INDEX", None)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what a test did to the loggers: the command line sets them up for its whole process."""
    loggers = [logging.root, logging.getLogger("weightwire")]
    before = [(logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    yield
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """The real model, a GGUF file of 253,113,024 bytes and 236 tensors."""
    return realmodel.model_ready() or do_without("the real model", why_no_model())


@pytest.fixture(scope="session")
def library_of() -> Callable[[str], Path]:
    """Gives the folder with libggml-rpc.so of the stock peer that speaks a protocol."""

    def find(protocol: str) -> Path:
        found = peers.peer_library(protocol)
        return found or do_without(f"the stock peer of protocol {protocol}", peers.why_missing(protocol))

    return find


@pytest.fixture(scope="session")
def stock_lib(library_of: Callable[[str], Path]) -> Path:
    """The library folder of the newest stock peer (protocol 7.0.0)."""
    return library_of(peers.FULL_PROTOCOL)


@pytest.fixture(params=peers.PROTOCOLS)
def stock_protocol(request: pytest.FixtureRequest, library_of: Callable[[str], Path]) -> str:
    """Each protocol there is a stock peer for, one test per protocol."""
    protocol: str = request.param
    library_of(protocol)
    return protocol


@pytest.fixture
def stock_server(library_of: Callable[[str], Path], tmp_path: Path) -> Iterator[StartServer]:
    """Starts stock servers; they are ended with the test, and what they printed is shown if it fails."""
    started: list[StockServer] = []

    def start(protocol: str = peers.FULL_PROTOCOL, cache: Path | None = None) -> StockServer:
        log = tmp_path / f"stock-server-{len(started)}.log"
        server = StockServer(library_of(protocol), protocol, log, cache)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()
        print(f"--- stock server {server.protocol} (exit code {server.process.returncode})\n{server.output()}")


@pytest.fixture
def stock_client(library_of: Callable[[str], Path], tmp_path: Path) -> Iterator[StartClient]:
    """Connects stock clients; they are ended with the test."""
    started: list[StockClient] = []

    def start(endpoint: str, protocol: str = peers.FULL_PROTOCOL) -> StockClient:
        folder = tmp_path / f"stock-client-{len(started)}"
        folder.mkdir()
        client = StockClient(library_of(protocol), endpoint, folder)
        started.append(client)
        return client

    yield start
    for client in started:
        client.close()


@pytest.fixture
def connected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what comes before a server is asked take nothing of a client's timeout, however busy the machine is."""
    from weightwire.transport import negotiate

    connecting = negotiate.connect_tcp
    monkeypatch.setattr(negotiate, "connect_tcp", lambda endpoint, timeout: connecting(endpoint, 20.0))
    monkeypatch.setattr(negotiate, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture
def no_leaks() -> Iterator[LeakCheck]:
    """Fails a test after which the process has more descriptors or threads than before."""
    check = LeakCheck()
    yield check
    assert check.settled(), check.report()
