"""The plain way of loading and the optimized one, in every pairing over RDMA. Run by pytest inside the guest."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.guest import ADDRESS
from support.leaks import LeakCheck

import weightwire
from weightwire.transport.rdma import RdmaStream

#: What each end logs once it is on RDMA.
ON_RDMA = "RDMA on rxe0"


@pytest.mark.parametrize("server", [True, False], ids=["to-new", "to-old"])
@pytest.mark.parametrize("client", [True, False], ids=["from-new", "from-old"])
def test_every_pairing(
    slice_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    no_leaks: LeakCheck,
    client: bool,
    server: bool,
) -> None:
    caplog.set_level(logging.INFO, "weightwire")
    with (
        weightwire.open_model(slice_path) as model,
        weightwire.Server(ADDRESS, 0, transport="rdma", cache=tmp_path, optimized=server) as serving,
    ):
        for hits in (0, 1):
            with weightwire.connect(serving.endpoints[0], transport="rdma", optimized=client) as connection:
                assert connection.transport["kind"] == "rdma"
                assert connection.transport["send_depth"] == (8 if client else 1)
                pushed = connection.push(model)
                assert (pushed.summary.hits, pushed.summary.misses) == (hits, 1 - hits)
                for name, tensor in model.tensors.items():
                    assert serving.tensors[name].view() == tensor.view(), name
                stream = connection._stream
                assert isinstance(stream, RdmaStream)
                in_flight = stream.counts["high_water"]
                print("SENDs in flight at most:", in_flight)
                assert in_flight <= (8 if client else 1)
    # One line from each end of each connection, with what may be in flight there.
    said = [record.getMessage() for record in caplog.records if ON_RDMA in record.getMessage()]
    depths = sorted(int(text.split(" SENDs in flight")[0].rsplit(" ", 1)[1]) for text in said)
    assert depths == sorted([8 if side else 1 for side in (client, server)] * 2)
