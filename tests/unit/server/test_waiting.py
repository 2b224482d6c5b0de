"""A full server: who waits, for how long, and what a client makes of it."""

from __future__ import annotations

import logging
import threading

import pytest
from support.leaks import LeakCheck, eventually
from support.raw_client import RawClient

import weightwire
from weightwire.errors import ServerBusy
from weightwire.server import Server, waiting
from weightwire.wire import Command


def hello(client: RawClient) -> None:
    client.send(Command.HELLO, bytes(client.dialect.hello_request_bytes))


def test_a_client_beyond_the_last_place_waits_until_one_is_free(
    no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "weightwire")
    with Server(port=0, max_clients=2) as server:
        first, second = RawClient(server.port), RawClient(server.port)
        third, fourth = (RawClient(server.port, hello=False) for _ in range(2))
        for client in (third, fourth):
            hello(client)
        assert eventually(lambda: len(caplog.records) == 2)
        assert f"{third.name}: waiting, 2 clients are connected" in caplog.text
        assert server.clients == 2
        first.close()
        assert third.answer()[:2] == b"\7\0"  # in the order in which they came
        second.close()
        assert fourth.answer()[:2] == b"\7\0"
        third.barrier()
        assert server.clients == 2
        third.close()
        fourth.close()
        assert eventually(lambda: server.clients == 0)
        with RawClient(server.port) as late:
            late.barrier()
    assert len(caplog.records) == 2


def test_nobody_waits_longer_than_hello_timeout(no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "weightwire")
    with Server(port=0, max_clients=1) as server, RawClient(server.port) as first:
        server._waiting.seconds = 0.2  # once the first one's HELLO has come, however slow the machine
        with RawClient(server.port, hello=False) as other:
            hello(other)
            assert other.closed()
            assert f"{other.name}: turned away, no place became free in 0.2 s" in caplog.messages
        first.barrier()


def test_the_room_is_bounded(
    no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING", 2)
    caplog.set_level(logging.WARNING, "weightwire")
    with Server(port=0, max_clients=1) as server, RawClient(server.port) as first:
        others = [RawClient(server.port, hello=False) for _ in range(3)]
        assert others[2].closed()
        assert f"{others[2].name}: turned away, too many are waiting for a place already" in caplog.messages
        for client in others:
            client.close()
        first.barrier()


def test_one_who_left_while_waiting_is_no_obstacle(no_leaks: LeakCheck) -> None:
    with Server(port=0, max_clients=1) as server:
        first = RawClient(server.port)
        gone, there = RawClient(server.port, hello=False), RawClient(server.port, hello=False)
        hello(gone)
        gone.close()
        hello(there)
        first.close()
        assert there.answer()[:2] == b"\7\0"
        there.close()


def test_closing_ends_the_wait(no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    with Server(port=0, max_clients=1) as server, RawClient(server.port) as first:
        other = RawClient(server.port, hello=False)
        hello(other)
        assert eventually(lambda: "waiting" in caplog.text)
        server.close()
        assert other.closed()
        assert first.closed()
        other.close()


@pytest.mark.usefixtures("connected_at_once")
def test_our_client_calls_a_full_server_busy(no_leaks: LeakCheck) -> None:
    with (
        Server(port=0, max_clients=1) as server,
        weightwire.connect(server.endpoints[0]),
        pytest.raises(ServerBusy),
    ):
        weightwire.connect(server.endpoints[0], timeout=0.5)


def test_our_client_calls_it_busy_also_when_the_server_ends_the_wait(no_leaks: LeakCheck) -> None:
    with Server(port=0, max_clients=1) as server, weightwire.connect(server.endpoints[0]):
        server._waiting.seconds = 1.3
        with pytest.raises(ServerBusy):
            weightwire.connect(server.endpoints[0], timeout=20)


def test_our_client_is_served_when_a_place_becomes_free(no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    with Server(port=0, max_clients=1) as server:
        first = weightwire.connect(server.endpoints[0])

        def leave() -> None:
            eventually(lambda: "waiting" in caplog.text)
            first.close()

        leaver = threading.Thread(target=leave)
        leaver.start()
        with weightwire.connect(server.endpoints[0], timeout=20) as second:
            second.barrier()
        leaver.join()
