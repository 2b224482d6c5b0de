"""weightwire and stock peers over RDMA, in both roles, bytes compared. Run by pytest inside the guest: see
tests/rdma/test_guest.py."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from prepare import peers
from support.guest import ADDRESS
from support.stock import StockClient, StockServer

import weightwire
from weightwire.errors import CompletionError, PeerClosed
from weightwire.ranges import FileRange

#: What a stock peer prints once its queue pair is connected.
ACTIVATED = "RDMA activated"
ON_RDMA = "RDMA on rxe0"

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("protocol", peers.WITH_RDMA)
def test_to_a_stock_server(slice_path: Path, stock_on_device: Callable[[str], StockServer], protocol: str) -> None:
    server = stock_on_device(protocol)
    with (
        weightwire.open_model(slice_path) as model,
        weightwire.connect(server.endpoint, transport="rdma") as connection,
    ):
        assert (connection.transport["kind"], connection.transport["send_depth"]) == ("rdma", 8)
        assert connection.protocol.rsplit(".", 1)[0] == protocol.rsplit(".", 1)[0]
        pushed = connection.push(model)
        for name, tensor in model.tensors.items():
            assert bytes(pushed[name].read()) == tensor.view(), name
    assert ACTIVATED in server.output()
    assert server.alive


@pytest.mark.parametrize("protocol", peers.WITH_RDMA)
def test_from_a_stock_client(
    slice_path: Path,
    stock_client: Callable[[str, str], StockClient],
    protocol: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "weightwire")
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(weightwire.open_model(slice_path))
        server = stack.enter_context(weightwire.Server(ADDRESS, 0, protocol=protocol, retain="process"))
        client = stock_client(server.endpoints[0], protocol)
        tensors = list(model.tensors.values())
        shapes = [(tensor.name, tensor.type_code, tensor.ne) for tensor in tensors if tensor.type_code is not None]
        assert client.create(shapes, weights=True) == [tensor.nbytes for tensor in tensors]
        for index, tensor in enumerate(tensors):
            assert isinstance(tensor.payload, FileRange)
            client.set_from(index, slice_path, tensor.payload.offset, tensor.nbytes)
        for index, tensor in enumerate(tensors):
            assert client.get(index, tensor.nbytes) == tensor.view(), tensor.name
        for tensor in tensors:
            assert server.tensors[tensor.name].view() == tensor.view(), tensor.name
        # Upstream makes several connections; every one moved, at both ends.
        connections = client.output().count("RDMA probed")
        assert connections > 0
        assert client.output().count(ACTIVATED) == connections
    assert sum(ON_RDMA in record.getMessage() for record in caplog.records) == connections


def test_a_stock_server_that_is_killed(stock_on_device: Callable[[str], StockServer]) -> None:
    server = stock_on_device(peers.FULL_PROTOCOL)
    with weightwire.connect(server.endpoint, transport="rdma") as connection:
        connection.barrier()
        server.stop()
        with pytest.raises((PeerClosed, CompletionError)):
            connection.barrier()
