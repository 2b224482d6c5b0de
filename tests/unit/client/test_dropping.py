"""Dropping behind: which pages of a real file are in memory before and after."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pagecache import cache, need_droppable, one_processor, share

from weightwire.client import dropping
from weightwire.client.dropping import DropBehind
from weightwire.ranges import FileRange

MIB = 1 << 20
SIZE = 40 * MIB
EDGE = 4 * MIB
"""The cache may hold pages in blocks (large folios), and what reaches into one drops none of it."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that is wholly in memory."""
    need_droppable(tmp_path)
    made = tmp_path / "model"
    made.write_bytes(os.urandom(MIB) * (SIZE // MIB) + b"the end")
    cache(made)
    assert share(made) == 1
    return made


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


def ranges(fd: int, nbytes: int, end: int) -> list[FileRange]:
    """Ranges of ``nbytes`` bytes, one after the other."""
    return [FileRange(fd, start, min(nbytes, end - start)) for start in range(0, end, nbytes)]


def test_ranges_that_share_pages_go_as_one(path: Path, fd: int) -> None:
    drop = DropBehind()
    parts = ranges(fd, 1_000_003, SIZE + len(b"the end"))
    drop.want(parts)
    for part in parts:
        drop.done(part)
    drop.close()
    assert share(path) == 0


def test_padding_between_tensors_is_no_hindrance(path: Path, fd: int) -> None:
    drop = DropBehind()
    parts = [FileRange(fd, start, 4096 * 2 - 96) for start in range(0, SIZE, 4096 * 2)]
    drop.want(parts)
    for part in parts:
        drop.done(part)
    drop.close()
    assert share(path, 0, SIZE - EDGE) == 0


def test_what_others_need_stays(path: Path, fd: int) -> None:
    drop = DropBehind()
    parts = ranges(fd, 10 * MIB, SIZE)
    drop.want(parts)
    drop.want(parts[1:2])
    for part in parts:
        drop.done(part)
    assert [share(path, part.offset, part.nbytes) for part in parts[:3]] == [0, 1, 0]
    drop.close()
    assert share(path, 0, SIZE) == 0, "whoever wanted it is gone"


def test_it_does_not_wait_for_the_end(path: Path, fd: int) -> None:
    drop = DropBehind()
    parts = ranges(fd, 4 * MIB, SIZE)
    drop.want(parts)
    for part in parts[:6]:
        drop.done(part)
    assert share(path, 0, 16 * MIB) == 0
    assert share(path, 24 * MIB, 16 * MIB) == 1


def test_neighbours_that_were_not_sent_stay(path: Path, fd: int) -> None:
    drop = DropBehind()
    part = FileRange(fd, 10 * MIB + 100, 20 * MIB)
    drop.want([part])
    drop.done(part)
    drop.close()
    assert share(path, 0, 10 * MIB) == 1
    assert share(path, 31 * MIB, 9 * MIB) == 1
    assert share(path, 10 * MIB + EDGE, 20 * MIB - 2 * EDGE) == 0


def test_memory_and_nothing_are_let_be(fd: int) -> None:
    drop = DropBehind()
    odd = [memoryview(b"abc"), FileRange(fd, 0, 0)]
    drop.want(odd)
    for part in odd:
        drop.done(part)
    drop.close()


def test_what_a_socket_lets_go_of_late_is_dropped_at_the_end(
    path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are still in a packet when everything has been dropped for the first time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    held: list[float] = []
    real = dropping._advise

    def advise(*arguments: int) -> None:
        real(*arguments)
        if arguments[2] > SIZE:
            held.append(share(path, 32 * MIB, MIB))
            if len(held) == 2:  # the last batch, and the first try of the end
                far.recv(sent, socket.MSG_WAITALL)

    monkeypatch.setattr(dropping, "_advise", advise)
    with near, far, one_processor():
        near.setblocking(False)
        sent = os.sendfile(near.fileno(), fd, 32 * MIB, MIB)
        drop = DropBehind()
        parts = [*ranges(fd, 20 * MIB, SIZE), FileRange(fd, SIZE, len(b"the end"))]
        drop.want(parts)
        drop.done(parts[0])
        drop.done(FileRange(fd, 20 * MIB, 20 * MIB))
        drop.done(parts[2])
        drop.close()
    assert min(held[:2]) > 0, "it could not be dropped"
    assert share(path) == 0


def test_it_does_not_try_for_ever(path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody has mapped and touched stays."""
    advised: list[int] = []
    real = dropping._advise
    monkeypatch.setattr(dropping, "_advise", lambda *arguments: (advised.append(1), real(*arguments)))
    with mmap.mmap(fd, MIB, prot=mmap.PROT_READ) as mapped:
        assert mapped[0] == path.read_bytes()[0]
        drop = DropBehind()
        (part,) = [FileRange(fd, 0, SIZE)]
        drop.want([part])
        drop.done(part)
        drop.close()
        assert share(path) > 0
    assert 1 < len(advised) <= 5


def test_advice_that_cannot_be_taken_is_no_failure() -> None:
    reader, writer = os.pipe()
    try:
        drop = DropBehind()
        part = FileRange(reader, 0, 32 * MIB)
        drop.want([part])
        drop.done(part)
        drop.close()
    finally:
        os.close(reader)
        os.close(writer)
