from __future__ import annotations

import os
import random
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fakeverbs import FakeVerbs
from support.leaks import eventually
from support.rdma import connect_rdma, pair_number, request, response

from weightwire.errors import ModelError, TransportError, VerbsError
from weightwire.ranges import FileRange
from weightwire.transport.base import ByteStream
from weightwire.transport.rdma import RdmaStream, offer_rdma
from weightwire.transport.registration import CHUNK
from weightwire.transport.tcp import TcpStream

Pair = tuple[RdmaStream, RdmaStream]


def test_it_is_a_byte_stream(rdma_pair: Pair) -> None:
    for stream in rdma_pair:
        assert isinstance(stream, ByteStream)
        assert stream.kind == "rdma"
        assert stream.timeout == 30.0
        assert stream.fileno() >= 0
    assert rdma_pair[0].details["device"] == "fake0"
    assert rdma_pair[0].details["send_depth"] == 8
    assert rdma_pair[0].details["registration"] == [{"send_slots": 8, "receive_slots": 24, "failed": "", "errno": 0}]


def test_peek_shows_what_has_come_and_takes_nothing(rdma_pair: Pair) -> None:
    client, server = rdma_pair
    assert server.peek(10) == b""
    sent = request(6, b"abc") + request(7, bytes(300_000))
    client.send(request(6, b"abc"))
    client.send(request(7, bytes(300_000)))
    assert eventually(lambda: server.peek(len(sent) + 1) == sent)
    assert server.peek(11) == sent[:11]
    assert server.peek(0) == b""
    assert server.recv(1) == b"\x06"
    assert server.peek(11) == sent[1:12]
    assert server.recv(len(sent) - 1) == sent[1:]
    assert server.peek(10) == b""
    with pytest.raises(ValueError, match="-1"):
        server.peek(-1)
    client.send(b"\x06")
    assert eventually(lambda: server.peek(2) == b"\x06")
    server.close()
    assert server.peek(2) == b""


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 4095, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 40 * CHUNK + 17])
def test_a_request_and_its_answer(rdma_pair: Pair, background: Any, nbytes: int) -> None:
    client, server = rdma_pair
    payload = random.Random(nbytes).randbytes(nbytes)

    def serve() -> bytes:
        assert server.recv(1) == b"\x06"
        size = int.from_bytes(server.recv(8), "little")
        got = bytearray(size)
        server.recv_into(got)
        server.send(len(got).to_bytes(8, "little"), got)
        return bytes(got)

    serving = background(serve)
    client.send(request(6, b"")[:1], nbytes.to_bytes(8, "little"), payload)
    answer = client.recv(8 + nbytes)
    assert serving.result() == payload
    assert answer == response(payload)
    assert client.bytes_sent == server.bytes_received == 9 + nbytes
    assert server.bytes_sent == client.bytes_received == 8 + nbytes


def test_no_send_crosses_a_read_of_the_peer(rdma_pair: Pair) -> None:
    client, server = rdma_pair
    client.send(request(11, b"") + request(7, bytes(312)) + request(11, b"abcd"))
    # command, size; command, size, payload; command, size, payload
    assert client.counts["sends"] == 2 + 3 + 3
    server.recv(9 + 9 + 312 + 9 + 4)
    server.send(response(b"") + response(b"x" * 16))
    assert server.counts["sends"] == 1 + 2
    client.recv(8 + 8 + 16)


def test_framing_follows_the_bytes_however_they_are_cut(rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    messages = [request(command, bytes(size)) for command, size in ((1, 0), (6, 700), (8, 5), (4, 0), (9, 1))]
    whole = b"".join(messages)
    receiving = background(server.recv, len(whole))
    for at in range(0, len(whole), 3):
        client.send(whole[at : at + 3])
    assert receiving.result() == whole
    ends, at = set(range(3, len(whole), 3)) | {len(whole)}, 0
    for message in messages:
        ends |= {at + 1, at + 9, at + len(message)}
        at += len(message)
    # A SEND ends where a read of the peer ends and where a call does, and nowhere else.
    assert client.counts["sends"] == server.counts["receives"] == len(ends)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from([0, 1, 8, 300, 5000, CHUNK - 1, CHUNK + 1, 3 * CHUNK]), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 2 * CHUNK), min_size=1, max_size=5),
    reads=st.lists(st.integers(1, 2 * CHUNK), min_size=1, max_size=5),
)
def test_any_cut_on_either_side(rdma_pair: Pair, sizes: list[int], cuts: list[int], reads: list[int]) -> None:
    client, server = rdma_pair
    whole = b"".join(request(index + 1, os.urandom(size)) for index, size in enumerate(sizes))
    got = bytearray()

    def receive() -> None:
        index = 0
        while len(got) < len(whole):
            got.extend(server.recv(min(reads[index % len(reads)], len(whole) - len(got))))
            index += 1

    reader = threading.Thread(target=receive)
    reader.start()
    at = index = 0
    while at < len(whole):
        end = at + cuts[index % len(cuts)]
        client.send(memoryview(whole)[at:end])
        at, index = end, index + 1
    reader.join(30)
    assert bytes(got) == whole


