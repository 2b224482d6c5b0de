"""What kills a stock server is refused on our side, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from interop.proxy import RecordingProxy
from support.awkward import MIB

import weightwire
from weightwire.errors import AllocationError, ConfigError

pytestmark = [pytest.mark.interop]

Act = Callable[["weightwire.Connection"], object]


def into_a_small_tensor(nbytes: int, offset: int = 0) -> Act:
    """Writes to a tensor of 100 bytes in a buffer that would hold more."""
    return lambda connection: connection.allocate(MIB).tensor("small", "i8", (100,)).write(bytes(nbytes), offset)


def reading(offset: int, nbytes: int) -> Act:
    """Reads from a tensor of 100 bytes."""
    return lambda connection: connection.allocate(MIB).tensor("small", "i8", (100,)).read(offset, nbytes)


def placing(kind: str | int, ne: tuple[int, ...], offset: int = 0) -> Act:
    """Places a tensor in a buffer of 1 MiB."""
    return lambda connection: connection.allocate(MIB).tensor("placed", kind, ne, offset)


def after_free(connection: weightwire.Connection) -> None:
    """Writes to a buffer that was given back (a stock server of protocol 2 crashes on its handle)."""
    buffer = connection.allocate(MIB)
    tensor = buffer.tensor("gone", "i8", (100,))
    buffer.free()
    tensor.write(b"x")


MURDERS: dict[str, Act] = {
    "more bytes than the tensor, inside the buffer": into_a_small_tensor(101),
    "the end past the tensor's end": into_a_small_tensor(100, 1),
    "an offset past the tensor's end": into_a_small_tensor(1, 101),
    "an offset close to 2^64": into_a_small_tensor(1, 2**64 - 1),
    "a negative offset": into_a_small_tensor(1, -1),
    "reading past the end": reading(50, 51),
    "reading 2^63 bytes": reading(0, 2**63),
    "a tensor that reaches past the buffer": placing("f32", (MIB // 4 + 1,)),
    "a tensor that begins past the buffer": placing("i8", (1,), MIB),
    "a tensor of 2^63 bytes": placing("i8", (2**31, 2**32)),
    "a type nobody knows": placing(9999, (1,)),
    "rows that are no whole blocks": placing("q4_0", (33,)),
    "a buffer that was freed": after_free,
}


@pytest.mark.parametrize("murder", MURDERS)
def test_it_is_refused_here(stock_protocol, stock_server, murder):
    server = stock_server(stock_protocol)
    with RecordingProxy(server.endpoint) as proxy, weightwire.connect(proxy.endpoint, timeout=30) as connection:
        with pytest.raises(ConfigError):
            MURDERS[murder](connection)
        # The connection is as good as before, and so is the server.
        tensor = connection.allocate(4096).tensor("after", "i8", (4096,))
        data = np.arange(4096, dtype=np.uint16).astype(np.uint8)
        tensor.write(data)
        assert bytes(tensor.read()) == data.tobytes()
    assert server.alive
    assert all(request.size < 2**20 for request in proxy.requests)


def test_a_cut_cache_entry_of_the_right_name_is_not_taken_for_a_tensor(stock_server, awkward_gguf, tmp_path):
    """A stock server calls an entry that is cut short a hit; verify must not let it pass for the tensor."""
    server = stock_server(cache=tmp_path / "entries")
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        connection.push(awkward_gguf, cache="always", include="^just_above$")
    (entry,) = (tmp_path / "entries").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:5000])
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        # Without the probe, which would have seen it before.
        again = connection.push(awkward_gguf, cache="always", include="^just_above$", probe=False, verify=True)
        assert (again.summary.corrupt_hits, again.summary.verified) == (1, True)
        assert again["just_above"].read().tobytes() == whole
    assert entry.read_bytes() == whole
    assert server.alive


def test_a_buffer_nobody_has_memory_for(stock_protocol, stock_server):
    server = stock_server(stock_protocol)
    with weightwire.connect(server.endpoint, timeout=30) as connection:
        with pytest.raises(AllocationError):
            connection.allocate(2**60)
        connection.barrier()
    assert server.alive
