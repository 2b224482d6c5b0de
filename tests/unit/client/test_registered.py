"""A caller's memory, sent without a copy where it can be."""

from __future__ import annotations

import gc
import logging
import mmap
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from support.fakeverbs import FakeVerbs
from support.leaks import LeakCheck

from weightwire import Connection, Server, connect
from weightwire.errors import ConfigError, TransportError

MIB = 1 << 20


@pytest.fixture
def server(fake: FakeVerbs, no_leaks: LeakCheck) -> Iterator[Server]:
    with Server(port=0) as running:
        yield running


@pytest.fixture
def connection(server: Server) -> Iterator[Connection]:
    with connect(server.endpoints[0], timeout=20, transport="rdma") as connected:
        yield connected


def weights(nbytes: int = 3 * MIB) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)


def test_what_lies_inside_is_not_copied(connection: Connection, server: Server) -> None:
    array, other = weights(), weights(MIB)
    with connection.register(array) as memory:
        assert memory.pinned
        assert (memory.nbytes, memory.reason) == (3 * MIB, "")
        profile = connection.push({"whole": array, "part": array[MIB : 2 * MIB], "other": other}).summary.profile
        assert profile.direct_bytes == 4 * MIB
        assert MIB < profile.copied_bytes < MIB + 16384
        assert "4.0 MiB sent where they lay, 1.0 MiB copied" in "\n".join(profile.lines())
    assert server.tensors["whole"].view() == array.data
    assert server.tensors["part"].view() == array[MIB : 2 * MIB].data
    assert server.tensors["other"].view() == other.data


def test_after_it_was_let_go_it_is(connection: Connection) -> None:
    array = weights()
    memory = connection.register(array)
    memory.close()
    memory.close()
    assert not memory.pinned
    assert memory.reason == "it was closed"
    profile = connection.push({"a": array}, verify=True).summary.profile
    assert profile.direct_bytes == 0
    assert profile.copied_bytes > array.nbytes


def test_a_write_goes_out_of_it_too(connection: Connection, server: Server) -> None:
    array = weights(MIB)
    pushed = connection.push({"a": np.zeros(MIB, np.uint8)}, cache="never")
    with connection.register(array):
        pushed["a"].write(array)
        connection.barrier()
    assert server.tensors["a"].view() == array.data


def test_over_the_limit(connection: Connection, fake: FakeVerbs, caplog: pytest.LogCaptureFixture) -> None:
    array = weights()
    fake.fault("reg_mr:ENOMEM")
    with caplog.at_level(logging.INFO, "weightwire"), connection.register(array) as memory:
        assert not memory.pinned
        assert "ibv_reg_mr" in memory.reason
        profile = connection.push({"a": array}, verify=True).summary.profile
    assert profile.direct_bytes == 0
    assert profile.copied_bytes > array.nbytes
    assert "cannot be registered and will be copied" in caplog.text


def test_a_read_only_mapping(connection: Connection, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("mapped") / "bytes"
    path.write_bytes(weights(MIB).tobytes())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        with connection.register(view):
            connection.push({"a": view}, verify=True)
        del view


@pytest.mark.parametrize("wrong", [np.zeros((4, 4))[:, 1], np.zeros(0), b"", 7, None, "text"])
def test_what_cannot_be_registered_at_all(connection: Connection, wrong: object) -> None:
    with pytest.raises(ConfigError, match="buffer"):
        connection.register(wrong)  # type: ignore[arg-type]


def test_the_buffer_lives_as_long(connection: Connection, fake: FakeVerbs) -> None:
    class Array(np.ndarray):
        """One that can be referred to weakly."""

    array = np.zeros(MIB, np.uint8).view(Array)
    known = weakref.ref(array)
    memory = connection.register(array)
    regions = fake.get("mrs")
    del array
    gc.collect()
    assert known() is not None
    memory.close()
    assert fake.get("mrs") == regions - 1
    gc.collect()
    assert known() is None


def test_closing_the_connection_lets_go(server: Server) -> None:
    with connect(server.endpoints[0], transport="rdma") as connection:
        memory = connection.register(weights())
    memory.close()
    with pytest.raises(TransportError):
        connection.register(weights())


def test_on_tcp_there_is_nothing_to_pin(no_leaks: LeakCheck) -> None:
    with Server(port=0) as server, connect(server.endpoints[0], transport="tcp") as connection:
        array = weights()
        with connection.register(array) as memory:
            assert not memory.pinned
            assert memory.reason == "the connection is on TCP"
            profile = connection.push({"a": array}, verify=True).summary.profile
        assert (profile.direct_bytes, profile.copied_bytes) == (0, 0)
        assert "RDMA" not in "\n".join(profile.lines())
