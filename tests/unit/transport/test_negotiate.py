from __future__ import annotations

import contextlib
import logging
import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.leaks import LeakCheck
from support.scripted import Peer, ScriptedServer, hello_answer, serve_hello

from weightwire.errors import (
    ConfigError,
    PeerClosed,
    ProtocolError,
    ServerBusy,
    TransferTimeout,
    TransportError,
    VersionError,
)
from weightwire.transport import negotiate
from weightwire.transport.negotiate import open_connection

VERSIONS = [
    ((1, 0, 0), "1.0"),
    ((2, 0, 0), "2.0"),
    ((3, 0, 0), "3.0"),
    ((3, 5, 0), "3.5"),
    ((3, 6, 1), "3.6"),
    ((4, 0, 3), "4.0"),
    ((5, 0, 0), "5.0"),
    ((5, 1, 0), "5.1"),
    ((6, 0, 0), "6.0"),
    ((7, 0, 0), "7.0"),
    ((8, 0, 0), "8.0"),
]


def open_and_close(endpoint: str, timeout: float = 20.0, protocol: str | None = None) -> tuple[str, str, int]:
    stream, greeting, dialect, _ = open_connection(endpoint, timeout, protocol)
    assert stream.timeout == timeout
    stream.close()
    return greeting.text, dialect.text, greeting.flags


@pytest.mark.parametrize(("version", "spoken"), VERSIONS)
def test_each_version_is_found(version: tuple[int, int, int], spoken: str, no_leaks: LeakCheck) -> None:
    def server(peer: Peer) -> None:
        if serve_hello(peer, version):
            assert peer.rest() == b""

    old = version[0] < 4
    with ScriptedServer(*[server] * (2 if old else 1)) as scripted:
        assert open_and_close(scripted.endpoint) == (".".join(map(str, version)), spoken, 0)
    assert scripted.connections == (2 if old else 1)


def test_flags_of_the_answer_are_kept() -> None:
    def server(peer: Peer) -> None:
        serve_hello(peer, (7, 0, 0), flags=0b101)
        peer.rest()

    with ScriptedServer(server) as scripted:
        assert open_and_close(scripted.endpoint)[2] == 0b101


def test_a_reset_instead_of_a_close_is_a_refusal_too() -> None:
    """A server that closes with the 24 bytes unread resets the connection."""

    def refuse(peer: Peer) -> None:
        peer.take(9)
        peer.reset()

    def serve(peer: Peer) -> None:
        assert serve_hello(peer, (2, 0, 0))
        peer.rest()

    with ScriptedServer(refuse, serve) as scripted:
        assert open_and_close(scripted.endpoint)[:2] == ("2.0.0", "2.0")


def test_closed_on_both_forms_is_older_than_1(no_leaks: LeakCheck) -> None:
    seen: list[int] = []

    def refuse(peer: Peer) -> None:
        seen.append(peer.head()[1])

    with ScriptedServer(refuse, refuse) as scripted, pytest.raises(VersionError, match=r"older than 1\.0") as caught:
        open_connection(scripted.endpoint, 20.0)
    assert seen == [24, 0]
    assert caught.value.ours == "1.0 to 8.0"
    assert "1.0" in caught.value.theirs
    assert caught.value.hint


@pytest.mark.parametrize("major", [0, 9, 107, 108, 255])
def test_a_major_nobody_described_hears_nothing_after_hello(major: int, no_leaks: LeakCheck) -> None:
    after: list[bytes] = []

    def server(peer: Peer) -> None:
        assert peer.head() == (14, 24)
        peer.take(24)
        peer.answer(bytes((major, 2, 3, 0)) + bytes(24))
        after.append(peer.rest())

    with ScriptedServer(server) as scripted, pytest.raises(VersionError) as caught:
        open_connection(scripted.endpoint, 20.0)
    assert after == [b""]
    assert caught.value.theirs == f"{major}.2.3"
    assert "protocol" in caught.value.hint


def test_the_users_word_opens_a_foreign_major(caplog: pytest.LogCaptureFixture) -> None:
    def server(peer: Peer) -> None:
        peer.take(9 + 24)
        peer.answer(bytes((107, 0, 0, 0)) + bytes(24))
        assert peer.rest() == b""

    with ScriptedServer(server) as scripted, caplog.at_level(logging.WARNING, "weightwire"):
        assert open_and_close(scripted.endpoint, protocol="7.0.0")[:2] == ("107.0.0", "7.0")
    assert "107.0.0" in caplog.text


