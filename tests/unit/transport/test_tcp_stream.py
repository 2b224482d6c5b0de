from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support.ends import tcp_ends, unread
from support.leaks import eventually
from support.pace import Pace, slow_and_not_stalled

from weightwire.errors import ModelError, PeerClosed, TransferTimeout, TransportError
from weightwire.ranges import FileRange
from weightwire.transport.base import ByteStream
from weightwire.transport.tcp import TcpStream

MiB = 1 << 20
DATA = np.random.default_rng(1).integers(0, 256, 3 * MiB + 17, dtype=np.uint8).tobytes()


def test_is_a_byte_stream(tcp_pair) -> None:
    a, _ = tcp_pair
    assert isinstance(a, ByteStream)
    assert a.kind == "tcp"
    assert a.endpoint.startswith("127.0.0.1:")


def test_options_are_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        stream = TcpStream(sock)
        assert sock.fileno() == -1, "the stream has taken the socket over"
        with socket.socket(fileno=os.dup(stream.fileno())) as same:
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        stream.close()


# Sending and receiving


def test_parts_arrive_in_order_as_one(tcp_pair) -> None:
    a, b = tcp_pair
    parts = [b"\x06", b"", (300).to_bytes(8, "little"), bytearray(b"head"), memoryview(DATA)[:1000], np.arange(9.0)]
    whole = b"".join(bytes(memoryview(p).cast("B")) for p in parts)
    a.send(*parts)
    assert b.recv(len(whole)) == whole
    assert a.bytes_sent == b.bytes_received == len(whole)
    assert a.bytes_received == b.bytes_sent == 0


def test_nothing_is_sent_for_no_parts_and_empty_parts(tcp_pair) -> None:
    a, b = tcp_pair
    a.send()
    a.send(b"", bytearray())
    a.send_range([], FileRange(-1, 0, 0))
    a.send(b"x", b"")
    assert b.recv(0) == b""
    b.recv_into(bytearray())
    assert b.recv(1) == b"x"
    assert a.bytes_sent == 1


def test_more_parts_than_one_call_takes(tcp_pair, background) -> None:
    a, b = tcp_pair
    parts = [DATA[i * 7 : i * 7 + i % 9] for i in range(5000)]
    sender = background(a.send, *parts)
    whole = b"".join(parts)
    assert b.recv(len(whole)) == whole
    sender.result()


@pytest.mark.parametrize("n_parts", [1, 3, 2500])
def test_short_writes_and_reads(narrow, background, n_parts: int) -> None:
    a, b = narrow
    cut = len(DATA) // n_parts
    parts = [DATA[i * cut : (i + 1) * cut] for i in range(n_parts)]
    sender = background(a.send, *parts)
    got = bytearray(cut * n_parts)
    b.recv_into(got)
    sender.result()
    assert got == b"".join(parts)
    assert a.bytes_sent == b.bytes_received == len(got)


def test_receives_straight_into_an_array_slice(tcp_pair, background) -> None:
    a, b = tcp_pair
    target = np.zeros(len(DATA) + 20, dtype=np.uint8)
    sender = background(a.send, DATA)
    b.recv_into(target[10:-10])
    sender.result()
    assert target[10:-10].tobytes() == DATA
    assert not target[:10].any()
    assert not target[-10:].any()


def test_bytes_behind_a_large_message_stay_for_the_next(tcp_pair, background) -> None:
    # The low-water mark of the large read must not keep the small one waiting.
    a, b = tcp_pair
    sender = background(a.send, DATA, b"tail")
    assert b.recv(len(DATA)) == DATA
    sender.result()
    assert b.recv(4) == b"tail"
    background(a.send, b"later").result()
    assert b.recv(5) == b"later"


def have_come(stream: TcpStream, nbytes: int) -> None:
    """Wait until so many bytes can be read: the system may take its time over loopback, too."""
    assert eventually(lambda: unread(stream) >= nbytes)


