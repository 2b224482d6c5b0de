"""A forked child has the parent's connections in hand: it may let go of them, and nothing else."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.fakeverbs import FakeVerbs
from support.forks import in_a_fork
from support.rdma import connect_rdma, request

from weightwire import Server, connect
from weightwire._native import _verbs
from weightwire.client.channel import Channel
from weightwire.errors import TransportError, VerbsError
from weightwire.ranges import FileRange
from weightwire.transport.base import ByteStream
from weightwire.transport.tcp import TcpStream
from weightwire.wire.dialect import described_version

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")

Ends = tuple[ByteStream, ByteStream]

USES: dict[str, Callable[[ByteStream], object]] = {
    "send": lambda stream: stream.send(request(1, b"")),
    "send a large one": lambda stream: stream.send(request(6, bytes(1 << 20))),
    "send_range": lambda stream: stream.send_range([request(1, b"")], FileRange(0, 0, 0)),
    "recv": lambda stream: stream.recv(1, timeout=1),
    "recv_or_eof": lambda stream: stream.recv_or_eof(1, timeout=1),
    "recv_into": lambda stream: stream.recv_into(bytearray(1), timeout=1),
}


@pytest.fixture(params=["tcp", "rdma"])
def ends(request: pytest.FixtureRequest, fake: FakeVerbs, tcp_pair: tuple[TcpStream, TcpStream]) -> Any:
    if request.param == "tcp":
        yield tcp_pair
        return
    client, server = connect_rdma(*tcp_pair)
    yield client, server
    client.close()
    server.close()


def refused(use: Callable[[], object]) -> None:
    """``use`` raises what says that this is a fork."""
    with pytest.raises(TransportError, match="belongs to the process that was forked") as caught:
        use()
    assert caught.value.hint


def works(ends: Ends) -> None:
    """And nothing of a child's comes before or in between."""
    client, server = ends
    client.send(request(2, b"mine"))
    assert server.recv(13) == request(2, b"mine")
    server.send(bytes(8))
    assert client.recv(8) == bytes(8)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_is_refused(ends: Ends, use: Callable[[ByteStream], object]) -> None:
    assert in_a_fork(lambda: refused(lambda: use(ends[0]))) == 0
    works(ends)


@pytest.mark.parametrize("end", ["shutdown", "close"])
def test_ending_it_does_not_end_the_parents(ends: Ends, end: str) -> None:
    def leave() -> None:
        getattr(ends[0], end)()
        assert ends[0].peer_gone()

    assert in_a_fork(leave) == 0
    works(ends)


def test_a_thread_that_was_inside_goes_on(ends: Ends, background: Any) -> None:
    client, server = ends
    waiting = background(server.recv, 9)
    threading.Event().wait(0.1)

    def leave() -> None:
        server.close()
        assert server.fileno() == -1
        client.close()

    assert in_a_fork(leave) == 0
    client.send(request(1, b""))
    assert waiting.result() == request(1, b"")
    works(ends)


def test_a_handler_that_forks_inside_a_call(ends: Ends, alarm: Any) -> None:
    """The child comes back into the call that its parent is in, and must not take the parent's bytes."""
    client, server = ends
    children: list[int] = []

    def fork(number: int, frame: object) -> None:
        if children:
            return
        children.append(os.fork())
        if children[0] == 0:
            children[0] = -1
        else:
            client.send(request(1, b""))

    code = None
    try:
        with alarm(fork, 0.05):
            got = server.recv(9, timeout=20)
    except TransportError as error:
        code = 0 if "forked" in str(error) else 3
    except BaseException:
        code = 4
    finally:
        if children == [-1]:
            os._exit(5 if code is None else code)
    assert code is None
    assert got == request(1, b"")
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    works(ends)


@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_a_connection(fake: FakeVerbs, transport: str) -> None:
    array = np.arange(1000, dtype=np.uint8)
    with Server(port=0) as server, connect(server.endpoints[0], timeout=20, transport=transport) as connection:
        tensor = connection.push({"a": array})["a"]
        uses: list[Callable[[], object]] = [
            connection.devices, connection.barrier, tensor.read, tensor.buffer.free,
            lambda: connection.push({"a": array}), lambda: connection.register(array), lambda: tensor.write(array),
            lambda: connection.allocate(1),
        ]  # fmt: skip

        def use() -> None:
            for each in uses:
                refused(each)
            connection.close()

        assert in_a_fork(use) == 0
        assert tensor.read().tobytes() == array.tobytes()


def test_a_connection_that_another_thread_is_using(tcp_pair: tuple[TcpStream, TcpStream], background: Any) -> None:
    """Its lock is held for ever in the child."""
    channel = Channel(tcp_pair[0], described_version("7.0.0").dialect)
    entered, done = threading.Event(), threading.Event()

    def hold() -> None:
        with channel.exclusive("holding"):
            entered.set()
            assert done.wait(60)

    def use() -> None:
        with channel.exclusive("something"):
            pass

    holding = background(hold)
    assert entered.wait(60)
    assert in_a_fork(lambda: refused(use)) == 0
    done.set()
    holding.result()
    use()


def test_what_a_connection_is_made_of(fake: FakeVerbs) -> None:
    device = _verbs.devices()[0]
    with _verbs.Context(device) as context, _verbs.ProtectionDomain(context) as domain:

        def use() -> None:
            for each in (lambda: context.port(1), lambda: _verbs.MemoryRegion(domain, bytearray(10))):
                with pytest.raises(VerbsError, match="belongs to the process that was forked"):
                    each()
            with _verbs.Context(device) as mine:
                assert mine.port_count == 1

        assert in_a_fork(use) == 0
        assert context.port_count == 1


def test_the_signal_of_a_child_is_its_own() -> None:
    """The helper itself: what goes wrong in a child is seen."""
    assert in_a_fork(lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
    assert in_a_fork(lambda: [][0]) == 1
