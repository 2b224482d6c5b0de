"""Comparing with a file, and what happens where the file is no longer what it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.scripted import ScriptedServer, StandIn

from weightwire.client import verify
from weightwire.client.channel import Channel
from weightwire.client.device import allocate
from weightwire.client.remote import READ_CHUNK, RemoteTensor
from weightwire.errors import IntegrityError, ModelError
from weightwire.ranges import FileRange
from weightwire.transport.negotiate import open_connection

SIZES = [1, 5_000, READ_CHUNK - 1, READ_CHUNK, READ_CHUNK + 1, 2 * READ_CHUNK + 77, 0, 3]


class Held:
    """A file, the server that has its bytes, and how both are compared."""

    def __init__(self, path: Path, fd: int, server: StandIn, channel: Channel) -> None:
        self.path = path
        self.server = server
        self.channel = channel
        with channel.exclusive("allocate"):
            buffer = allocate(channel, sum(SIZES), 0)
        (self.memory,) = server.buffers.values()
        self.memory[:] = path.read_bytes()
        offsets = [sum(SIZES[:index]) for index in range(len(SIZES))]
        self.tensors = [
            RemoteTensor(f"t{i}", 24, (n,), n, buffer, at) for i, (n, at) in enumerate(zip(SIZES, offsets, strict=True))
        ]
        self.sources = [FileRange(fd, at, n, str(path)) for n, at in zip(SIZES, offsets, strict=True)]

    def compare(self) -> None:
        with self.channel.exclusive("verify"):
            verify.verify_tensors(self.channel, self.tensors, self.sources, hint="about it")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(1).bytes(sum(SIZES)))
    server = StandIn()
    fd = os.open(path, os.O_RDONLY)
    with ScriptedServer(server) as scripted:
        stream, _, dialect, _ = open_connection(scripted.endpoint, 20.0)
        channel = Channel(stream, dialect)
        try:
            yield Held(path, fd, server, channel)
        finally:
            channel.close()
            os.close(fd)


def test_equal_is_equal(held: Held) -> None:
    held.compare()
    assert not held.channel.outstanding


@pytest.mark.parametrize("tensor", [0, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("place", [lambda n: 0, lambda n: n // 2, lambda n: n - 1], ids=["first", "middle", "last"])
def test_one_wrong_byte_anywhere(held: Held, tensor: int, place: Callable[[int], int]) -> None:
    at = place(SIZES[tensor])
    held.memory[sum(SIZES[:tensor]) + at] ^= 1
    with pytest.raises(IntegrityError) as caught:
        held.compare()
    assert caught.value.name == f"t{tensor}"
    assert f"at byte {at} of {SIZES[tensor]}" in caught.value.detail
    assert caught.value.hint == "about it"
    assert int(caught.value.expected[:2], 16) ^ 1 == int(caught.value.actual[:2], 16)
    held.memory[sum(SIZES[:tensor]) + at] ^= 1
    held.compare()


def test_a_file_that_was_cut_short(held: Held) -> None:
    os.truncate(held.path, sum(SIZES[:3]))
    with pytest.raises(ModelError, match="shorter") as caught:
        held.compare()
    assert caught.value.offset == sum(SIZES[:3])
