"""A caller's memory, sent without a copy where it can be."""

from __future__ import annotations

import gc
import logging
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fakeverbs import FakeVerbs
from support.leaks import LeakCheck

from weightwire import Connection, Server, connect
from weightwire.client import registered
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


@pytest.mark.parametrize("limit", [8 << 20, None])
def test_over_the_limit(
    connection: Connection,
    fake: FakeVerbs,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
) -> None:
    monkeypatch.setattr(registered, "locked_memory_limit", lambda: limit)
    array = weights()
    fake.fault("reg_mr:ENOMEM")
    with caplog.at_level(logging.INFO, "weightwire"), connection.register(array) as memory:
        assert not memory.pinned
        assert "ibv_reg_mr" in memory.reason
        assert ("within 8192 KiB of locked memory; raise the limit: ulimit -l" in memory.reason) == bool(limit)
        assert ("no limit binds" in memory.reason) == (limit is None)
        profile = connection.push({"a": array}, verify=True).summary.profile
    assert profile.direct_bytes == 0
    assert profile.copied_bytes > array.nbytes
    assert "cannot be registered and will be copied" in caplog.text


def test_any_other_refusal_is_told_as_it_is(connection: Connection, fake: FakeVerbs) -> None:
    fake.fault("reg_mr:EFAULT")
    with connection.register(weights()) as memory:
        assert memory.reason.startswith("ibv_reg_mr: Bad address")
        assert "limit" not in memory.reason


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_mapped_file_is_not_pinned(
    connection: Connection, server: Server, fake: FakeVerbs, tmp_path: Path, mode: Any
) -> None:
    """Nothing would ever be sent out of it: what is pushed or written from there is read out of the file."""
    path = tmp_path / "bytes"
    path.write_bytes(weights(MIB).tobytes())
    mapped = np.memmap(path, np.uint8, mode)
    regions = fake.get("mrs")
    with connection.register(mapped[4096:]) as memory:
        assert fake.get("mrs") == regions
        assert not memory.pinned
        assert memory.reason == "it lies in a mapped file, which is read by position"
        pushed = connection.push({"a": mapped}, verify=True)
        assert pushed.summary.profile.direct_bytes == 0
    pushed["a"].write(mapped[MIB // 2 :])
    connection.barrier()
    assert server.tensors["a"].view()[: MIB // 2] == mapped[MIB // 2 :].data


def test_an_anonymous_mapping_is_pinned(connection: Connection) -> None:
    with mmap.mmap(-1, MIB) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        with connection.register(view) as memory:
            assert memory.pinned
            assert connection.push({"a": view}).summary.profile.direct_bytes == MIB
        del view, memory
        connection.close()


@pytest.mark.parametrize("dtype", ["datetime64[s]", "timedelta64[ms]", "complex128", [("a", "<f4"), ("b", "<i8")]])
def test_any_dtype(connection: Connection, server: Server, dtype: Any) -> None:
    """numpy itself gives no buffer of some of them."""
    array = weights(1200).view(np.dtype(dtype)) if not isinstance(dtype, list) else np.zeros(100_000, dtype)
    array = np.resize(array, 100_000)
    pushed = connection.push({"a": np.zeros(array.nbytes, np.uint8)})
    with connection.register(array) as memory:
        assert memory.pinned
        assert memory.nbytes == array.nbytes
        pushed["a"].write(array)
        assert connection.push({"b": array}, verify=True).summary.profile.direct_bytes == array.nbytes
    assert bytes(pushed["a"].read()) == array.tobytes()


def test_big_endian_numbers_are_sent_as_a_copy_and_so_not_pinned(connection: Connection, server: Server) -> None:
    array = np.arange(100_000, dtype=">f4")
    with connection.register(array) as memory:
        assert not memory.pinned
        assert "big-endian" in memory.reason
        pushed = connection.push({"a": array}, verify=True)
    np.testing.assert_array_equal(pushed["a"].numpy(), array)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.zeros((4, 4))[:, 1], "not contiguous"),
        (np.zeros((4, 4), "datetime64[s]")[:, 1], "not contiguous"),
        (np.zeros(3, object), "Python objects"),
        (np.zeros(0), "empty"),
        (b"", "empty"),
        (7, "no buffer"),
        (None, "no buffer"),
        ("text", "no buffer"),
    ],
)
def test_what_cannot_be_registered_at_all(connection: Connection, wrong: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        connection.register(wrong)  # type: ignore[arg-type]
    assert caught.value.hint
    assert "contiguous" in caught.value.hint or says != "not contiguous"
    assert "contiguous" not in caught.value.hint or says == "not contiguous"


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
        assert memory.pinned
    assert not memory.pinned
    assert memory.reason == "the connection was closed"
    assert "not pinned" in repr(memory)
    memory.close()
    assert memory.reason == "it was closed"
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
