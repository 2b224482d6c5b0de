"""RDMA streams and the TCP connection beside them: who has gone, and who never came."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from support.fakeverbs import FakeVerbs
from support.rdma import connect_rdma, request

from weightwire.errors import RdmaUnavailable, TransferTimeout, TransportError
from weightwire.transport.rdma import RdmaStream
from weightwire.transport.tcp import TcpStream


def test_whether_the_peer_has_gone(rdma_pair: tuple[RdmaStream, RdmaStream]) -> None:
    client, server = rdma_pair
    client.send(request(1, b""))
    assert not client.peer_gone()
    assert not server.peer_gone()
    client.close()
    assert client.peer_gone()
    deadline = time.monotonic() + 20
    while not server.peer_gone():
        assert time.monotonic() < deadline
    assert server.recv(9) == request(1, b""), "looking takes nothing"


def test_a_detached_connection_is_as_it_was(fake: FakeVerbs, tcp_pair: tuple[TcpStream, TcpStream]) -> None:
    client, server = connect_rdma(*tcp_pair)
    assert client.detach() is tcp_pair[0]
    assert server.detach() is tcp_pair[1]
    assert client.closed
    assert fake.handles() == {}
    tcp_pair[0].send(b"on")
    assert tcp_pair[1].recv(2) == b"on"
    assert client.detach() is None


@pytest.mark.parametrize("nbytes", [1, 9])
def test_a_peer_that_goes_on_over_tcp(
    rdma_pair: tuple[RdmaStream, RdmaStream], tcp_pair: tuple[TcpStream, TcpStream], nbytes: int
) -> None:
    _, server = rdma_pair
    tcp_pair[0].send(bytes(nbytes))
    with pytest.raises(RdmaUnavailable, match="goes on over TCP"):
        server.recv(1)
    tcp = server.detach()
    assert tcp.recv(nbytes) == bytes(nbytes)


def test_after_the_first_send_tcp_is_not_listened_to(
    rdma_pair: tuple[RdmaStream, RdmaStream], tcp_pair: tuple[TcpStream, TcpStream]
) -> None:
    client, server = rdma_pair
    client.send(request(1, b""))
    assert server.recv(9) == request(1, b"")
    tcp_pair[0].send(b"noise")
    with pytest.raises(TransferTimeout):
        server.recv(1, timeout=0.2)


@pytest.mark.parametrize(
    "use", [lambda stream: stream.send(request(1, b"")), lambda stream: stream.recv(1, timeout=1)], ids=["send", "recv"]
)
def test_a_fork_is_told_that_the_connection_is_not_its_own(
    rdma_pair: tuple[RdmaStream, RdmaStream], use: Callable[[RdmaStream], object]
) -> None:
    client, server = rdma_pair
    child = os.fork()
    if child == 0:
        code = 1
        try:
            use(client)
        except TransportError as error:
            code = 0 if "forked" in str(error) and error.hint else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.send(request(2, b"mine"))
    assert server.recv(13) == request(2, b"mine"), "and nothing was sent by the child"