def test_low_water_is_back_at_one_after_a_failure(tcp_pair) -> None:
    a, b = tcp_pair
    a.send(b"some")
    have_come(b, 4)
    with pytest.raises(TransferTimeout) as caught:
        b.recv_into(bytearray(MiB), timeout=0.05)
    assert caught.value.bytes_done == 4
    with socket.socket(fileno=os.dup(b.fileno())) as same:
        assert same.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def test_slow_bytes_below_the_low_water_mark_are_progress(background) -> None:
    # 20 bytes, each within the limit of the one before, far apart enough for the whole to outlast it.
    def attempt(timeout: float, pace: Pace) -> None:
        a, b = tcp_ends()

        def trickle() -> None:
            for i in range(20):
                pace.step(a.send, bytes([i]))
            a.send(bytes(MiB))

        sender = background(trickle)
        try:
            got = b.recv(MiB + 20, timeout=timeout)
            sender.result()
            assert got[:20] == bytes(range(20))
        finally:
            b.close()
            with contextlib.suppress(TransportError):  # what is not waited for any more is not taken
                sender.result()
            a.close()

    slow_and_not_stalled(1.0, 20, attempt)


def test_both_directions_at_once(tcp_pair, background) -> None:
    a, b = tcp_pair
    calls = [background(a.send, DATA), background(b.send, DATA)]
    readers = [background(a.recv, len(DATA)), background(b.recv, len(DATA))]
    for call in calls:
        call.result()
    assert [reader.result() == DATA for reader in readers] == [True, True]


# What is refused


def test_what_is_no_contiguous_buffer_is_refused_and_nothing_sent(tcp_pair) -> None:
    a, b = tcp_pair
    with pytest.raises(ValueError, match="ascontiguousarray"):
        a.send(b"head", np.zeros((4, 4))[:, 0])
    with pytest.raises(TypeError):
        a.send("text")
    with pytest.raises(TypeError, match="writable"):
        b.recv_into(b"read only")
    with pytest.raises(TypeError, match="contiguous"):
        b.recv_into(np.zeros((4, 4))[:, 0])
    with pytest.raises(ValueError, match="-1 bytes"):
        b.recv(-1)
    a.send(b"ok")
    assert b.recv(2) == b"ok"


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_a_bad_timeout_is_refused(tcp_pair, bad: float) -> None:
    a, _ = tcp_pair
    with pytest.raises(ValueError, match="timeout"):
        a.timeout = bad
    with pytest.raises(ValueError, match="timeout"):
        a.recv(1, timeout=bad)
    assert a.timeout == 30.0
    a.timeout = None
    assert a.timeout is None


def test_an_unconnected_socket_is_refused_and_stays_the_callers() -> None:
    with socket.socket() as sock:
        with pytest.raises(TransportError, match="not connected"):
            TcpStream(sock)
        assert sock.fileno() >= 0


# Files


@pytest.fixture
def model(tmp_path: Path):
    path = tmp_path / "model"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDWR)
    yield fd, path
    os.close(fd)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 65536, 65537, 3 * MiB])
@pytest.mark.parametrize("kind", ["tcp_pair", "narrow"])
def test_a_range_follows_its_head(request, background, model, kind: str, nbytes: int) -> None:
    a, b = request.getfixturevalue(kind)
    fd, path = model
    sender = background(a.send_range, [b"he", b"ad"], FileRange(fd, 13, nbytes, str(path)))
    assert b.recv(4 + nbytes) == b"head" + DATA[13 : 13 + nbytes]
    sender.result()
    assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    assert a.bytes_sent == 4 + nbytes


