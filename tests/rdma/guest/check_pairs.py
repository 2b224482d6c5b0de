"""weightwire to weightwire over RDMA, bytes compared. Run by pytest inside the guest: see tests/rdma/test_guest.py."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.guest import ADDRESS, ServeProcess, weightwire_json
from support.leaks import LeakCheck
from support.model_slice import LARGE

import weightwire
from weightwire.errors import CompletionError, PeerClosed, RdmaUnavailable, TransferTimeout
from weightwire.server import Destination
from weightwire.transport.rdma import RdmaStream

MIB = 1 << 20
ON_RDMA = "RDMA on rxe0"

Serve = Callable[..., ServeProcess]


def assert_on_rdma(connection: weightwire.Connection) -> None:
    transport = connection.transport
    assert transport["kind"] == "rdma", transport["reason"]
    assert (transport["device"], transport["gid"], transport["send_depth"]) == ("rxe0", f"::ffff:{ADDRESS}", 8)
    assert transport["reason"]


def test_a_model_arrives(slice_path: Path, caplog: pytest.LogCaptureFixture, no_leaks: LeakCheck) -> None:
    caplog.set_level(logging.INFO, "weightwire")
    with (
        weightwire.Server(ADDRESS, 0, transport="rdma") as server,
        weightwire.open_model(slice_path) as model,
        weightwire.connect(server.endpoints[0], transport="rdma") as connection,
    ):
        assert_on_rdma(connection)
        pushed = connection.push(model, verify=True)
        assert pushed.summary.verified
        assert len(model.tensors) == 14
        assert pushed.summary.sent == model.nbytes
        assert model.tensors[LARGE].nbytes > 10 * MIB
        for name, tensor in model.tensors.items():
            assert server.tensors[name].view() == tensor.view(), name
            assert bytes(pushed[name].read()) == tensor.view(), name
    # One line from each end.
    assert sum(ON_RDMA in record.getMessage() for record in caplog.records) == 2


def test_between_programs(slice_path: Path, serve: Serve) -> None:
    server = serve("--transport", "rdma")
    pushing = ["push", str(slice_path), server.endpoint, "--verify", "--json", "--quiet"]
    done = weightwire_json(*pushing, "--transport", "rdma", "--include", r"blk\.0\.ffn_.*")
    assert done["transport"]["kind"] == "rdma"
    assert (done["transport"]["device"], done["transport"]["send_depth"]) == ("rxe0", 8)
    assert (done["verified"], done["tensors"]) == (True, 4)
    assert server.log().count(ON_RDMA) == 1


def test_registered_memory_is_sent_from_where_it_is(serve: Serve) -> None:
    payload = os.urandom(3 * MIB)
    with weightwire.connect(serve().endpoint) as connection:
        assert_on_rdma(connection)
        with connection.register(payload):
            pushed = connection.push({"w": memoryview(payload)}, verify=True)
        assert pushed.summary.verified
        assert pushed.summary.profile.direct_bytes >= 3 * MIB - 4096


@pytest.mark.parametrize("side", ["client", "server"])
def test_tcp_where_one_side_wants_it(serve: Serve, side: str) -> None:
    server = serve("--transport", "tcp") if side == "server" else serve()
    payload = os.urandom(MIB)
    with weightwire.connect(server.endpoint, transport="tcp" if side == "client" else "auto") as connection:
        assert connection.transport["kind"] == "tcp"
        assert connection.transport["reason"]
        print(connection.transport["reason"])
        assert connection.push({"w": memoryview(payload)}, verify=True).summary.verified
    assert ON_RDMA not in server.log()


def test_rdma_required_and_not_offered(no_leaks: LeakCheck, serve: Serve) -> None:
    server = serve("--transport", "tcp")
    with pytest.raises(RdmaUnavailable) as caught:
        weightwire.connect(server.endpoint, transport="rdma")
    assert caught.value.reason


class SlowMemory(Destination):
    """Takes what is written a little later."""

    def write(self, offset: int, view: memoryview) -> None:
        time.sleep(0.02)

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = bytes(len(view))


def test_eight_in_flight_to_a_slow_server() -> None:
    with (
        weightwire.Server(ADDRESS, 0, destination=SlowMemory) as server,
        weightwire.connect(server.endpoints[0], transport="rdma") as connection,
    ):
        connection.push({"w": memoryview(bytes(8 * MIB))})
        stream = connection._stream
        assert isinstance(stream, RdmaStream)
        # The ring has eight slots: never more, and here as many.
        assert stream.counts["high_water"] == 8


def pushing_to(server: ServeProcess, timeout: float) -> tuple[threading.Thread, list[BaseException], threading.Event]:
    """A push of 256 MiB on a thread: it, what it raised, and whether the first bytes have gone."""
    raised: list[BaseException] = []
    under_way = threading.Event()
    connection = weightwire.connect(server.endpoint, transport="rdma", timeout=timeout)
    model: dict[str, Any] = {f"w{index}": memoryview(bytes(4 * MIB)) for index in range(64)}

    def push() -> None:
        try:
            with connection:
                connection.push(model, progress=lambda *_: under_way.set())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    assert under_way.wait(30)
    return thread, raised, under_way


def test_a_server_that_is_killed_under_a_push(no_leaks: LeakCheck, serve: Serve) -> None:
    server = serve()
    thread, raised, _ = pushing_to(server, timeout=30.0)
    server.process.kill()
    started = time.monotonic()
    thread.join(25)
    print(f"noticed after {time.monotonic() - started:.2f} s: {raised}")
    # Whichever is seen first: that TCP has closed, or that the queue pair at the other end is gone.
    assert [type(error) for error in raised] in ([PeerClosed], [CompletionError])


def test_a_server_that_is_stopped_under_a_push(no_leaks: LeakCheck, serve: Serve) -> None:
    server = serve()
    thread, raised, _ = pushing_to(server, timeout=2.0)
    os.kill(server.process.pid, signal.SIGSTOP)
    thread.join(30)
    assert [type(error) for error in raised] == [TransferTimeout]


def test_a_client_that_is_killed(no_leaks: LeakCheck) -> None:
    """The server lets go of its memory, and serves the next one."""
    with weightwire.Server(ADDRESS, 0, memory=40 * MIB) as server:
        client = os.fork()
        if client == 0:
            try:
                connection = weightwire.connect(server.endpoints[0], transport="rdma")
                connection.allocate(30 * MIB)
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        assert os.waitpid(client, 0)[1] == signal.SIGKILL
        deadline = time.monotonic() + 20
        with weightwire.connect(server.endpoints[0], transport="rdma") as connection:
            while connection.device_memory()[0] < 40 * MIB:
                assert time.monotonic() < deadline, "the server still holds what the killed client had"
                time.sleep(0.05)