def test_the_window_fills_against_a_peer_that_does_not_read(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    payload = os.urandom(64 * CHUNK)
    sending = background(client.send, request(6, payload))
    while client.counts["sends"] < 32:  # 24 wait in the peer's slots, 8 are in flight
        assert sending.running()
    assert client.counts["high_water"] == 8
    assert server.recv(9 + len(payload)) == request(6, payload)
    sending.result()
    assert client.counts["high_water"] == 8
    assert fake.get("most_in_flight") == 8


@pytest.mark.parametrize(("kib", "depth"), [(8192, 8), (8191, 4), (7167, 2), (6655, 1)])
def test_shallower_rings_move_the_same_bytes(
    fake: FakeVerbs, tcp_pair: tuple[TcpStream, TcpStream], background: Any, kib: int, depth: int
) -> None:
    offers = []
    for end in tcp_pair:
        fake.set("budget", fake.get("pinned") + kib * 1024)
        offers.append(offer_rdma(end, {}))
    client = offers[0].activate(tcp_pair[0], offers[1].caps, "requests")
    server = offers[1].activate(tcp_pair[1], offers[0].caps, "responses")
    assert client.details["send_depth"] == depth
    message = request(6, os.urandom(50 * CHUNK + 1))
    sending = background(client.send, message)
    assert server.recv(len(message)) == message
    sending.result()
    assert 1 <= client.counts["high_water"] <= depth
    client.close()
    server.close()


def test_answers_may_be_left_unread(rdma_pair: Pair, background: Any) -> None:
    """A client that asks and asks, and a server that answers each before it reads the next: nobody waits for ever."""
    client, server = rdma_pair
    rounds = 150

    def serve() -> None:
        for _ in range(rounds):
            server.recv(9 + 12)
            server.send(response(b"y" * 16))

    serving = background(serve)
    for _ in range(rounds):
        client.send(request(11, bytes(12)))
    assert client.recv(24 * rounds) == response(b"y" * 16) * rounds
    serving.result()


def test_both_ways_at_once(rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    there, back = request(6, os.urandom(60 * CHUNK)), response(os.urandom(55 * CHUNK))
    sending = [background(client.send, there), background(server.send, back)]
    receiving = [background(server.recv, len(there)), background(client.recv, len(back))]
    assert receiving[0].result() == there
    assert receiving[1].result() == back
    for one in sending:
        one.result()


@pytest.fixture
def file_of(tmp_path: Path) -> Iterator[Any]:
    opened = []

    def make(content: bytes) -> FileRange:
        handle = tempfile.TemporaryFile(dir=tmp_path)  # noqa: SIM115
        opened.append(handle)
        handle.write(content)
        handle.flush()
        return FileRange(handle.fileno(), 0, len(content), "weights")

    yield make
    for handle in opened:
        handle.close()


@pytest.mark.parametrize("nbytes", [0, 1, 5000, CHUNK, 9 * CHUNK + 5])
def test_a_range_of_a_file(rdma_pair: Pair, background: Any, file_of: Any, nbytes: int) -> None:
    client, server = rdma_pair
    content = os.urandom(nbytes + 40)
    source = file_of(content)
    head = b"\x06" + (305 + nbytes).to_bytes(8, "little")
    sending = background(client.send_range, [head, b"h" * 305], FileRange(source.fd, 13, nbytes, "weights"))
    assert server.recv(9 + 305 + nbytes) == head + b"h" * 305 + content[13 : 13 + nbytes]
    sending.result()
    assert client.bytes_sent == 9 + 305 + nbytes


def test_a_file_that_has_become_shorter(rdma_pair: Pair, file_of: Any) -> None:
    client, _ = rdma_pair
    source = file_of(b"x" * 3 * CHUNK)
    os.ftruncate(source.fd, CHUNK + 7)
    with pytest.raises(ModelError) as caught:
        client.send_range([b"\x06" + (3 * CHUNK).to_bytes(8, "little")], source)
    assert caught.value.offset == CHUNK + 7
    assert caught.value.path == "weights"


def test_a_file_that_cannot_be_read(rdma_pair: Pair, tmp_path: Path) -> None:
    client, _ = rdma_pair
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(ModelError, match="pread: Is a directory"):
            client.send_range([b"\x06" + (9).to_bytes(8, "little")], FileRange(handle, 0, 9, "folder"))
    finally:
        os.close(handle)


def test_registered_memory_is_not_copied(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    memory = bytearray(os.urandom(12 * CHUNK))
    region = client.register(memory)
    assert fake.get("mrs") == 5
    head = b"\x06" + (305 + 11 * CHUNK).to_bytes(8, "little") + b"h" * 305
    inside = memoryview(memory)[777 : 777 + 11 * CHUNK]
    sending = background(client.send, head, inside)
    assert server.recv(len(head) + len(inside)) == head + inside
    sending.result()
    counts = client.counts
    # What is left over after whole chunks may be less than is worth a SEND of its own.
    assert counts["direct_bytes"] == 11 * CHUNK
    assert counts["copied_bytes"] == len(head)
    assert counts["high_water"] <= 8
    inside.release()
    region.close()
    assert fake.get("mrs") == 4
    sending = background(client.send, request(6, bytes(memory)))
    server.recv(9 + len(memory))
    sending.result()
    assert client.counts["direct_bytes"] == 11 * CHUNK


def test_what_is_posted_from_memory_has_left_it(fake: FakeVerbs, rdma_pair: Pair, background: Any) -> None:
    """Also in the middle of a message: the caller may write there as soon as send is back."""
    client, server = rdma_pair
    memory = bytearray(b"a" * 2 * CHUNK)
    client.register(memory)
    fake.set("stall", 1)
    sending = background(client.send, b"\x06" + (9 * CHUNK).to_bytes(8, "little"), memory)
    while client.counts["sends"] < 4:
        assert sending.running()
    assert sending.running()
    fake.set("stall", 0)
    sending.result()
    memory[:] = b"b" * 2 * CHUNK
    assert server.recv(9 + 2 * CHUNK)[9:] == b"a" * 2 * CHUNK


def test_read_only_memory_can_be_registered(rdma_pair: Pair, background: Any) -> None:
    client, server = rdma_pair
    payload = os.urandom(CHUNK)
    client.register(payload)
    sending = background(client.send, request(6, payload)[:9], payload)
    assert server.recv(9 + CHUNK)[9:] == payload
    sending.result()
    assert client.counts["direct_bytes"] == CHUNK


def test_memory_beyond_the_limit_goes_by_the_ring(fake: FakeVerbs, rdma_pair: Pair) -> None:
    client, server = rdma_pair
    fake.set("budget", fake.get("pinned"))
    payload = os.urandom(CHUNK)
    with pytest.raises(VerbsError):
        client.register(payload)
    client.send(request(6, payload)[:9], payload)
    assert server.recv(9 + CHUNK)[9:] == payload
    assert client.counts["direct_bytes"] == 0


def test_a_region_of_another_connection(fake: FakeVerbs, rdma_pair: Pair) -> None:
    client, server = rdma_pair
    region = server.register(bytes(CHUNK))
    with pytest.raises(ValueError, match="another protection domain"):
        client.add_region(region)


def test_small_sends_go_inline_or_not(fake: FakeVerbs, tcp_pair: tuple[TcpStream, TcpStream]) -> None:
    fake.set("max_inline", 0)
    client, server = connect_rdma(*tcp_pair)
    assert client.details["inline"] == 0
    client.send(request(1, b"abc"))
    assert server.recv(12) == request(1, b"abc")
    client.close()
    server.close()


@pytest.mark.parametrize(
    "parts",
    [
        (b"",),
        (b"", b"\x01", b"", (0).to_bytes(8, "little"), b""),
        tuple(request(6, bytes(30))[i : i + 1] for i in range(39)),
    ],
)
def test_empty_and_many_parts(rdma_pair: Pair, parts: tuple[bytes, ...]) -> None:
    client, server = rdma_pair
    client.send(*parts)
    assert server.recv(sum(map(len, parts))) == b"".join(parts)


def test_bad_arguments(rdma_pair: Pair) -> None:
    client, _ = rdma_pair
    with pytest.raises(ValueError, match="contiguous"):
        client.send(memoryview(bytes(10))[::2])
    with pytest.raises(TypeError, match="writable"):
        client.recv_into(b"xx")
    with pytest.raises(ValueError, match="cannot receive"):
        client.recv(-1)
    with pytest.raises(ValueError, match="negative"):
        client.send_range([], FileRange(0, -1, 5))
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            client.timeout = bad
    assert client.bytes_sent == 0


def test_nothing_moves_before_it_is_active(fake: FakeVerbs, tcp_pair: tuple[TcpStream, TcpStream]) -> None:
    offer = offer_rdma(tcp_pair[0], {})
    with pytest.raises(TransportError, match="not active"):
        offer._stream.send(b"x")
    offer.close()
    offer.close()
    assert fake.handles() == {}
    tcp_pair[0].send(b"still there")
    assert tcp_pair[1].recv(11) == b"still there"


def test_ipv6(fake: FakeVerbs) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        one = socket.create_connection(listener.getsockname()[:2])
        other, _ = listener.accept()
    client, server = connect_rdma(TcpStream(one, 20.0), TcpStream(other, 20.0))
    assert client.details["gid"] == "::1"
    client.send(request(1, b""))
    assert server.recv(9) == request(1, b"")
    client.close()
    server.close()


def test_numbers_of_the_pair(rdma_pair: Pair) -> None:
    assert pair_number(rdma_pair[0]) != pair_number(rdma_pair[1])