@pytest.mark.parametrize("nbytes", [100, 1000, MiB])
def test_a_range_past_the_end_of_its_file(tcp_pair, tmp_path: Path, nbytes: int) -> None:
    a, _ = tcp_pair
    path = tmp_path / "short"
    path.write_bytes(bytes(700))
    with path.open("rb") as file, pytest.raises(ModelError, match="shorter than when opened") as caught:
        a.send_range([b"head"], FileRange(file.fileno(), 650, nbytes, str(path)))
    assert caught.value.path == str(path)
    assert caught.value.offset == 700


def test_a_file_cut_short_while_it_is_sent(narrow, background, model) -> None:
    a, b = narrow
    fd, path = model
    sender = background(a.send_range, [], FileRange(fd, 0, len(DATA), str(path)))
    assert b.recv(100_000) == DATA[:100_000]
    os.ftruncate(fd, 2 * MiB)
    assert b.recv(2 * MiB - 100_000) == DATA[100_000 : 2 * MiB]
    with pytest.raises(ModelError, match="shorter") as caught:
        sender.result()
    assert caught.value.offset == 2 * MiB


def test_an_unreadable_range(tcp_pair, tmp_path: Path) -> None:
    a, _ = tcp_pair
    fd = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    try:
        with pytest.raises(ModelError, match="pread: Bad file descriptor"):
            a.send_range([b"head"], FileRange(fd, 0, 10))
        with pytest.raises(TransportError) as caught:
            a.send_range([b"head"], FileRange(fd, 0, MiB))
        assert caught.value.operation == "sendfile"
    finally:
        os.close(fd)
    with pytest.raises(ValueError, match="negative"):
        a.send_range([], FileRange(0, -1, 10))


# The peer goes


def test_a_clean_end_between_messages(tcp_pair) -> None:
    a, b = tcp_pair
    a.send(b"last")
    a.close()
    assert b.recv_or_eof(4) == b"last"
    assert b.recv_or_eof(4) is None
    with pytest.raises(PeerClosed) as caught:
        b.recv(4)
    assert (caught.value.position, caught.value.bytes_done) == ("before", 0)


@pytest.mark.parametrize("size", [100, MiB])
def test_an_end_inside_a_message(tcp_pair, size: int) -> None:
    a, b = tcp_pair
    a.send(bytes(10))
    a.close()
    with pytest.raises(PeerClosed, match=f"10 of {size} bytes") as caught:
        b.recv_or_eof(size)
    assert (caught.value.position, caught.value.bytes_done) == ("inside", 10)
    assert caught.value.endpoint == b.endpoint


def test_what_a_closed_peer_had_sent_is_read_to_the_end(tcp_pair) -> None:
    a, b = tcp_pair
    a.send(DATA[:100_000])
    a.close()
    assert b.recv(60_000) == DATA[:60_000]
    assert b.recv(40_000) == DATA[60_000:100_000]
    assert b.recv_or_eof(1) is None


