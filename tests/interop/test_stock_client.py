"""Stock clients of each protocol against our server emulating that protocol; bytes compared on both sides."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.awkward import BLOCKS, I8, MIB, awkward_tensors
from support.leaks import LeakCheck, eventually

import weightwire
from weightwire import fnv1a64
from weightwire.cache.quarantine import FOLDER, list_quarantine
from weightwire.wire import CACHE_THRESHOLD

pytestmark = [pytest.mark.interop]

TENSORS = awkward_tensors()
SPECIFICATIONS = [(tensor.name, tensor.type_code, tensor.ne) for tensor in TENSORS]
LARGE = [tensor for tensor in TENSORS if len(tensor.data) > CACHE_THRESHOLD]


def major(protocol: str) -> int:
    """The first number of a protocol's version."""
    return int(protocol.split(".")[0])


@pytest.mark.parametrize("with_cache", [False, True], ids=["plain", "cache"])
@pytest.mark.parametrize("weights", [False, True], ids=["scratch", "weights"])
def test_everything_it_sends_arrives(no_leaks: LeakCheck, stock_protocol, stock_client, tmp_path, with_cache, weights):
    folder = tmp_path / "entries"
    with weightwire.Server("127.0.0.1", 0, cache=folder if with_cache else None, protocol=stock_protocol) as server:
        client = stock_client(f"127.0.0.1:{server.port}", stock_protocol)
        assert client.create(SPECIFICATIONS, weights=weights) == [len(tensor.data) for tensor in TENSORS]
        for index, tensor in enumerate(TENSORS):
            client.set(index, tensor.data)
        for index, tensor in enumerate(TENSORS):
            assert client.get(index, len(tensor.data)) == tensor.data, tensor.name
        check_served(server)
        client.close()
    saved = with_cache and (weights or major(stock_protocol) < 7)
    expected = {f"{fnv1a64(tensor.data):016x}": tensor.data for tensor in LARGE} if saved else {}
    assert (entries(folder) if with_cache else {}) == expected


def check_served(server: weightwire.Server) -> None:
    """The server's own view of the tensors is what the client sent."""
    for tensor in TENSORS:
        served = server.tensors[tensor.name]
        assert served.type_code == tensor.type_code
        assert tuple(served.ne)[: len(tensor.ne)] == tensor.ne
        assert set(tuple(served.ne)[len(tensor.ne) :]) <= {1}
        assert served.nbytes == len(tensor.data)
        assert served.view() == tensor.data, tensor.name
        if BLOCKS[tensor.type_code][0] == 1:
            assert served.numpy().tobytes() == tensor.data


