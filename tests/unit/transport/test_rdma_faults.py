"""What an RDMA connection does when something breaks: a named error, in its time, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.ends import tcp_ends
from support.fakeverbs import (
    DEVICE_FATAL,
    FLUSHED,
    PORT_ERR,
    QP_FATAL,
    RETRY_EXC_ERR,
    RNR_RETRY_EXC_ERR,
    SUCCESS,
    FakeVerbs,
)
from support.pace import Pace, slow_and_not_stalled
from support.rdma import connect_rdma, pair_number, request, response

from weightwire.errors import CompletionError, PeerClosed, TransferTimeout, TransportError, VerbsError
from weightwire.transport.rdma import RdmaStream
from weightwire.transport.registration import CHUNK

Pair = tuple[RdmaStream, RdmaStream]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.001)


def sleeping_in(fake: FakeVerbs, call: Callable[[], Any]) -> Any:
    """Start a call on a thread, and come back when it sleeps."""
    arms = fake.get("arms")
    started = call()
    wait_for(lambda: fake.get("arms") > arms)
    return started


# The peer leaves.


def test_the_end_in_good_order(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    waiting = sleeping_in(fake, lambda: background(server.recv_or_eof, 1))
    client.close()
    assert waiting.result() is None
    assert server.recv_or_eof(1) is None
    with pytest.raises(PeerClosed) as caught:
        server.recv(1)
    assert (caught.value.position, caught.value.bytes_done) == ("before", 0)


def test_what_arrived_is_delivered_before_the_end(rdma_pair: Pair) -> None:
    client, server = rdma_pair
    message = request(6, os.urandom(5 * CHUNK))
    client.send(message)
    client.close()
    assert server.recv(len(message)) == message
    assert server.recv_or_eof(1) is None


def test_the_end_inside_a_message(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    client.send(request(6, b"12345")[:12])
    waiting = sleeping_in(fake, lambda: background(server.recv, 14))
    client.close()
    with pytest.raises(PeerClosed) as caught:
        waiting.result()
    assert (caught.value.position, caught.value.bytes_done) == ("inside", 12)
    assert "the peer closed the connection" in caught.value.detail


def test_a_reset(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    with socket.socket(fileno=os.dup(client.fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    waiting = sleeping_in(fake, lambda: background(server.recv_or_eof, 1))
    client.close()
    with pytest.raises(PeerClosed) as caught:
        waiting.result()
    assert caught.value.errno == errno.ECONNRESET


def test_a_peer_that_leaves_while_we_send(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    sending = sleeping_in(fake, lambda: background(client.send, request(6, bytes(60 * CHUNK))))
    server.close()
    with pytest.raises(PeerClosed) as caught:
        sending.result()
    assert caught.value.position == "inside"
    assert 0 < caught.value.bytes_done < 60 * CHUNK


def test_a_pair_that_breaks_because_the_peer_has_left(fake: FakeVerbs, rdma_pair: Pair) -> None:
    client, server = rdma_pair
    server.close()
    fake.fail_pair(pair_number(client), FLUSHED)
    with pytest.raises(PeerClosed):
        client.recv(1)


# This side leaves.


@pytest.mark.parametrize("how", ["shutdown", "close"])
@pytest.mark.parametrize("doing", ["recv", "recv_or_eof", "send"])
def test_another_thread_ends_it(fake: FakeVerbs, rdma_pair: Pair, background: Any, how: str, doing: str) -> None:
    client, _ = rdma_pair
    client.timeout = None
    argument: Any = request(6, bytes(60 * CHUNK)) if doing == "send" else 1
    blocked = sleeping_in(fake, lambda: background(getattr(client, doing), argument))
    getattr(client, how)()
    if doing == "recv_or_eof":
        assert blocked.result() is None
    else:
        with pytest.raises(PeerClosed, match="shut down on this side"):
            blocked.result()
    if how == "close":
        assert client.closed
        with pytest.raises(TransportError, match="is closed"):
            client.send(b"x")
    else:
        with pytest.raises(PeerClosed):
            client.send(request(1, b""))


def test_close_gives_everything_back_once_nobody_is_inside(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    server.close()
    held = fake.handles()
    assert held["qps"] == 1
    blocked = background(client.recv_or_eof, 1)
    client.close()
    client.close()
    blocked.result()
    wait_for(lambda: fake.handles() == {})
    assert client.fileno() == -1
    assert client.counts["sends"] == 0


def test_many_threads_close_at_once(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    blocked = [background(client.recv_or_eof, 1), background(server.recv_or_eof, 1)]
    start = threading.Barrier(6)

    def end(stream: RdmaStream) -> None:
        start.wait()
        stream.close()

    for ending in [background(end, stream) for stream in rdma_pair * 3]:
        ending.result()
    for one in blocked:
        with contextlib.suppress(TransportError):  # it may have come too late to begin
            assert one.result() is None
    wait_for(lambda: fake.handles() == {})


# Time


def test_nothing_comes(rdma_pair: Pair) -> None:
    client, server = rdma_pair
    server.send(response(b"abc"))
    with pytest.raises(TransferTimeout) as caught:
        client.recv_into(bytearray(20), timeout=0.05)
    assert (caught.value.phase, caught.value.bytes_done) == ("receive", 11)
    assert caught.value.elapsed >= 0.05


def test_nobody_takes_it(rdma_pair: Pair) -> None:
    client, _ = rdma_pair
    client.timeout = 0.05
    with pytest.raises(TransferTimeout) as caught:
        client.send(request(6, bytes(60 * CHUNK)))
    assert caught.value.phase == "send"
    assert caught.value.bytes_done == 9 + 30 * CHUNK  # 24 slots of the peer and 8 of ours, less the two of the header


def test_slow_is_not_stalled(fake: FakeVerbs, background: Any) -> None:
    message = request(6, os.urandom(40 * CHUNK))

    def attempt(timeout: float, pace: Pace) -> None:
        client, server = connect_rdma(*tcp_ends())
        client.timeout = timeout
        sending = background(client.send, message)
        try:
            got = b""
            while len(got) < len(message):
                got += pace.step(server.recv, min(len(message) - len(got), 4 * CHUNK))
            sending.result()
            assert got == message
        finally:
            client.close()
            server.close()

    slow_and_not_stalled(1.0, 11, attempt)


@pytest.mark.parametrize("doing", ["recv", "send"])
def test_an_interrupt(rdma_pair: Pair, alarm: Any, doing: str) -> None:
    client, _ = rdma_pair

    class Stop(Exception):
        pass

    def stop(number: int, frame: Any) -> None:
        raise Stop

    argument: Any = request(6, bytes(60 * CHUNK)) if doing == "send" else 1
    with pytest.raises(Stop), alarm(stop, 0.1):
        getattr(client, doing)(argument)


def test_signals_that_are_handled_lose_no_byte(rdma_pair: Pair, background: Any, alarm: Any) -> None:
    client, server = rdma_pair
    message = request(6, os.urandom(80 * CHUNK))
    seen: list[int] = []

    def slowly() -> bytes:
        got = b""
        while len(got) < len(message):
            got += server.recv(min(len(message) - len(got), CHUNK))
            time.sleep(0.005)
        return got

    reading = background(slowly)
    with alarm(lambda number, frame: seen.append(number), 0.002):
        client.send(message)
    assert reading.result() == message
    assert seen


# The device


@pytest.mark.parametrize("status", [RETRY_EXC_ERR, RNR_RETRY_EXC_ERR])
def test_a_send_that_fails(fake: FakeVerbs, rdma_pair: Pair, background: Any, status: int) -> None:
    client, _ = rdma_pair
    sending = sleeping_in(fake, lambda: background(client.send, request(6, bytes(60 * CHUNK))))
    fake.fail_pair(pair_number(client), status)
    with pytest.raises(CompletionError) as caught:
        sending.result()
    assert (caught.value.status, caught.value.vendor_err) == (status, 0x40 + status)
    assert "retry counter exceeded" in caught.value.detail
    assert caught.value.endpoint == client.endpoint
    for again in (lambda: client.send(b"x"), lambda: client.recv(1)):
        with pytest.raises(CompletionError):
            again()


def test_a_receiver_learns_what_broke_the_sender(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    client, _ = rdma_pair
    fake.set("stall", 1)
    sending = sleeping_in(fake, lambda: background(client.send, request(6, bytes(CHUNK))))
    waiting = sleeping_in(fake, lambda: background(client.recv, 1))
    fake.fail_pair(pair_number(client), RETRY_EXC_ERR)
    for one in (sending, waiting):
        with pytest.raises(CompletionError) as caught:
            one.result()
        assert caught.value.status == RETRY_EXC_ERR


def test_a_receive_that_fails(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    client.send(request(6, b"before")[:9])
    waiting = sleeping_in(fake, lambda: background(server.recv, 20))
    fake.fail_pair(pair_number(server), FLUSHED)
    with pytest.raises(CompletionError) as caught:
        waiting.result()
    assert caught.value.status == FLUSHED
    assert "9 of 20 bytes done" in caught.value.detail


@pytest.mark.parametrize("nbytes", [CHUNK + 1, 2**31, 2**32 - 1])
def test_more_than_a_slot_holds(fake: FakeVerbs, rdma_pair: Pair, nbytes: int) -> None:
    _, server = rdma_pair
    fake.forge(pair_number(server), receiving=True, id=0, nbytes=nbytes)
    with pytest.raises(CompletionError, match=f"SEND of {nbytes} bytes does not fit") as caught:
        server.recv(2 * CHUNK)
    assert caught.value.status == SUCCESS


@pytest.mark.parametrize("id", [24, 1 << 40, 2**64 - 1])
def test_a_completion_of_a_slot_there_is_not(fake: FakeVerbs, rdma_pair: Pair, id: int) -> None:
    _, server = rdma_pair
    fake.forge(pair_number(server), receiving=True, id=id, nbytes=5)
    with pytest.raises(CompletionError, match="nothing that was posted"):
        server.recv(5)


def test_a_slot_that_completes_twice(fake: FakeVerbs, rdma_pair: Pair) -> None:
    _, server = rdma_pair
    for _ in range(2):
        fake.forge(pair_number(server), receiving=True, id=3, nbytes=5)
    with pytest.raises(CompletionError, match="nothing that was posted"):
        server.recv(100)


def test_a_send_that_completes_without_having_been_posted(fake: FakeVerbs, rdma_pair: Pair) -> None:
    client, _ = rdma_pair
    fake.forge(pair_number(client), receiving=False, id=0)
    fake.forge(pair_number(client), receiving=False, id=1)
    with pytest.raises(CompletionError, match="nothing that was posted"):
        client.send(request(1, b""))


def test_empty_sends(fake: FakeVerbs, rdma_pair: Pair) -> None:
    """A few are passed over, between bytes any number; nothing else for ever is a fault."""
    client, server = rdma_pair
    number = pair_number(server)
    for slot in range(60):
        if slot % 20 == 19:
            client.send(response(b"")[:1])
            assert server.recv(1) == b"\0"
        else:
            fake.forge(number, receiving=True, id=slot % 24, nbytes=0)
            with pytest.raises(TransferTimeout):
                server.recv(1, timeout=0.0)


def test_a_flood_of_empty_sends(fake: FakeVerbs, rdma_pair: Pair) -> None:
    _, server = rdma_pair
    number = pair_number(server)
    with pytest.raises(CompletionError, match="nothing but empty SENDs"):
        for id in range(25):
            fake.forge(number, receiving=True, id=id % 24, nbytes=0)
            try:
                server.recv(1, timeout=0.0)
            except TransferTimeout:
                continue


@pytest.mark.parametrize(("event", "code"), [(DEVICE_FATAL, errno.ENODEV), (QP_FATAL, errno.EIO)])
@pytest.mark.parametrize("doing", ["recv", "send"])
def test_a_device_that_goes(
    fake: FakeVerbs, rdma_pair: Pair, background: Any, event: int, code: int, doing: str
) -> None:
    client, _ = rdma_pair
    argument: Any = request(6, bytes(60 * CHUNK)) if doing == "send" else 1
    blocked = sleeping_in(fake, lambda: background(getattr(client, doing), argument))
    fake.event(event)
    with pytest.raises(VerbsError) as caught:
        blocked.result()
    assert caught.value.errno == code
    assert not isinstance(caught.value, CompletionError)


def test_a_port_that_flaps_is_no_end(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    waiting = sleeping_in(fake, lambda: background(client.recv, 8))
    fake.event(PORT_ERR)
    server.send(response(b""))
    assert waiting.result() == response(b"")


@pytest.mark.parametrize(
    ("fault", "doing"),
    [
        ("post_send:EINVAL", "send"),
        ("post_send:ENOMEM", "send"),
        ("poll_cq:EIO", "send"),
        ("poll_cq:EIO", "recv"),
        ("req_notify_cq:EIO", "recv"),
        ("post_recv:EIO", "echo"),
    ],
)
def test_a_call_that_fails(fake: FakeVerbs, rdma_pair: Pair, fault: str, doing: str) -> None:
    client, server = rdma_pair
    fake.fault(fault)
    with pytest.raises(VerbsError) as caught:
        if doing == "send":
            client.send(request(6, bytes(CHUNK)))
        elif doing == "recv":
            server.recv(1)
        else:
            client.send(request(1, b""))
            server.recv(9)
            server.recv(1)
    assert not isinstance(caught.value, CompletionError)
    assert caught.value.errno in (errno.EINVAL, errno.ENOMEM, errno.EIO)
    assert os.strerror(caught.value.errno) in caught.value.detail