def test_a_reset_is_no_clean_end(tcp_pair) -> None:
    a, b = tcp_pair
    with socket.socket(fileno=os.dup(a.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    a.close()
    with pytest.raises(PeerClosed, match="reset"):
        b.recv_or_eof(1)


@pytest.mark.parametrize("with_file", [False, True])
def test_sending_to_a_peer_that_has_gone(narrow, background, model, with_file: bool) -> None:
    a, b = narrow
    fd, path = model
    if with_file:
        sender = background(a.send_range, [b"head"], FileRange(fd, 0, len(DATA), str(path)))
    else:
        sender = background(a.send, b"head", DATA)
    b.recv(5000)
    b.close()
    with pytest.raises(PeerClosed) as caught:
        sender.result()
    assert caught.value.position == "inside"
    assert 5000 <= caught.value.bytes_done < len(DATA)
    with pytest.raises(PeerClosed) as caught:
        a.send(b"more")
    assert caught.value.position == "before"


def test_no_sigpipe_even_where_it_would_kill() -> None:
    code = """
import signal, socket, tempfile
from weightwire.errors import PeerClosed
from weightwire.ranges import FileRange
from weightwire.transport.tcp import TcpStream
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
one, other = socket.socketpair()
stream = TcpStream(one)
other.close()
with tempfile.TemporaryFile() as file:
    file.truncate(1 << 20)
    for call in (lambda: stream.send(b"x"), lambda: stream.send_range([], FileRange(file.fileno(), 0, 1 << 20))):
        try:
            call()
        except PeerClosed as error:
            print(error.operation)
assert signal.SIGPIPE not in signal.sigpending() and signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["sendmsg", "sendfile"]), done.stderr


# Nothing moves


@pytest.mark.parametrize("size", [10, MiB])
def test_a_silent_peer_is_a_timeout_that_names_the_phase(tcp_pair, size: int) -> None:
    a, b = tcp_pair
    b.timeout = 0.05
    a.send(bytes(3))
    have_come(b, 3)
    with pytest.raises(TransferTimeout, match="receiving from") as caught:
        b.recv(size)
    assert (caught.value.phase, caught.value.bytes_done) == ("receive", 3)
    assert caught.value.elapsed >= 0.05
    with pytest.raises(TransferTimeout):
        b.recv_or_eof(1, timeout=0.0)


@pytest.mark.parametrize("with_file", [False, True])
def test_a_peer_that_reads_nothing_is_a_timeout(narrow, model, with_file: bool) -> None:
    a, _ = narrow
    fd, path = model
    a.timeout = 0.05
    with pytest.raises(TransferTimeout, match="sending to") as caught:
        if with_file:
            a.send_range([b"head"], FileRange(fd, 0, len(DATA), str(path)))
        else:
            a.send(DATA)
    assert caught.value.phase == "send"
    assert caught.value.bytes_done == a.bytes_sent < len(DATA)


def test_a_timeout_of_one_call_overrides_the_streams(tcp_pair, background) -> None:
    a, b = tcp_pair
    b.timeout = 0.01
    reader = background(lambda: b.recv(1, timeout=None))
    threading.Event().wait(0.1)
    assert reader.running()
    a.send(b"x")
    assert reader.result() == b"x"


# Signals


class Pressed(Exception):
    pass


def press(*_: object) -> None:
    raise Pressed


@pytest.mark.parametrize("call", ["recv", "recv large", "send", "send_range"])
def test_a_handler_that_raises_ends_the_call(narrow, model, alarm, call: str) -> None:
    a, b = narrow
    fd, _ = model
    a.timeout = b.timeout = None
    data = bytearray(DATA)
    with pytest.raises(Pressed), alarm(press, 0.05):
        if call == "recv":
            a.recv(10)
        elif call == "recv large":
            a.recv_into(data)
        elif call == "send":
            a.send(data)
        else:
            a.send_range([data], FileRange(fd, 0, len(DATA)))
    data.append(1)  # BufferError, if the call had kept it
    a.close()
    assert a.fileno() == -1


def test_a_handler_that_returns_lets_the_call_go_on(narrow, background, alarm) -> None:
    a, b = narrow
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1

    def dawdle() -> None:
        for i in range(0, len(DATA), 300_000):
            threading.Event().wait(0.02)
            a.send(DATA[i : i + 300_000])

    with alarm(count, 0.005):
        sender = background(dawdle)
        got = b.recv(len(DATA))
    sender.result()
    assert got == DATA
    assert seen > 0


def test_a_signal_that_another_thread_took_is_noticed(tcp_pair, background) -> None:
    # The main thread's wait is not interrupted; only looking around now and then shows that a handler is due.
    a, _ = tcp_pair
    old = signal.signal(signal.SIGUSR1, press)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        expected = threading.Event()

        def take() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
            assert expected.wait(60)
            threading.Event().wait(0.05)
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

        taker = background(take)
        with pytest.raises(Pressed):
            expected.set()
            a.recv(1, timeout=20.0)
        taker.result()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGUSR1, old)