def test_a_newer_minor_is_spoken_to_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def server(peer: Peer) -> None:
        serve_hello(peer, (7, 4, 0))
        peer.rest()

    with ScriptedServer(server) as scripted, caplog.at_level(logging.WARNING, "weightwire"):
        assert open_and_close(scripted.endpoint)[:2] == ("7.4.0", "7.0")
    assert "newer than weightwire knows" in caplog.text


def test_a_known_version_says_one_thing(caplog: pytest.LogCaptureFixture) -> None:
    def server(peer: Peer) -> None:
        if serve_hello(peer, (3, 6, 1)):
            peer.rest()

    with ScriptedServer(server, server) as scripted, caplog.at_level(logging.INFO, "weightwire"):
        open_and_close(scripted.endpoint)
    assert [record.getMessage() for record in caplog.records] == [
        f"{scripted.endpoint}: on TCP: protocol 3.6 has no RDMA"
    ]


@pytest.mark.parametrize(
    "answer",
    [
        struct.pack("<Q", 0),
        struct.pack("<Q", 3) + bytes((7, 0, 0)),
        struct.pack("<Q", 27) + bytes(27),
        struct.pack("<Q", 29) + bytes(29),
        struct.pack("<Q", 2**64 - 1),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack("<Q", 28) + hello_answer((4, 0, 0))[:1].replace(b"\4", b"\3") + bytes(27),
    ],
    ids=["empty", "short form", "27", "29", "huge", "http", "version 3 in the form of 4"],
)
def test_an_answer_that_is_none(answer: bytes, no_leaks: LeakCheck) -> None:
    after: list[bytes] = []

    def server(peer: Peer) -> None:
        peer.take(9 + 24)
        peer.send(answer)
        after.append(peer.rest())

    with ScriptedServer(server) as scripted, pytest.raises(ProtocolError) as caught:
        open_connection(scripted.endpoint, 20.0)
    assert not isinstance(caught.value, VersionError)
    assert after == [b""]


@pytest.mark.parametrize("sent", [1, 8, 9, 35])
def test_closing_inside_the_answer_says_so(sent: int, no_leaks: LeakCheck) -> None:
    def server(peer: Peer) -> None:
        peer.take(9 + 24)
        peer.send((struct.pack("<Q", 28) + hello_answer((7, 0, 0)))[:sent])

    with ScriptedServer(server) as scripted, pytest.raises(PeerClosed) as caught:
        open_connection(scripted.endpoint, 20.0)
    assert caught.value.position == "inside"
    assert caught.value.bytes_done == sent


@pytest.mark.usefixtures("connected_at_once")
def test_no_answer_is_a_busy_server(no_leaks: LeakCheck) -> None:
    with ScriptedServer(lambda peer: peer.rest() and None) as scripted, pytest.raises(ServerBusy) as caught:
        open_connection(scripted.endpoint, 0.3)
    assert "one client at a time" in caught.value.hint
    assert "no ggml RPC server" in caught.value.hint
    assert caught.value.phase == "hello"


@pytest.mark.usefixtures("connected_at_once")
def test_a_server_that_speaks_something_else_and_waits_for_more(no_leaks: LeakCheck) -> None:
    """Such as a web server, to which HELLO is half a line."""

    def web(peer: Peer) -> None:
        data = b""
        while b"\n" not in data:
            part = peer.socket.recv(100)
            if not part:
                return
            data += part

    with ScriptedServer(web) as scripted, pytest.raises(ServerBusy) as caught:
        open_connection(scripted.endpoint, 0.3)
    assert "no ggml RPC server" in caught.value.hint


def held(seconds: float) -> Callable[[Peer], None]:
    """A server without a free place: it takes HELLO, leaves it unanswered for a while, and closes."""

    def server(peer: Peer) -> None:
        peer.request()
        peer.socket.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            peer.rest()

    return server


