"""weightwire to weightwire over RDMA, bytes compared. Run by pytest inside the guest: see tests/rdma/test_guest.py."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forks import in_a_fork
from support.guest import ADDRESS, ServeProcess, rdma_objects, weightwire_json
from support.leaks import LeakCheck, eventually
from support.model_slice import LARGE

import weightwire
from weightwire.errors import (
    CompletionError,
    PeerClosed,
    RdmaUnavailable,
    TransferTimeout,
    TransportError,
    VersionError,
)
from weightwire.server import Destination
from weightwire.transport.rdma import RdmaStream

MIB = 1 << 20
ON_RDMA = "RDMA on rxe0"
CONNECTING = 60.0

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
    # Connecting may take long where there is much else to do; what is proved comes after it.
    connection = weightwire.connect(server.endpoint, transport="rdma", timeout=CONNECTING)
    connection._stream.timeout = timeout
    model: dict[str, Any] = {f"w{index}": memoryview(bytes(4 * MIB)) for index in range(64)}

    def push() -> None:
        try:
            with connection:
                connection.push(model, progress=lambda *_: under_way.set())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    assert under_way.wait(60)
    return thread, raised, under_way


@pytest.mark.usefixtures("nothing_held")
def test_a_server_that_is_killed_under_a_push(no_leaks: LeakCheck, serve: Serve) -> None:
    server = serve()
    thread, raised, _ = pushing_to(server, timeout=300.0)
    server.process.kill()
    started = time.monotonic()
    # Far within its own deadline: it is noticed, not waited for.
    thread.join(80)
    print(f"noticed after {time.monotonic() - started:.2f} s: {raised}")
    # Whichever is seen first: that TCP has closed, or that the queue pair at the other end is gone.
    assert [type(error) for error in raised] in ([PeerClosed], [CompletionError])


@pytest.mark.usefixtures("nothing_held")
def test_a_server_that_is_stopped_under_a_push(no_leaks: LeakCheck, serve: Serve) -> None:
    server = serve()
    thread, raised, _ = pushing_to(server, timeout=2.0)
    os.kill(server.process.pid, signal.SIGSTOP)
    thread.join(80)
    assert [type(error) for error in raised] == [TransferTimeout]


@pytest.mark.usefixtures("nothing_held")
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
        deadline = time.monotonic() + 60
        with weightwire.connect(server.endpoints[0], transport="rdma") as connection:
            while connection.device_memory()[0] < 40 * MIB:
                assert time.monotonic() < deadline, "the server still holds what the killed client had"
                time.sleep(0.05)


@pytest.mark.usefixtures("nothing_held")
def test_a_push_that_is_interrupted(slice_path: Path, serve: Serve, tmp_path: Path) -> None:
    """Ctrl-C while the server takes nothing."""
    server = serve()
    said = tmp_path / "said"
    with said.open("w") as log:
        pushing = subprocess.Popen(
            [sys.executable, "-P", "-m", "weightwire", "push", str(slice_path), server.endpoint, "--transport", "rdma"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while ON_RDMA not in server.log():
            assert pushing.poll() is None, said.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(server.process.pid, signal.SIGSTOP)
        pushing.send_signal(signal.SIGINT)
        code = pushing.wait(60)
    os.kill(server.process.pid, signal.SIGCONT)
    assert code == 130, said.read_text()
    with weightwire.connect(server.endpoint, transport="rdma", timeout=CONNECTING) as connection:
        connection.barrier()


def test_a_fork_of_the_client(serve: Serve) -> None:
    """A child's first byte would go out on its parent's queue pair."""
    payload = os.urandom(MIB)
    with weightwire.connect(serve().endpoint, transport="rdma", timeout=CONNECTING) as connection:

        def use() -> None:
            with pytest.raises(TransportError, match="belongs to the process that was forked"):
                connection.device_memory()
            connection.close()

        assert in_a_fork(use) == 0
        assert connection.push({"w": memoryview(payload)}, verify=True).summary.verified


@pytest.mark.timeout(400)
def test_hundreds_of_connections_leave_nothing(no_leaks: LeakCheck) -> None:
    before = rdma_objects()
    with weightwire.Server(ADDRESS, 0, transport="rdma") as server:
        for index in range(300):
            with weightwire.connect(server.endpoints[0], transport="rdma", timeout=CONNECTING) as connection:
                if index == 0:
                    inside = rdma_objects()
                elif index % 50 == 10:
                    connection.push({"w": memoryview(bytes(MIB))})
            if index == 60:
                resident = peak_resident()
    print(f"inside {inside}, resident {resident} KiB after 60 connections, {peak_resident()} KiB after all")
    assert inside["qp"] == before["qp"] + 2
    assert inside["mr"] == before["mr"] + 4
    assert eventually(lambda: rdma_objects() == before, 60), (before, rdma_objects())
    # Rings of 8 MiB at each end: one pair left behind in fifty would be several times this.
    assert peak_resident() - resident < 16 << 10


def peak_resident() -> int:
    """Most memory this process has had so far, in KiB."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def refusal(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a command line that fails, and the error it prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "weightwire", *arguments, "--json"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    error: dict[str, Any] = json.loads(done.stdout)["error"]
    return done.returncode, error


def test_a_server_that_nobody_could_reach_over_rdma() -> None:
    code, error = refusal("serve", "--port", "0", "--transport", "rdma")
    assert (code, error["type"]) == (3, "RdmaUnavailable")
    assert "no GID of rxe0 is the local address 127.0.0.1" in error["reason"]
    assert ADDRESS in error["hint"]


def test_every_address_will_do(serve: Serve) -> None:
    server = serve("--host", "0.0.0.0", "--transport", "rdma")
    port = server.endpoint.rpartition(":")[2]
    with weightwire.connect(f"{ADDRESS}:{port}", timeout=CONNECTING) as connection:
        assert_on_rdma(connection)
    with pytest.raises(VersionError, match=r"requires RDMA, which was not offered \(no GID of rxe0"):
        weightwire.connect(f"127.0.0.1:{port}", timeout=CONNECTING)


def test_the_demo_finds_the_device() -> None:
    done = weightwire_json("demo", "--size", "1MiB", "--transport", "rdma", "--json", "-q")
    assert (done["transport"]["kind"], done["transport"]["device"], done["verified"]) == ("rdma", "rxe0", True)