def entries(folder: Path) -> dict[str, bytes]:
    """The files of a cache folder, but for those in quarantine."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != FOLDER}


def test_a_hit_fills_the_tensor(stock_protocol, stock_client, tmp_path):
    folder = tmp_path / "entries"
    with weightwire.Server("127.0.0.1", 0, cache=folder, protocol=stock_protocol) as server:
        for _ in range(2):
            client = stock_client(f"127.0.0.1:{server.port}", stock_protocol)
            client.create(SPECIFICATIONS, weights=True)
            before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
            for index, tensor in enumerate(TENSORS):
                client.set(index, tensor.data)
            for index, tensor in enumerate(TENSORS):
                assert client.get(index, len(tensor.data)) == tensor.data, tensor.name
            check_served(server)
            client.close()
        # The second round asked, was answered from the entries, and so wrote none again.
        assert len(before) == len(LARGE)
        assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_an_entry_gone_bad_is_not_served(stock_protocol, stock_client, tmp_path):
    folder = tmp_path / "entries"
    folder.mkdir()
    victim = LARGE[0]
    flipped = bytearray(victim.data)
    flipped[len(flipped) // 2] ^= 1
    for tensor, content in ((victim, bytes(flipped)), (LARGE[1], b""), (LARGE[2], LARGE[2].data + b"x")):
        (folder / f"{fnv1a64(tensor.data):016x}").write_bytes(content)
    with weightwire.Server("127.0.0.1", 0, cache=folder, protocol=stock_protocol) as server:
        client = stock_client(f"127.0.0.1:{server.port}", stock_protocol)
        client.create(SPECIFICATIONS, weights=True)
        for index, tensor in enumerate(TENSORS):
            client.set(index, tensor.data)
        for index, tensor in enumerate(TENSORS):
            assert client.get(index, len(tensor.data)) == tensor.data, tensor.name
        client.close()
    assert entries(folder) == {f"{fnv1a64(tensor.data):016x}": tensor.data for tensor in LARGE}
    assert {entry.content_hash for entry in list_quarantine(folder)} == {fnv1a64(t.data) for t in LARGE[:3]}


def test_ranges_copies_and_fills(no_leaks: LeakCheck, stock_protocol, stock_client):
    size = 3 * MIB + 5
    pattern = bytes(range(256)) * (size // 256 + 1)
    expected = bytearray(size)
    with weightwire.Server("127.0.0.1", 0, protocol=stock_protocol) as server:
        client = stock_client(f"127.0.0.1:{server.port}", stock_protocol)
        client.create([("one", I8, (size,)), ("two", I8, (size,))], weights=True)
        client.call("clear", 0)
        assert client.get(0, size) == bytes(size)
        assert client.get(1, size) == bytes(size)
        client.set(0, pattern[:1000], 17)
        expected[17:1017] = pattern[:1000]
        client.set(0, b"\x00\x01", size - 2)
        expected[-2:] = b"\x00\x01"
        if major(stock_protocol) >= 5:
            client.call("memset", 0, 0xAB, 2000, MIB)
            expected[2000 : 2000 + MIB] = b"\xab" * MIB
        assert client.get(0, size) == expected
        assert client.get(0, 100, 2000) == expected[2000:2100]
        client.call("copy", 0, 1)
        assert client.get(1, size) == expected
        client.call("clear", 0x7F)
        assert client.get(0, size) == b"\x7f" * size
        assert client.get(1, 7, size - 7) == b"\x7f" * 7
        client.call("free")
        client.create([("three", I8, (64,))], weights=True)
        client.set(2, pattern[:64])
        assert client.get(2, 64) == pattern[:64]
        client.close()
        assert eventually(lambda: not server.tensors)


def test_many_stock_clients_at_once(no_leaks: LeakCheck, stock_client):
    small = [tensor for tensor in TENSORS if len(tensor.data) < MIB]
    specifications = [(tensor.name, tensor.type_code, tensor.ne) for tensor in small]
    with weightwire.Server("127.0.0.1", 0) as server:
        clients = [stock_client(f"127.0.0.1:{server.port}") for _ in range(4)]
        for client in clients:
            client.create(specifications, weights=True)
        for index, tensor in enumerate(small):
            for turn, client in enumerate(clients):
                client.set(index, bytes((byte + turn) % 256 for byte in tensor.data))
        for index, tensor in enumerate(small):
            for turn, client in enumerate(clients):
                assert client.get(index, len(tensor.data)) == bytes((byte + turn) % 256 for byte in tensor.data)
        for client in clients:
            client.close()
        assert eventually(lambda: not server.tensors)


def test_weights_stay_when_they_are_to_outlive_the_client(stock_client):
    with weightwire.Server("127.0.0.1", 0, retain="process") as server:
        client = stock_client(f"127.0.0.1:{server.port}")
        client.create(SPECIFICATIONS, weights=True)
        for index, tensor in enumerate(TENSORS):
            client.set(index, tensor.data)
        assert client.get(0, 1) == TENSORS[0].data[:1]
        client.close()
        check_served(server)


def test_a_graph_is_refused_in_one_logged_line(stock_server, stock_lib, gemma_path, caplog):
    """A stock loader fills our server with the model and then wants it to compute, which it does not."""
    from support.stock import stock_load

    with caplog.at_level(logging.INFO, logger="weightwire"), weightwire.Server("127.0.0.1", 0) as server:
        with pytest.raises(AssertionError, match="exit code"):
            stock_load(gemma_path, f"127.0.0.1:{server.port}", 1)
        lines = [record.getMessage() for record in caplog.records if "GRAPH_" in record.getMessage()]
        assert len(lines) == 1
        assert "compute" in lines[0]
        # It goes on serving.
        with weightwire.connect(f"127.0.0.1:{server.port}") as connection:
            connection.barrier()
