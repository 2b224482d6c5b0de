from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.leaks import LeakCheck

from weightwire.client import lookahead
from weightwire.client.lookahead import GROUP, HashAhead
from weightwire.errors import ModelError
from weightwire.hashing import fnv1a64
from weightwire.ranges import FileRange


def nothing() -> None:
    """Somebody who sees nothing."""


class Stop(Exception):
    """What a watcher raises."""


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[list[FileRange]]:
    """Four tensors of 256 GiB without data, which take minutes to hash."""
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    fd = os.open(path, os.O_RDONLY)
    yield [FileRange(fd, at << 38, 1 << 38, str(path)) for at in range(4)]
    os.close(fd)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 13])
def test_hashes_come_in_order_and_in_groups(count: int, no_leaks: LeakCheck) -> None:
    payloads = [memoryview(os.urandom(1000 + i)) for i in range(count)]
    ahead = HashAhead(payloads)
    ahead.start()
    hashes: list[int] = []
    while len(hashes) < count:
        group = ahead.next(nothing)
        assert len(group) == min(GROUP, count - len(hashes))
        hashes += group
    ahead.close()
    assert hashes == [fnv1a64(payload) for payload in payloads]


def test_it_is_at_most_two_groups_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    go = threading.Semaphore(0)
    reached = threading.Semaphore(0)

    def hash_payloads(payloads: Sequence[memoryview], *, check: Callable[[], object]) -> list[int]:
        begun.append(len(payloads))
        reached.release()
        assert go.acquire(timeout=20)
        return [0] * len(payloads)

    monkeypatch.setattr(lookahead, "hash_payloads", hash_payloads)
    ahead = HashAhead([memoryview(b"x")] * 40)
    assert not begun
    ahead.start()
    assert reached.acquire(timeout=20)
    assert not ahead.ready()
    go.release(10)
    ahead.next(nothing)
    for _ in range(2):
        assert reached.acquire(timeout=20)
    ahead.close()
    assert len(begun) == 3


def test_a_file_that_cannot_be_read(no_leaks: LeakCheck, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(10))
    fd = os.open(path, os.O_RDONLY)
    try:
        ahead = HashAhead([FileRange(fd, 0, 11, str(path))])
        ahead.start()
        with pytest.raises(ModelError):
            ahead.next(nothing)
        ahead.close()
    finally:
        os.close(fd)


def test_closing_ends_the_group_in_work_and_drops_the_rest(huge: list[FileRange], no_leaks: LeakCheck) -> None:
    ahead = HashAhead([*huge, *huge, *huge])
    ahead.start()
    assert not ahead.ready()
    ahead.close()
    ahead.close()


def test_closing_what_was_never_started(huge: list[FileRange], no_leaks: LeakCheck) -> None:
    HashAhead(huge).close()


def test_a_watcher_that_raises_ends_the_wait(huge: list[FileRange], no_leaks: LeakCheck) -> None:
    looks = 0

    def watch() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise Stop

    ahead = HashAhead(huge)
    ahead.start()
    with pytest.raises(Stop):
        ahead.next(watch)
    ahead.close()
    assert looks == 2