def test_a_server_that_holds_and_closes_is_busy_and_not_old(
    monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    monkeypatch.setattr(negotiate, "_HELD", 0.1)
    with ScriptedServer(held(0.3), held(0.3)) as scripted, pytest.raises(ServerBusy) as caught:
        open_connection(scripted.endpoint, 20.0)
    assert scripted.connections == 2
    assert "may be full" in caught.value.hint
    assert 0.2 < caught.value.elapsed < 20


def test_time_that_runs_out_after_a_server_held_and_closed(
    monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    """Its patience ends a moment before ours: still busy, and not a connection that could not be made."""
    monkeypatch.setattr(negotiate, "_HELD", 0.1)
    connecting = negotiate.connect_tcp

    def second_is_late(endpoint: str, timeout: float) -> object:
        if scripted.connections:
            raise TransferTimeout("too late", phase="connect")
        return connecting(endpoint, timeout)

    with ScriptedServer(held(0.3)) as scripted:
        monkeypatch.setattr(negotiate, "connect_tcp", second_is_late)
        with pytest.raises(ServerBusy) as caught:
            open_connection(scripted.endpoint, 20.0)
    assert caught.value.phase == "hello"


def test_an_old_server_that_was_busy_first(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    """It closes on the new form as soon as it gets to us, and takes the old one."""
    monkeypatch.setattr(negotiate, "_HELD", 0.1)

    def serve(peer: Peer) -> None:
        assert serve_hello(peer, (2, 0, 0))
        peer.rest()

    with ScriptedServer(held(0.3), serve) as scripted:
        assert open_and_close(scripted.endpoint)[:2] == ("2.0.0", "2.0")


def test_half_an_answer_is_a_stall_and_not_a_busy_server(no_leaks: LeakCheck) -> None:
    def server(peer: Peer) -> None:
        peer.take(9 + 24)
        peer.send(bytes(3))
        peer.rest()

    with ScriptedServer(server) as scripted, pytest.raises(TransferTimeout) as caught:
        open_connection(scripted.endpoint, 2.0)  # in which the three bytes come, on a busy machine
    assert not isinstance(caught.value, ServerBusy)
    assert caught.value.bytes_done == 3


def test_dripping_bytes_do_not_stretch_the_deadline(no_leaks: LeakCheck) -> None:
    """Every byte is progress, yet HELLO as a whole has to be through within the timeout."""
    stop = threading.Event()

    def server(peer: Peer) -> None:
        peer.take(9 + 24)
        message = struct.pack("<Q", 28) + hello_answer((7, 0, 0))
        try:
            for at in range(len(message)):
                peer.send(message[at : at + 1])
                if stop.wait(0.1):
                    return
        except OSError:
            return
        raise AssertionError("the client read a whole answer that took 3.6 s")

    with ScriptedServer(server) as scripted, pytest.raises(TransferTimeout):
        open_connection(scripted.endpoint, 0.5)
    stop.set()


def test_nobody_listens(no_leaks: LeakCheck) -> None:
    with ScriptedServer() as scripted:
        endpoint = scripted.endpoint
    with pytest.raises(TransportError):
        open_connection(endpoint, 5.0)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "30", None, 10**400, -(10**400), True, 1e9])
def test_a_timeout_that_is_none(timeout: float) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        open_connection("127.0.0.1:1", timeout)


@pytest.mark.parametrize("protocol", ["9.0", "0.9", "seven", "", "7.0.0.0", "7.4", "7.0.256", 7, b"7.0"])
def test_a_protocol_nobody_speaks_is_refused_before_connecting(protocol: str) -> None:
    with pytest.raises(ConfigError, match="protocol"):
        open_connection("127.0.0.1:1", 1.0, protocol)


@pytest.mark.parametrize("endpoint", ["host:port:port", "", None, 5, b"host:1", ("host", 1)])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint") as caught:
        open_connection(endpoint, 1.0)
    assert caught.value.hint


def test_a_server_that_was_asked_nothing_is_not_busy(no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting took all the time there was."""
    connecting = negotiate.connect_tcp
    now = 0.0

    def slow(endpoint: str, timeout: float) -> object:
        nonlocal now
        stream = connecting(endpoint, 20.0)
        assert accepted.wait(20)
        now += timeout
        return stream

    monkeypatch.setattr(negotiate, "connect_tcp", slow)
    monkeypatch.setattr(negotiate, "time", SimpleNamespace(monotonic=lambda: now))
    accepted = threading.Event()
    heard: list[bytes] = []

    def server(peer: Peer) -> None:
        accepted.set()
        heard.append(peer.rest())

    with ScriptedServer(server) as scripted, pytest.raises(TransferTimeout) as caught:
        open_connection(scripted.endpoint, 20.0)
    assert not isinstance(caught.value, ServerBusy)
    assert heard == [b""]


def test_rdma_of_a_version_that_has_none_is_refused_before_connecting() -> None:
    with pytest.raises(ConfigError, match=r"protocol 3\.0 has no RDMA"):
        open_connection("127.0.0.1:1", 1.0, "3.0", "rdma")


def test_a_busy_server_may_want_rdma(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    monkeypatch.setattr(negotiate, "_HELD", 0.1)
    with ScriptedServer(held(0.3), held(0.3)) as scripted, pytest.raises(ServerBusy) as caught:
        open_connection(scripted.endpoint, 20.0, transport="tcp")
    assert "or it requires RDMA, which was not offered: TCP was asked for" in caught.value.hint
