"""What embedders' hooks may raise, and what becomes of their client."""

from __future__ import annotations

import logging

import pytest
from support.leaks import LeakCheck
from support.raw_client import RawClient

from weightwire.server import Destination, HostMemory, ServedTensor, Server
from weightwire.wire.commands import Command


class Trouble(BaseException):
    """No Exception, like SystemExit."""


def fail_with(error: BaseException) -> object:
    def fail(*arguments: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [RuntimeError("no\nthanks"), KeyError("x")])
def test_a_failing_callback_costs_a_line_and_no_client(
    no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    with Server(port=0, on_tensor=fail_with(error)) as server, RawClient(server.port) as client:  # type: ignore[arg-type]
        client.set(client.place("t", 10, client.allocate(10)), bytes(10))
        client.barrier()
        assert "t" in server.tensors
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is None
    assert "\n" not in record.getMessage()
    assert record.getMessage().startswith(f"on_tensor failed for tensor 't': {type(error).__name__}: ")


@pytest.mark.parametrize("error", [SystemExit(3), Trouble("stop"), KeyboardInterrupt()])
def test_a_callback_that_wants_out_ends_its_client_with_a_line(
    no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    with Server(port=0, on_tensor=fail_with(error)) as server:  # type: ignore[arg-type]
        with RawClient(server.port) as client:
            name = client.name
            client.set(client.place("t", 10, client.allocate(10)), bytes(10))
            assert client.closed()
        with RawClient(server.port) as client:
            client.barrier()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith(f"{name}: connection closed: SET_TENSOR of tensor 't' failed: ")
    assert type(error).__name__ in record.getMessage()


def test_the_traceback_is_there_for_who_asks(no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "weightwire.server")
    with (
        Server(port=0, on_tensor=fail_with(RuntimeError("here"))) as server,  # type: ignore[arg-type]
        RawClient(server.port) as client,
    ):
        client.set(client.place("t", 10, client.allocate(10)), bytes(10))
        client.barrier()
    assert "Traceback" in caplog.text
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.DEBUG]


@pytest.mark.parametrize("hook", ["read", "fill"])
def test_other_hooks_end_their_client_with_a_line(
    no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    kind = type("Broken", (HostMemory,), {hook: fail_with(RuntimeError("device lost"))})
    with Server(port=0, destination=kind) as server, RawClient(server.port) as client:
        buffer = client.allocate(10)
        tensor = client.place("t", 10, buffer)
        client.set(tensor, bytes(10))
        if hook == "read":
            client.send(8, client.dialect.encode_get_tensor(tensor, 0, 10))
            client.receive(8)  # its head has gone out before
        else:
            client.send(5, client.dialect.encode_buffer_clear(buffer[0], 7))
        assert client.closed()
    (record,) = caplog.records
    assert record.getMessage().endswith("failed: RuntimeError: device lost")
    assert record.exc_info is None


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(1)])
def test_a_destination_that_cannot_be_closed_gives_its_capacity_back(
    no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    class Stubborn(Destination):
        def write(self, offset: int, view: memoryview) -> None: ...

        def read(self, offset: int, view: memoryview) -> None: ...

        def close(self) -> None:
            raise error

    with Server(port=0, destination=Stubborn, memory=1 << 20) as server, RawClient(server.port) as client:
        client.free(client.allocate(100)[0])
        assert client.barrier() == (1 << 20, 1 << 20)
    (record,) = caplog.records
    assert record.getMessage().startswith("closing a destination of 100 bytes failed: ")
    assert record.exc_info is None


def test_a_factory_without_a_destination_costs_nothing(no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Server(port=0, destination=fail_with(ValueError("a bug")), memory=1 << 20) as server,  # type: ignore[arg-type]
        RawClient(server.port) as client,
    ):
        assert client.try_allocate(4096) == (0, 0)
        assert client.barrier() == (1 << 20, 1 << 20)
    (record,) = caplog.records
    assert record.getMessage() == "making a destination of 4096 bytes failed: ValueError: a bug"
    assert record.exc_info is None


def test_an_empty_tensor_is_told_of_and_listed_if_its_client_writes_it(no_leaks: LeakCheck) -> None:
    told: list[ServedTensor] = []
    with Server(port=0, on_tensor=told.append) as server, RawClient(server.port) as client:
        client.set(client.place("none", 0, client.allocate(10)), b"")
        client.barrier()
        assert [tensor.name for tensor in told] == ["none"]
        assert server.tensors["none"].nbytes == 0


@pytest.mark.parametrize(
    ("source", "target", "backwards"),
    [(0, 4 << 20, False), (0, 3 << 20, False), (0, 1 << 20, True), (1 << 20, 0, False), (4 << 20, 0, False)],
)
def test_a_copy_within_a_hook_comes_in_order_unless_it_moves_up_onto_itself(
    source: int, target: int, backwards: bool, no_leaks: LeakCheck
) -> None:
    offsets: list[int] = []

    class Memory(HostMemory):
        def write(self, offset: int, view: memoryview) -> None:
            offsets.append(offset)
            super().write(offset, view)

    nbytes = 3 << 20
    data = bytes(range(251)) * (nbytes // 251 + 1)
    with Server(port=0, destination=Memory) as server, RawClient(server.port) as client:
        buffer = client.allocate(8 << 20)
        src, dst = client.place("src", nbytes, buffer, source), client.place("dst", nbytes, buffer, target)
        client.set(src, data[:nbytes])
        client.barrier()
        offsets.clear()
        assert client.ask(Command.COPY_TENSOR, client.dialect.encode_copy_tensor(src, dst)) == b"\1"
        assert offsets == sorted(offsets, reverse=backwards)
        assert len(offsets) == 3
        assert client.get(dst) == data[:nbytes]
