from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weightwire.errors import ConfigError, TransferTimeout, TransportError
from weightwire.transport import tcp
from weightwire.transport.address import format_endpoint
from weightwire.transport.tcp import TcpStream, connect_tcp, listen_tcp

pytestmark = pytest.mark.usefixtures("no_fd_leak")


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


@pytest.fixture
def full() -> Iterator[int]:
    """A port on 127.0.0.1 whose queue is full: connecting to it is never answered."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        waiting = []
        while True:
            client = socket.socket()
            client.settimeout(0.3)
            waiting.append(client)
            try:
                client.connect(sock.getsockname())
            except TimeoutError:
                break
        yield sock.getsockname()[1]
        for client in waiting:
            client.close()


def accept(listener: socket.socket) -> TcpStream:
    listener.settimeout(20)
    return TcpStream(listener.accept()[0], 20.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_connects_and_talks(host: str) -> None:
    listeners = listen_tcp(host, 0)
    try:
        port = listeners[0].getsockname()[1]
        with connect_tcp(format_endpoint(host, port), 20.0) as client:
            ready, _, _ = select.select(listeners, [], [], 20.0)
            with accept(ready[0]) as server:
                client.send(b"hello")
                assert server.recv(5) == b"hello"
                assert client.endpoint == format_endpoint(host, port)
                assert client.timeout == 20.0
    finally:
        for sock in listeners:
            sock.close()


def two_addresses(host: str, port: int, flags: int = 0) -> list[Any]:
    """What a name that has both kinds of address gives."""
    return [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
    ]


def test_all_addresses_of_a_name_get_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tcp, "_addresses", two_addresses)
        listeners = listen_tcp("both", 0)
    try:
        assert len({sock.getsockname()[1] for sock in listeners}) == 1
        assert {sock.family for sock in listeners} == {socket.AF_INET, socket.AF_INET6}
        for sock, host in zip(listeners, [{2: "127.0.0.1", 10: "::1"}[s.family] for s in listeners], strict=True):
            with connect_tcp(format_endpoint(host, sock.getsockname()[1]), 20.0), accept(sock):
                pass
    finally:
        for sock in listeners:
            sock.close()


def test_the_ipv6_wildcard_alone_takes_ipv4_too() -> None:
    (sock,) = listen_tcp("::", 0)
    with sock, connect_tcp(f"127.0.0.1:{sock.getsockname()[1]}", 20.0), accept(sock) as server:
        assert server.endpoint.startswith("[::ffff:127.0.0.1]:")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
            listen_tcp("127.0.0.1", port)
    assert caught.value.errno == errno.EADDRINUSE
    assert "choose another port" in caught.value.hint


def test_a_port_just_left_can_be_had_again() -> None:
    (sock,) = listen_tcp("127.0.0.1", 0)
    port = sock.getsockname()[1]
    client = connect_tcp(f"127.0.0.1:{port}", 20.0)
    accept(sock).close()  # this side closes first, so the port stays in TIME_WAIT
    client.close()
    sock.close()
    listen_tcp("127.0.0.1", port)[0].close()


def test_a_free_port_that_the_second_address_has_not_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    listen_one = tcp._listen_one
    calls: list[Any] = []

    def fail_once(family: int, kind: int, protocol: int, where: Any, *, v6only: bool) -> socket.socket:
        calls.append(where)
        if len(calls) == 2:
            raise OSError(errno.EADDRINUSE, "in use")
        return listen_one(family, kind, protocol, where, v6only=v6only)

    monkeypatch.setattr(tcp, "_listen_one", fail_once)
    monkeypatch.setattr(tcp, "_addresses", two_addresses)
    listeners = listen_tcp("both", 0)
    for sock in listeners:
        sock.close()
    assert len(listeners) == 2
    assert len(calls) == 4


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_listening_port_out_of_range(port: int) -> None:
    with pytest.raises(ConfigError, match=str(port)):
        listen_tcp("127.0.0.1", port)


@pytest.mark.parametrize("host", ["", " ", "127.0.0.1:80", "[::1]:80", "[::1", "a b", "::x", "*"])
def test_a_host_that_is_none_never_means_everywhere(host: str) -> None:
    with pytest.raises(ConfigError, match="host to listen on"):
        listen_tcp(host, 0)


def test_an_address_in_brackets() -> None:
    (sock,) = listen_tcp("[::1]", 0)
    assert sock.getsockname()[0] == "::1"
    sock.close()


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1:") as caught:
        listen_tcp("192.0.2.1", 0)
    assert "no such address" in caught.value.hint


@pytest.mark.parametrize(
    "call", [lambda: listen_tcp("no-such-host.invalid", 0), lambda: connect_tcp("no-such-host.invalid", 20)]
)
def test_a_name_nobody_knows(call: Any) -> None:
    with pytest.raises(TransportError, match=r"no-such-host\.invalid") as caught:
        call()
    assert caught.value.operation == "getaddrinfo"
    assert "host name" in caught.value.hint


def test_refused_names_the_address_and_asks_for_the_server(free_port: int) -> None:
    with pytest.raises(TransportError, match=rf"127\.0\.0\.1:{free_port}: Connection refused") as caught:
        connect_tcp(f"127.0.0.1:{free_port}", 20.0)
    assert caught.value.errno == errno.ECONNREFUSED
    assert "is the server running" in caught.value.hint


def test_an_endpoint_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError):
        connect_tcp("host:port", 1.0)


def addresses(*hosts: str, port: int) -> Any:
    def getaddrinfo(host: str, *_: Any, flags: int = 0, **__: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    return getaddrinfo


@pytest.mark.parametrize("error", [MemoryError(), LookupError("unknown encoding: idna")])
@pytest.mark.parametrize("use", [lambda: connect_tcp("name:1", 20.0), lambda: tcp.listen_tcp("name", 1)])
def test_a_lookup_for_which_memory_is_short(
    error: Exception, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on another thread, and whoever asked is told."""

    def getaddrinfo(*_: Any, flags: int = 0, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "not a number") if flags & socket.AI_NUMERICHOST else error

    monkeypatch.setattr(tcp.socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(type(error)) as caught:
        use()
    assert caught.value is error


def test_every_address_is_tried_until_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.3", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(tcp.socket, "getaddrinfo", addresses("127.0.0.1", "127.0.0.2", "127.0.0.3", port=port))
        with connect_tcp(f"many:{port}", 20.0) as stream:
            assert stream.endpoint == f"many:{port}"


def test_where_none_answers_each_is_named(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setattr(tcp.socket, "getaddrinfo", addresses("127.0.0.1", "127.0.0.2", port=free_port))
    with pytest.raises(TransportError) as caught:
        connect_tcp(f"many:{free_port}", 20.0)
    assert f"127.0.0.1:{free_port}: Connection refused" in caught.value.detail
    assert f"127.0.0.2:{free_port}: Connection refused" in caught.value.detail


def test_no_answer_is_a_timeout_of_the_connect_phase(full: int) -> None:
    with pytest.raises(TransferTimeout) as caught:
        connect_tcp(f"127.0.0.1:{full}", 0.2)
    assert caught.value.phase == "connect"
    assert caught.value.elapsed >= 0.2


def test_a_dead_address_leaves_time_for_a_live_one(monkeypatch: pytest.MonkeyPatch, full: int) -> None:
    with socket.create_server(("127.0.0.2", full)):
        monkeypatch.setattr(tcp.socket, "getaddrinfo", addresses("127.0.0.1", "127.0.0.2", port=full))
        connect_tcp(f"many:{full}", 4.0).close()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A name server that never answers."""
    release = threading.Event()

    def getaddrinfo(*_: Any, flags: int = 0, **__: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        release.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "too late")

    monkeypatch.setattr(tcp.socket, "getaddrinfo", getaddrinfo)
    before = threading.active_count()
    yield
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("weightwire-resolve"):
            thread.join(20)
    assert threading.active_count() <= before


@pytest.mark.usefixtures("silent")
def test_a_name_server_that_never_answers() -> None:
    with pytest.raises(TransferTimeout, match="looking up slow") as caught:
        connect_tcp("slow", 0.1)
    assert caught.value.phase == "connect"
    assert "name server" in caught.value.hint


@pytest.mark.usefixtures("silent")
def test_a_name_server_that_never_answers_whoever_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "LOOKUP_TIMEOUT", 0.1)
    with pytest.raises(TransportError, match="cannot listen on slow:1: looking it up took longer") as caught:
        listen_tcp("slow", 1)
    assert (caught.value.operation, caught.value.errno) == ("getaddrinfo", errno.ETIMEDOUT)
    assert "name server" in caught.value.hint


@pytest.mark.parametrize(("host", "asked"), [("here.example", b"here.example"), ("hä.example", "hä.example")])
def test_a_name_in_ascii_needs_no_codec(monkeypatch: pytest.MonkeyPatch, host: str, asked: str | bytes) -> None:
    """The tables of that for international names take memory, and where it is short are reported as missing."""
    heard: list[str | bytes] = []

    def getaddrinfo(name: str | bytes, *_: Any, **__: Any) -> Any:
        heard.append(name)
        raise socket.gaierror(socket.EAI_NONAME, "nobody knows")

    monkeypatch.setattr(tcp.socket, "getaddrinfo", getaddrinfo)
    for call in (lambda: connect_tcp(f"{host}:1", 20.0), lambda: listen_tcp(host, 1)):
        with pytest.raises(TransportError, match="nobody knows"):
            call()
    assert heard == [asked] * 4
