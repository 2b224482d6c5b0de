"""The stream over real queue pairs of rdma_rxe. Run by pytest inside the guest: see tests/rdma/test_guest.py."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.ends import tcp_ends
from support.guest import ADDRESS, DEPTHS
from support.idle import sleeps_on
from support.rdma import connect_rdma, request, response

import weightwire.rdma
from weightwire._native._link import RECEIVE_SLOTS, SEND_SLOTS
from weightwire.errors import PeerClosed, RdmaUnavailable, RegistrationError, TransferTimeout
from weightwire.ranges import FileRange
from weightwire.transport.rdma import REQUESTS, RESPONSES, RdmaStream, offer_rdma
from weightwire.transport.registration import CHUNK, locked_memory_limit
from weightwire.transport.tcp import TcpStream

NOBODY = 65534
KIB = 1024
PAYLOAD = os.urandom(CHUNK + 13) * 40

Pair = tuple[RdmaStream, RdmaStream]


@pytest.fixture
def pair() -> Iterator[Pair]:
    client, server = connect_rdma(*tcp_ends(ADDRESS))
    yield client, server
    client.close()
    server.close()


class Running:
    """A call on another thread."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, args=(call, *arguments))
        self.thread.start()

    def run(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            self.value = call(*arguments)
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self.thread.join(60)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.value


def test_the_device_is_seen() -> None:
    (device,) = weightwire.rdma.devices()
    (port,) = device.ports
    assert (device.name, device.transport, port.state, port.link_layer) == ("rxe0", "ib", "active", "Ethernet")
    assert {gid.text: gid.type for gid in port.gids}[f"::ffff:{ADDRESS}"] == "RoCE v2"


def receive(server: RdmaStream) -> bytes:
    assert server.recv(1) == b"\x06"
    got = bytearray(int.from_bytes(server.recv(8), "little"))
    server.recv_into(got)
    server.send(response(b"done"))
    return bytes(got)


@pytest.mark.parametrize("how", ["ring", "registered", "file"])
def test_bytes_arrive(pair: Pair, how: str) -> None:
    client, server = pair
    receiving = Running(receive, server)
    head = b"\x06" + len(PAYLOAD).to_bytes(8, "little")
    if how == "file":
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.write(PAYLOAD)
            file.flush()
            client.send_range([head], FileRange(file.fileno(), 0, len(PAYLOAD)))
    elif how == "registered":
        with client.register(PAYLOAD):
            client.send(head, PAYLOAD)
        assert client.counts["direct_bytes"] >= len(PAYLOAD) - 4096
    else:
        client.send(head, PAYLOAD)
    assert client.recv(12) == response(b"done")
    assert receiving.result() == PAYLOAD


def test_a_fork_that_lives_on_takes_no_pinned_page_away(pair: Pair) -> None:
    """What is written after a fork, to the ring and to registered memory, is what the device sends and receives."""
    client, server = pair
    payload = bytearray(len(PAYLOAD))
    head = b"\x06" + len(PAYLOAD).to_bytes(8, "little")
    with client.register(payload):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            payload[:] = PAYLOAD
            for data in (payload, PAYLOAD):
                receiving = Running(receive, server)
                client.send(head, data)
                assert client.recv(12) == response(b"done")
                assert receiving.result() == PAYLOAD
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert client.counts["direct_bytes"] >= len(PAYLOAD) - 4096


def test_eight_in_flight_against_a_peer_that_reads_slowly(pair: Pair) -> None:
    client, server = pair
    sending = Running(client.send, request(6, PAYLOAD))
    deadline = time.monotonic() + 60
    while client.counts["sends"] < RECEIVE_SLOTS + SEND_SLOTS and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    # The peer has read nothing and has one in each of its slots, so that as many as our ring has are on their way.
    assert client.counts["sends"] == RECEIVE_SLOTS + SEND_SLOTS == 32
    got = b""
    while len(got) < 9 + len(PAYLOAD):
        time.sleep(0.05)
        got += server.recv(min(CHUNK, 9 + len(PAYLOAD) - len(got)))
    sending.result()
    assert got[9:] == PAYLOAD
    print("SENDs in flight at most:", client.counts["high_water"])
    assert client.counts["high_water"] == 8


def test_answers_left_unread(pair: Pair) -> None:
    client, server = pair

    def serve() -> None:
        for _ in range(60):
            server.recv(9 + 12)
            server.send(response(b"y" * 16))

    serving = Running(serve)
    for _ in range(60):
        client.send(request(11, bytes(12)))
    assert client.recv(60 * 24) == response(b"y" * 16) * 60
    serving.result()


def test_both_ways_at_once(pair: Pair) -> None:
    client, server = pair
    there, back = request(6, PAYLOAD), response(PAYLOAD)
    sending = [Running(client.send, there), Running(server.send, back)]
    receiving = [Running(server.recv, len(there)), Running(client.recv, len(back))]
    assert [one.result() for one in receiving] == [there, back]
    for one in sending:
        one.result()


def test_data_comes_before_the_end(pair: Pair) -> None:
    client, server = pair
    client.send(request(6, PAYLOAD[: 10 * CHUNK]))
    client.close()
    assert server.recv(9 + 10 * CHUNK)[9:] == PAYLOAD[: 10 * CHUNK]
    assert server.recv_or_eof(1) is None


def test_those_who_wait_use_no_processor(pair: Pair) -> None:
    """One for a request, as a server does, and one for an answer."""
    client, server = pair
    serving, asking = Running(server.recv_or_eof, 1), Running(client.recv, 12)
    sleeps_on(serving.thread.native_id, asking.thread.native_id)
    server.send(response(b"done"))
    assert asking.result() == response(b"done")
    client.close()
    assert serving.result() is None


@contextmanager
def peer_process(serve: Callable[[RdmaStream], None]) -> Iterator[tuple[RdmaStream, int]]:
    """A server in a process of its own: the client's stream, and the process."""
    listener = socket.create_server((ADDRESS, 0))
    child = os.fork()
    if child == 0:
        try:
            accepted, _ = listener.accept()
            tcp = TcpStream(accepted, 30.0)
            offer = offer_rdma(tcp, {})
            peer = tcp.recv(24)
            tcp.send(offer.caps)
            serve(offer.activate(tcp, peer, RESPONSES))
        finally:
            os._exit(0)
    sock = socket.create_connection(listener.getsockname())
    listener.close()
    tcp = TcpStream(sock, 30.0)
    offer = offer_rdma(tcp, {})
    tcp.send(offer.caps)
    stream = offer.activate(tcp, tcp.recv(24), REQUESTS)
    try:
        yield stream, child
    finally:
        stream.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def echo(stream: RdmaStream) -> None:
    while stream.recv_or_eof(1) is not None:
        size = int.from_bytes(stream.recv(8), "little")
        payload = stream.recv(size)
        stream.send(response(payload))


def test_between_processes() -> None:
    with peer_process(echo) as (client, _):
        for nbytes in (0, 1, 5000, 3 * CHUNK + 1):
            client.send(request(6, PAYLOAD[:nbytes]))
            assert client.recv(8 + nbytes) == response(PAYLOAD[:nbytes])


@pytest.mark.parametrize("doing", ["recv", "send"])
@pytest.mark.usefixtures("nothing_held")
def test_a_peer_that_is_killed(doing: str) -> None:
    with peer_process(lambda stream: time.sleep(60)) as (client, child):
        call: Any = (client.recv, 1) if doing == "recv" else (client.send, request(6, PAYLOAD))
        blocked = Running(*call)
        time.sleep(1)
        os.kill(child, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(PeerClosed):
            blocked.result()
        print(f"a killed peer was noticed after {time.monotonic() - started:.2f} s")


@pytest.mark.usefixtures("nothing_held")
def test_a_peer_that_is_stopped() -> None:
    with peer_process(echo) as (client, child):
        os.kill(child, signal.SIGSTOP)
        client.timeout = 2.0
        with pytest.raises(TransferTimeout) as caught:
            client.send(request(6, PAYLOAD))
        assert caught.value.phase == "send"
        assert 0 < caught.value.bytes_done < len(PAYLOAD)


def explained(error: RdmaUnavailable) -> bool:
    cause = error.__cause__
    return isinstance(cause, RegistrationError) and error.errno == errno.ENOMEM and len(cause.attempts) == 4


def rung_in(kib: int) -> str:
    """What depth a process of nobody's gets under a limit of locked memory, and why no more."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = "?"
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (kib * KIB, kib * KIB))
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            assert locked_memory_limit() == kib * KIB
            one, other = tcp_ends(ADDRESS)
            try:
                offer = offer_rdma(one, {})
                text = str(offer.attempts[-1].send_slots)
                offer.close()
            except RdmaUnavailable as error:
                text = f"tcp: {error.reason}" if explained(error) else f"failed: {error!r}"
                one.send(b"on")
                text += "" if other.recv(2) == b"on" else " and TCP does not work"
        except BaseException as error:
            text = f"failed: {error!r}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def test_the_ladder_under_a_real_limit() -> None:
    found = {kib: rung_in(kib) for kib in (*DEPTHS, 6396, 4096, 1024, 64)}
    for kib, rung in found.items():
        print(f"{kib:6} KiB: {rung}")
    assert {kib: found[kib] for kib in DEPTHS} == {kib: str(depth) for kib, depth in DEPTHS.items()}
    for kib in (6396, 4096, 1024, 64):
        assert found[kib].startswith("tcp: ")
    assert "within 64 KiB of locked memory" in found[64]
