"""The server as a whole: its life, many clients at once, and what it gives back."""

from __future__ import annotations

import errno
import gc
import logging
import random
import socket
import threading
from typing import Any

import numpy as np
import pytest
from support.leaks import LeakCheck, eventually, mappings
from support.raw_client import RawClient

from weightwire.errors import ConfigError, TransportError
from weightwire.server import ServedTensor, Server, accepting, listener
from weightwire.wire import Command


def test_nothing_happens_before_start(no_leaks: LeakCheck) -> None:
    server = Server(port=0)
    assert server.endpoints == ()
    assert server.port == 0
    assert len(server.tensors) == 0
    server.close()
    server.close()
    with pytest.raises(ConfigError, match="closed"):
        server.start()


def test_starting_twice_is_starting_once(no_leaks: LeakCheck) -> None:
    with Server(port=0) as server:
        port = server.port
        assert server.start() is server
        assert server.port == port > 0
        assert server.endpoints == (f"127.0.0.1:{port}",)
        with RawClient(port) as client:
            client.barrier()


def test_a_port_that_is_taken(no_leaks: LeakCheck) -> None:
    with Server(port=0) as first:
        second = Server(port=first.port)
        with pytest.raises(TransportError) as caught:
            second.start()
        assert caught.value.errno == errno.EADDRINUSE
        second.close()


def test_it_can_be_closed_while_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    asked, answer = threading.Event(), threading.Event()

    def getaddrinfo(*_: Any, flags: int = 0, **__: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        asked.set()
        assert answer.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    server = Server("slow", port=0)
    raised: list[Exception] = []

    def start() -> None:
        try:
            server.start()
        except Exception as error:
            raised.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    assert asked.wait(20)
    closing = threading.Thread(target=server.close)
    closing.start()
    closing.join(20)
    waits = closing.is_alive()
    answer.set()
    starting.join(20)
    closing.join(20)
    assert not waits
    assert isinstance(raised[0], ConfigError)
    assert "closed" in raised[0].detail
    assert server.endpoints == ()


@pytest.mark.parametrize("when", ["look_up", "listen_tcp", "available_memory"])
def test_a_signal_handler_that_closes_it_while_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, no_leaks: LeakCheck, when: str
) -> None:
    server = Server(port=0, cache=tmp_path / "cache")
    right = getattr(listener, when)

    def interrupted(*arguments: Any) -> Any:
        found = right(*arguments)
        server.close()
        return found

    monkeypatch.setattr(listener, when, interrupted)
    with pytest.raises(ConfigError, match="closed"):
        server.start()
    assert not (tmp_path / "cache").exists()


def test_a_cache_directory_that_cannot_be_made(tmp_path: Any, no_leaks: LeakCheck) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cache directory"):
        Server(port=0, cache=tmp_path / "file").start()


def test_ipv6(no_leaks: LeakCheck) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        with pytest.raises(TransportError, match="::1"):
            Server("::1", 0).start()
        return
    with Server("::1", 0) as server:
        assert server.endpoints == (f"[::1]:{server.port}",)
        with RawClient(server.port, host="::1") as client:
            client.barrier()


def test_close_wakes_idle_and_busy_clients(no_leaks: LeakCheck) -> None:
    server = Server(port=0).start()
    idle, busy, silent = RawClient(server.port), RawClient(server.port), RawClient(server.port, hello=False)
    tensor = busy.place("t", 1 << 20, busy.allocate(1 << 20))
    head = busy.dialect.encode_set_tensor(tensor, 0, 0)
    busy.send(Command.SET_TENSOR, head, size=len(head) + (1 << 20))
    assert eventually(lambda: server.clients == 3)
    server.close()
    assert server.clients == 0
    for client in (idle, busy, silent):
        assert client.closed()
        client.close()
    assert not server.tensors
    with pytest.raises(ConnectionRefusedError):
        RawClient(server.port)


def test_close_wakes_a_server_that_is_stuck_sending(no_leaks: LeakCheck) -> None:
    server = Server(port=0).start()
    with RawClient(server.port) as client:
        tensor = client.place("t", 64 << 20, client.allocate(64 << 20))
        client.send(Command.GET_TENSOR, client.dialect.encode_get_tensor(tensor, 0, 64 << 20))
        client.receive(8)  # the answer has begun, and nobody takes the rest
        server.close()
        assert server.clients == 0


