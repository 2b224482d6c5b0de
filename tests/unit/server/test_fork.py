"""A process forked while a server runs: it may drop its copy, and the server does not notice."""

from __future__ import annotations

import os
import time

import pytest
from support.fakeverbs import FakeVerbs
from support.forks import in_a_fork
from support.leaks import LeakCheck, eventually
from support.raw_client import RawClient

from weightwire import connect
from weightwire.errors import ConfigError
from weightwire.server import Server

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")


def sockets() -> int:
    return sum(
        os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in os.listdir("/proc/self/fd") if _is(fd)
    )


def _is(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def rounds_in_a_while(server: Server, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the acceptor goes round while nobody comes: an idle one sleeps, one that spins does it thousands of
    times.
    """
    rounds: list[int] = []
    acceptor = server._acceptor
    assert acceptor is not None
    patience = acceptor._patience

    def counted() -> float | None:
        rounds.append(1)
        return patience()

    with monkeypatch.context() as patch:
        patch.setattr(acceptor, "_patience", counted)
        time.sleep(0.3)
    return len(rounds)


def test_a_child_that_closes_its_copy_does_not_disturb_the_server(
    no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(port=0, max_clients=2) as server:
        with RawClient(server.port) as client, RawClient(server.port) as idle:
            waiting = RawClient(server.port, hello=False)
            tensor = client.place("t", 100, client.allocate(100))
            client.set(tensor, b"x" * 100)
            client.barrier()

            def close_and_look() -> None:
                for ours in (client, idle, waiting):
                    ours.socket.close()
                server.close()
                server.close()
                assert sockets() == 0
                with pytest.raises(ConfigError, match="process that started it"):
                    server.start()

            assert eventually(lambda: bool(len(server._waiting)))
            assert in_a_fork(close_and_look) == 0
            assert rounds_in_a_while(server, monkeypatch) < 10
            assert client.get(tensor) == b"x" * 100
            idle.barrier()
            waiting.close()
        assert eventually(lambda: server.clients == 0)
        with RawClient(server.port) as late:
            late.barrier()


def test_leaving_the_with_block_in_a_child_is_closing(no_leaks: LeakCheck) -> None:
    server = Server(port=0)
    with RawClient(server.start().port) as client:
        client.barrier()
        assert in_a_fork(lambda: server.__exit__(None, None, None)) == 0
        client.barrier()
    server.close()


def test_a_stray_byte_to_the_acceptor_does_not_make_it_spin(
    no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(port=0) as server:
        assert server._acceptor is not None
        assert server._acceptor._wake is not None
        server._acceptor._wake.send(b"xyz")
        with RawClient(server.port) as client:
            client.barrier()
        assert rounds_in_a_while(server, monkeypatch) < 10


def test_a_server_of_before_the_fork_can_be_started_after_it(no_leaks: LeakCheck) -> None:
    server = Server(port=0)

    def serve() -> None:
        with server, RawClient(server.port) as client:
            client.barrier()

    assert in_a_fork(serve) == 0
    server.close()


def test_what_a_child_may_ask(no_leaks: LeakCheck) -> None:
    with Server(port=0, retain="process") as server:
        with RawClient(server.port) as client:
            client.set(client.place("t", 100, client.allocate(100)), b"x" * 100)
            client.barrier()

            def ask() -> None:
                assert server.clients == 0
                assert server.tensors["t"].view() == b"x" * 100
                with pytest.raises(ConfigError, match="process that started it"):
                    server.forget("t")
                with pytest.raises(ConfigError, match="process that started it"):
                    server.stats()

            assert in_a_fork(ask) == 0
            client.barrier()
        assert server.forget("t")


@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_a_hook_that_forks_and_comes_back(fake: FakeVerbs, no_leaks: LeakCheck, transport: str) -> None:
    """The child is in the midst of serving a client, and must not answer in the parent's place."""
    parent = os.getpid()
    children: list[int] = []

    def fork(tensor: object) -> None:
        child = os.fork()
        if child:
            children.append(child)

    with Server(port=0, on_tensor=fork) as server:
        with connect(server.endpoints[0], timeout=20, transport=transport) as connection:
            assert connection.transport["kind"] == transport
            for _ in range(3):
                connection.push({"t": memoryview(b"x" * 5000)}, verify=True)
        assert os.getpid() == parent
    # Once the session that a child has come back to has ended, so has the only thread it has.
    assert len(children) == 3
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
