from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest
from support.leaks import LeakCheck

from weightwire.client import lookahead
from weightwire.client.lookahead import GROUP, HashAhead
from weightwire.errors import ModelError
from weightwire.hashing import fnv1a64
from weightwire.ranges import FileRange


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 13])
def test_hashes_come_in_order_and_in_groups(count: int, no_leaks: LeakCheck) -> None:
    payloads = [memoryview(os.urandom(1000 + i)) for i in range(count)]
    ahead = HashAhead(payloads)
    hashes: list[int] = []
    while len(hashes) < count:
        group = ahead.next()
        assert len(group) == min(GROUP, count - len(hashes))
        hashes += group
    ahead.close()
    assert hashes == [fnv1a64(payload) for payload in payloads]


def test_it_is_at_most_two_groups_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    go = threading.Semaphore(0)
    reached = threading.Semaphore(0)

    def hash_payloads(payloads: Sequence[memoryview]) -> list[int]:
        begun.append(len(payloads))
        reached.release()
        assert go.acquire(timeout=20)
        return [0] * len(payloads)

    monkeypatch.setattr(lookahead, "hash_payloads", hash_payloads)
    ahead = HashAhead([memoryview(b"x")] * 40)
    assert reached.acquire(timeout=20)
    assert not ahead.ready()
    go.release(10)
    ahead.next()
    for _ in range(2):
        assert reached.acquire(timeout=20)
    ahead.close()
    assert len(begun) == 3


def test_a_file_that_cannot_be_read(no_leaks: LeakCheck, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("ahead") / "short"
    path.write_bytes(bytes(10))
    fd = os.open(path, os.O_RDONLY)
    try:
        ahead = HashAhead([FileRange(fd, 0, 11, str(path))])
        with pytest.raises(ModelError):
            ahead.next()
        ahead.close()
    finally:
        os.close(fd)


def test_closing_waits_for_the_group_in_work_and_drops_the_rest(
    monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    begun = threading.Event()
    ended: list[bool] = []

    def hash_payloads(payloads: Sequence[memoryview]) -> list[int]:
        begun.set()
        threading.Event().wait(0.1)
        ended.append(True)
        return [0] * len(payloads)

    monkeypatch.setattr(lookahead, "hash_payloads", hash_payloads)
    ahead = HashAhead([memoryview(b"x")] * 40)
    assert begun.wait(20)
    ahead.close()
    assert ended == [True]