def test_serve_forever_returns_when_closed(no_leaks: LeakCheck) -> None:
    server = Server(port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    assert eventually(lambda: bool(server.endpoints))
    with RawClient(server.port) as client:
        client.barrier()
    server.close()
    thread.join(20)
    assert not thread.is_alive()


def test_a_callback_may_close_the_server(no_leaks: LeakCheck) -> None:
    server = Server(port=0, on_tensor=lambda tensor: server.close())
    server.start()
    with RawClient(server.port) as client:
        client.set(client.place("t", 10, client.allocate(10)), bytes(10))
        assert client.closed()
    assert eventually(lambda: not server.tensors)


def test_a_second_close_waits_for_the_first(no_leaks: LeakCheck) -> None:
    release, inside, done = threading.Event(), threading.Event(), threading.Event()

    def slow(tensor: ServedTensor) -> None:
        inside.set()
        release.wait(20)

    server = Server(port=0, on_tensor=slow).start()
    with RawClient(server.port) as client:
        client.set(client.place("t", 10, client.allocate(10)), bytes(10))
        assert inside.wait(20)
        first = threading.Thread(target=server.close)
        first.start()
        assert eventually(lambda: client.closed())
        seen: list[bool] = []

        def close_too() -> None:
            server.close()
            seen.append(server.clients == 0)
            done.set()

        second = threading.Thread(target=close_too)
        second.start()
        assert not done.wait(0.2)
        release.set()
        first.join(20)
        second.join(20)
    assert seen == [True]


def test_closing_again_from_within_does_not_wait_for_itself(
    no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_JOIN_SECONDS", 60.0)
    returned: list[str] = []

    def close_twice(tensor: ServedTensor) -> None:
        server.close()
        server.close()
        returned.append(tensor.name)

    server = Server(port=0, on_tensor=close_twice).start()
    with RawClient(server.port) as client:
        client.set(client.place("t", 10, client.allocate(10)), bytes(10))
        assert eventually(lambda: returned == ["t"]), "whoever waits does so for a minute"


def test_who_came_and_who_left_is_in_the_log(no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightwire.server")
    with Server(port=0) as server:
        with RawClient(server.port, hello=False):  # somebody who only looks whether the port is open
            assert eventually(lambda: server.clients == 1)
        assert eventually(lambda: server.clients == 0)
        with RawClient(server.port) as client:
            name = client.name
            buffer = client.allocate(100)
            client.set(client.place("a", 50, buffer), bytes(50))
            client.set(client.place("b", 50, buffer, 50), bytes(50))
            client.barrier()
        assert eventually(lambda: server.clients == 0)
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("session")]
    assert lines[0] == f"{name}: connected"
    assert len(lines) == 2
    received = (9 + 24) + (9 + 12) + (9 + 8) + 2 * (9 + 305 + 50) + (9 + 4)
    sent = (8 + 28) + (8 + 16) + (8 + 8) + (8 + 16)
    assert lines[1].startswith(f"{name}: left after ")
    assert lines[1].endswith(f"tensors completed: 2, bytes received: {received}, bytes sent: {sent}")


def test_a_system_out_of_descriptors_does_not_end_the_server(
    no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "_ACCEPT_PAUSE", 0.02)
    accept = socket.socket.accept
    attempts: list[int] = []

    def none_left(self: socket.socket) -> Any:
        attempts.append(1)
        if len(attempts) < 4:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", none_left)
    with Server(port=0) as server, RawClient(server.port) as client:
        client.barrier()
    assert len(attempts) == 4
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "Too many open files" in caplog.text


def test_a_system_out_of_threads_turns_the_client_away(
    no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "_ACCEPT_PAUSE", 0.02)
    with Server(port=0) as server:
        with monkeypatch.context() as patch:

            def no_thread(self: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(ConnectionError):
                RawClient(server.port)
        with RawClient(server.port) as client:
            client.barrier()
        # Said after the connection was closed, and before the next was accepted.
        assert "can't start new thread" in caplog.text


def test_eight_clients_at_once_each_see_their_own_bytes(no_leaks: LeakCheck) -> None:
    failures: list[BaseException] = []
    told: list[str] = []
    lock = threading.Lock()

    def note(tensor: ServedTensor) -> None:
        with lock:
            told.append(tensor.name)

    def work(number: int) -> None:
        try:
            dice = random.Random(number)
            with RawClient(server.port) as client:
                for turn in range(3):
                    buffer = client.allocate(1 << 20)
                    sent = {}
                    for index in range(30):
                        nbytes = dice.randrange(1, 20_000)
                        tensor = client.place(f"{number}.{turn}.{index}", nbytes, buffer, index * 32768)
                        sent[index] = tensor, dice.randbytes(nbytes)
                        client.set(*sent[index])
                    for tensor, payload in sent.values():
                        assert client.get(tensor) == payload
                        assert bytes(server.tensors[tensor.label].view()) == payload
                    client.free(buffer[0])
                client.barrier()
        except BaseException as error:
            failures.append(error)

    with Server(port=0, on_tensor=note, memory=8 << 20) as server:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert len(set(told)) == len(told) == 8 * 3 * 30
        assert eventually(lambda: server.clients == 0)
        assert not server.tensors


def test_capacity_is_shared_and_comes_back_when_a_client_leaves(no_leaks: LeakCheck) -> None:
    with Server(port=0, memory=1 << 20) as server, RawClient(server.port) as two:
        with RawClient(server.port) as one:
            one.allocate(1 << 19)
            assert two.barrier() == (1 << 19, 1 << 20)
            assert two.try_allocate((1 << 19) + 1) == (0, 0)
            two.allocate(1 << 19)
            assert one.try_allocate(1) == (0, 0)
        assert eventually(lambda: two.barrier()[0] == 1 << 19)


def test_the_default_capacity_is_what_is_available(no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "available_memory", lambda: 123_456)
    with Server(port=0) as server, RawClient(server.port) as client:
        assert client.barrier() == (123_456, 123_456)


def test_tensors_of_a_connection_go_with_it_but_arrays_stay(no_leaks: LeakCheck) -> None:
    expected = np.arange(1000, dtype="<f4")
    with Server(port=0, memory=1 << 20) as server:
        with RawClient(server.port) as client:
            client.set(client.place("w", 4000, client.allocate(4000), type_code=0, ne=(1000,)), expected.tobytes())
            client.barrier()
            array = server.tensors["w"].numpy()
        assert eventually(lambda: "w" not in server.tensors)
        np.testing.assert_array_equal(array, expected)
        with RawClient(server.port) as client:
            assert client.barrier()[0] == (1 << 20) - 4096
            del array
            gc.collect()
            assert client.barrier()[0] == 1 << 20


def test_tensors_of_a_process_stay_until_replaced_forgotten_or_closed(no_leaks: LeakCheck) -> None:
    server = Server(port=0, retain="process", memory=1 << 20).start()
    with RawClient(server.port) as client:
        buffer = client.allocate(200)
        client.set(client.place("a", 100, buffer), b"a" * 100)
        client.set(client.place("b", 100, buffer, 100), b"b" * 100)
        client.free(buffer[0])
        client.barrier()
    assert eventually(lambda: server.clients == 0)
    assert sorted(server.tensors) == ["a", "b"]
    assert bytes(server.tensors["a"].view()) == b"a" * 100
    with RawClient(server.port) as client:
        client.set(client.place("a", 50, client.allocate(50)), b"A" * 50)
        client.barrier()
        assert bytes(server.tensors["a"].view()) == b"A" * 50
        assert server.forget("b")
        assert not server.forget("b")
        gc.collect()
        assert client.barrier()[0] == (1 << 20) - 4096
    server.close()
    assert not server.tensors


def test_nothing_is_left_behind(no_leaks: LeakCheck) -> None:
    before = mappings()
    for _ in range(5):
        with Server(port=0) as server:
            for _ in range(4):
                with RawClient(server.port) as client:
                    nbytes = 8 << 20
                    client.set(client.place("t", nbytes, client.allocate(nbytes)), bytes(nbytes))
                    client.barrier()
    gc.collect()

    def large_ones_gone() -> bool:
        return sum(_nbytes(one) >= 8 << 20 for one in mappings()) <= sum(_nbytes(one) >= 8 << 20 for one in before) + 8

    # The threads' stacks are of that size too, and the C library keeps some of them for the next thread.
    assert eventually(large_ones_gone)


def _nbytes(mapping: str) -> int:
    start, end = (int(part, 16) for part in mapping.split("-"))
    return end - start


def test_importing_starts_nothing(no_leaks: LeakCheck) -> None:
    import subprocess
    import sys

    code = (
        "import sys, threading, logging; import weightwire.server; "
        "assert threading.active_count() == 1; assert not logging.getLogger().handlers; "
        "assert not {'numpy', 'click', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
