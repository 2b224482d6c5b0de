"""Our client against stock servers of each protocol, without and with their cache; bytes compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from interop.proxy import RecordingProxy
from support.awkward import MIB, awkward_tensors
from support.leaks import LeakCheck

import weightwire
from weightwire import fnv1a64
from weightwire.errors import ServerBusy
from weightwire.wire import CACHE_THRESHOLD, Command

pytestmark = [pytest.mark.interop]

LARGE = {tensor.name: tensor.data for tensor in awkward_tensors() if len(tensor.data) > CACHE_THRESHOLD}
EVERYTHING = sum(len(tensor.data) for tensor in awkward_tensors())


def entries(folder: Path) -> dict[str, bytes]:
    """The files of a cache folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def expected_entries(names: set[str]) -> dict[str, bytes]:
    """What a stock server's cache holds after the tensors of these names were saved."""
    return {f"{fnv1a64(LARGE[name]):016x}": LARGE[name] for name in names}


def check_all(pushed: Mapping[str, weightwire.RemoteTensor]) -> None:
    """Every tensor read back, whole and in part, is what was pushed."""
    assert set(pushed) == {tensor.name for tensor in awkward_tensors()}
    for tensor in awkward_tensors():
        remote = pushed[tensor.name]
        assert bytes(remote.read()) == tensor.data, tensor.name
        middle = len(tensor.data) // 2
        assert bytes(remote.read(middle, 1)) == tensor.data[middle : middle + 1]


@pytest.mark.parametrize("cache", ["auto", "always", "never"])
def test_without_a_cache(stock_protocol, stock_server, awkward_gguf, cache, no_leaks: LeakCheck):
    server = stock_server(stock_protocol)
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        assert connection.protocol.split(".")[:2] == stock_protocol.split(".")[:2]
        assert connection.server_has_cache is False
        pushed = connection.push(awkward_gguf, cache=cache, verify=True)
        check_all(pushed)
        summary = pushed.summary
        assert (summary.tensors, summary.bytes, summary.sent) == (len(awkward_tensors()), EVERYTHING, EVERYTHING)
        assert (summary.hits, summary.misses) == (0, len(LARGE) if cache == "always" else 0)
    assert server.alive


@pytest.mark.parametrize("cache", ["auto", "always", "never"])
def test_with_a_cache(stock_protocol, stock_server, awkward_gguf, tmp_path, cache):
    server = stock_server(stock_protocol, tmp_path / "entries")
    assert server.cache is not None
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        pushed = connection.push(awkward_gguf, cache=cache, verify=True)
        check_all(pushed)
        assert pushed.summary.hits == 0
        assert pushed.summary.sent == EVERYTHING
    # Before protocol 7 a server saves whatever is over 10 MiB, from 7 on what the client marks. The file names are the
    # stock server's own hashes of what it received, and the content what it received.
    saves = cache == "always" or int(stock_protocol.split(".")[0]) < 7
    assert entries(server.cache) == expected_entries(set(LARGE) if saves else set())


def test_the_cache_fills_what_it_has(stock_protocol, stock_server, awkward_gguf, tmp_path):
    server = stock_server(stock_protocol, tmp_path / "entries")
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        connection.push(awkward_gguf, cache="always")
    with RecordingProxy(server.endpoint) as proxy, weightwire.connect(proxy.endpoint, timeout=60) as connection:
        pushed = connection.push(awkward_gguf, cache="always")
        check_all(pushed)
        summary = pushed.summary
        assert (summary.hits, summary.misses) == (len(LARGE), 0)
        assert summary.sent == EVERYTHING - sum(map(len, LARGE.values()))
        asked = {request.tensor.label for request in proxy.of(Command.SET_TENSOR_HASH) if request.tensor}
        assert asked == set(LARGE)
        assert all(request.size <= 10 * MIB + 305 for request in proxy.of(Command.SET_TENSOR))
        assert (
            sum(request.size for request in proxy.of(Command.SET_TENSOR))
            < summary.sent + 400 * summary.tensors + 2000 * summary.hits
        )


def test_a_partly_filled_cache(stock_server, awkward_gguf, tmp_path):
    server = stock_server(cache=tmp_path / "entries")
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        connection.push(awkward_gguf, cache="always", include="^q4_k_large$")
        pushed = connection.push(awkward_gguf, cache="always", verify=True)
        assert (pushed.summary.hits, pushed.summary.misses) == (1, len(LARGE) - 1)
        check_all(pushed)
    assert server.cache is not None
    assert entries(server.cache) == expected_entries(set(LARGE))


def test_narrow_quantised_tensors_are_announced_as_stock_clients_do(stock_protocol, stock_server, awkward_gguf):
    server = stock_server(stock_protocol)
    with RecordingProxy(server.endpoint) as proxy, weightwire.connect(proxy.endpoint, timeout=60) as connection:
        check_all(connection.push(awkward_gguf))
        announced = {request.tensor.label for request in proxy.of(Command.INIT_TENSOR) if request.tensor}
        # Rows of 288, 256 and 768 elements; those of 512 and 1024 need nothing.
        assert announced == {"q4_0_narrow", "q6_k_narrow", "q4_k_large"}
        assert len(proxy.of(Command.GET_ALLOC_SIZE)) == 3


def test_ranges_are_written_and_read(stock_protocol, stock_server, no_leaks: LeakCheck):
    server = stock_server(stock_protocol)
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        buffer = connection.allocate(8 * MIB)
        low = buffer.tensor("low", "i8", (MIB,))
        high = buffer.tensor("high", "i8", (MIB,), 7 * MIB)
        low.write(bytes(MIB))
        high.write(b"\x01" * MIB)
        low.write(b"\x00abc", 17)
        high.write(b"\xff", MIB - 1)
        connection.barrier()
        assert bytes(low.read(16, 6)) == b"\x00\x00abc\x00"
        assert bytes(high.read(MIB - 2)) == b"\x01\xff"
        assert bytes(low.read()) == bytes(17) + b"\x00abc" + bytes(MIB - 21)
        buffer.free()
        assert connection.device_count() == 1
        free, total = connection.device_memory()
        assert 0 < free <= total
    assert server.alive


def test_clients_one_after_the_other(stock_protocol, stock_server, awkward_gguf):
    server = stock_server(stock_protocol)
    for _ in range(3):
        with weightwire.connect(server.endpoint, timeout=60) as connection:
            pushed = connection.push(awkward_gguf, include="zero_first|cube|one_byte")
            assert set(pushed) == {"zero_first", "above_zero_first", "cube", "one_byte"}
            for tensor in awkward_tensors():
                if tensor.name in pushed:
                    assert bytes(pushed[tensor.name].read()) == tensor.data


@pytest.mark.usefixtures("connected_at_once")
def test_a_second_client_is_told_that_the_server_is_busy(stock_server):
    server = stock_server()
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        with pytest.raises(ServerBusy, match="client"):
            weightwire.connect(server.endpoint, timeout=1)
        connection.barrier()
    assert server.alive
