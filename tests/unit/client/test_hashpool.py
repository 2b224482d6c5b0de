from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from blake3 import blake3
from support.leaks import LeakCheck, eventually

from weightwire.client import hashpool
from weightwire.client.hashpool import HashPool
from weightwire.errors import ModelError
from weightwire.hashing import fnv1a64
from weightwire.index import Hashes
from weightwire.ranges import FileRange

MANY = 1 << 40
threads = pytest.mark.parametrize("threads", [0, 1, 2, 32])


def nothing() -> None:
    """Somebody who sees nothing."""


class Stop(Exception):
    """What a watcher raises."""


def random_payloads(count: int, size: int = 1000) -> list[memoryview]:
    return [memoryview(os.urandom(size + i)) for i in range(count)]


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[list[FileRange]]:
    """Four tensors of 256 GiB without data, which take minutes to hash."""
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    fd = os.open(path, os.O_RDONLY)
    yield [FileRange(fd, at << 38, 1 << 38, str(path)) for at in range(4)]
    os.close(fd)


class Gate:
    """Takes the place of the hashing: each payload waits until it is let through, and has its first byte for a hash."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.reached = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        monkeypatch.setattr(hashpool, "hash_payloads", self.hash)

    def hash(self, payloads: Sequence[memoryview], *, check: Callable[[], object]) -> list[int]:
        self.begun.extend(payload[0] for payload in payloads)
        self.reached.release()
        while not self.go.acquire(timeout=0.01):
            check()
        return [payload[0] for payload in payloads]

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.reached.acquire(timeout=20)


@threads
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 13])
def test_hashes_come_in_order(threads: int, group: int, count: int, no_leaks: LeakCheck) -> None:
    payloads = random_payloads(count)
    pool = HashPool(payloads, threads=threads, group=group)
    feed = pool.feed(range(count), 3000)
    pool.start()
    hashes = []
    for at in range(count):
        hashes.append(feed.get(at, nothing))
        assert feed.get(at, nothing) == hashes[-1]
        feed.release(at)
    pool.close()
    assert hashes == [fnv1a64(payload) for payload in payloads]
    assert len(feed) == count


@threads
def test_several_feeds_hash_everything_once(threads: int, monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    """Whoever wants a payload, in whatever order, and on whatever thread."""
    count = 60
    payloads = random_payloads(count, 50_000)
    hashed: list[int] = []
    real = hashpool.hash_payloads

    def counting(payloads: Sequence[memoryview], *, check: Callable[[], object]) -> list[int]:
        hashed.extend(map(id, payloads))
        return real(payloads, check=check)

    monkeypatch.setattr(hashpool, "hash_payloads", counting)
    pool = HashPool(payloads, threads=threads)
    orders = [range(count), range(count - 1, -1, -1), range(20, 40), range(0, count, 7), []]
    feeds = [pool.feed(order, 200_000) for order in orders]
    pool.start()
    got: list[list[int]] = [[] for _ in orders]

    def use(number: int) -> None:
        for at in range(len(orders[number])):
            got[number].append(feeds[number].get(at, nothing))
            feeds[number].release(at)

    users = [threading.Thread(target=use, args=(number,)) for number in range(len(orders))]
    for user in users:
        user.start()
    for user in users:
        user.join(60)
    pool.close()
    right = [fnv1a64(payload) for payload in payloads]
    assert got == [[right[index] for index in order] for order in orders]
    assert sorted(hashed) == sorted(map(id, payloads))


def test_bytes_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    gate = Gate(monkeypatch)
    payloads = [memoryview(bytes([number]) * size) for number, size in enumerate([40, 50, 20, 500, 10, 10])]
    pool = HashPool(payloads, threads=8)
    feed = pool.feed(range(6), 100)
    pool.start()
    gate.wait(2)
    gate.go.release(2)
    assert (feed.get(0, nothing), feed.get(1, nothing)) == (0, 1)
    assert sorted(gate.begun) == [0, 1], "the third would make it 110"
    feed.release(0)
    gate.wait(1)
    gate.go.release(1)
    assert feed.get(2, nothing) == 2
    feed.release(1)
    assert len(gate.begun) == 3, "the large one waits until it is alone"
    feed.release(2)
    gate.wait(1)
    gate.go.release(1)
    assert feed.get(3, nothing) == 3
    assert len(gate.begun) == 4, "and is alone"
    feed.release(3)
    gate.wait(2)
    gate.go.release(2)
    pool.close()
    assert sorted(gate.begun) == [0, 1, 2, 3, 4, 5]


@threads
def test_what_is_asked_for_comes_whatever_is_in_flight(threads: int, no_leaks: LeakCheck) -> None:
    payloads = random_payloads(9)
    pool = HashPool(payloads, threads=threads)
    feed = pool.feed(range(9), 1)
    pool.start()
    assert feed.get(8, nothing) == fnv1a64(payloads[8])
    assert feed.get(0, nothing) == fnv1a64(payloads[0])
    pool.close()


@threads
def test_what_is_known_is_not_read(threads: int, no_leaks: LeakCheck) -> None:
    payloads: list[FileRange | memoryview] = [FileRange(-1, 0, 10, "closed"), memoryview(b"abc")]
    pool = HashPool(payloads, threads=threads, known={0: 77}, digest=[0])
    feed = pool.feed([0, 1], MANY)
    assert feed.known == 1
    pool.start()
    assert feed.get(0, nothing) == 77
    assert feed.get(1, nothing) == fnv1a64(b"abc")
    assert pool.results() == {}
    pool.close()


def both_of(payload: memoryview) -> Hashes:
    return Hashes(fnv1a64(payload), blake3(payload).digest())


@threads
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("blocks", [frozenset(), frozenset([2, 5])], ids=["no blocks", "blocks"])
def test_both_hashes_come_of_those_that_want_them(
    threads: int, group: int, blocks: frozenset[int], tmp_path: Path, no_leaks: LeakCheck
) -> None:
    """However the payloads are hashed, and whether they are memory or parts of a file."""
    contents = random_payloads(7, 100_000)
    (tmp_path / "file").write_bytes(b"".join(contents))
    with open(tmp_path / "file", "rb") as file:
        starts = [sum(map(len, contents[:at])) for at in range(7)]
        ranges = [FileRange(file.fileno(), start, len(data)) for start, data in zip(starts, contents, strict=True)]
        payloads: list[FileRange | memoryview] = [*contents[:1], *ranges[1:6], *contents[6:]]
        pool = HashPool(payloads, threads=threads, digest=[0, 1, 2, 4], group=group, blocks=blocks)
        feed = pool.feed(range(7), MANY)
        pool.start()
        for at in range(7):
            assert feed.get(at, nothing) == fnv1a64(contents[at])
            feed.release(at)
        pool.close()
    assert pool.results() == {at: both_of(contents[at]) for at in (0, 1, 2, 4)}


def test_the_plain_way_takes_no_digest() -> None:
    payloads = random_payloads(3)
    pool = HashPool(payloads, threads=0, digest=range(3), plain=True)
    feed = pool.feed(range(3), MANY)
    pool.start()
    assert [feed.get(at, nothing) for at in range(3)] == [fnv1a64(each) for each in payloads]
    pool.close()
    assert pool.results() == {}


@pytest.mark.parametrize("group", [1, 4])
def test_a_group_that_is_given_up_is_hashed_by_the_next_who_asks(group: int, no_leaks: LeakCheck) -> None:
    payloads = [memoryview(bytes([at]) * (64 << 20)) for at in range(2)]
    pool = HashPool(payloads, threads=0, digest=[0, 1], group=group)
    feed = pool.feed(range(2), MANY)
    pool.start()

    def stop() -> None:
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashpool, "_LOOK", 0)
        with pytest.raises(Stop):
            feed.get(0, stop)
    assert pool.results() == {}
    assert [feed.get(at, nothing) for at in range(2)] == [fnv1a64(each) for each in payloads]
    pool.close()
    assert pool.results() == {at: both_of(payloads[at]) for at in range(2)}


@threads
def test_the_first_failure_is_everybodys(threads: int, huge: list[FileRange], no_leaks: LeakCheck) -> None:
    """At once, though what was asked for would take minutes."""
    fd = huge[0].fd
    broken = FileRange(fd, (1 << 40) - 5, 10, huge[0].path)
    pool = HashPool([broken, *huge] if threads < 2 else [*huge[:1], broken], threads=threads)
    feed = pool.feed(range(2), MANY)
    other = pool.feed([1], MANY)
    pool.start()
    with pytest.raises(ModelError, match="shorter"):
        feed.get(0, nothing)
    with pytest.raises(ModelError, match="shorter"):
        pool.check()
    with pytest.raises(ModelError, match="shorter"):
        other.get(0, nothing)
    pool.close()


@pytest.mark.parametrize("threads", [1, 2, 32])
def test_closing_ends_what_is_in_work(threads: int, huge: list[FileRange], no_leaks: LeakCheck) -> None:
    pool = HashPool([*huge, *huge, *huge], threads=threads, digest=range(12))
    pool.feed(range(12), MANY)
    pool.start()
    pool.close()
    pool.close()


def test_closing_what_was_never_started(huge: list[FileRange], no_leaks: LeakCheck) -> None:
    HashPool(huge, threads=4).close()


@threads
def test_a_watcher_that_raises_ends_the_wait(threads: int, huge: list[FileRange], no_leaks: LeakCheck) -> None:
    looks = 0

    def watch() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise Stop

    pool = HashPool(huge, threads=threads)
    feed = pool.feed(range(4), MANY)
    pool.start()
    with pytest.raises(Stop):
        feed.get(0, watch)
    pool.close()
    assert looks == 2


def test_without_threads_another_feed_takes_over(huge: list[FileRange], no_leaks: LeakCheck) -> None:
    """Of two callers one hashes and the other waits; the one who hashes gives up."""
    payloads: list[FileRange | memoryview] = [huge[0]]
    pool = HashPool(payloads, threads=0)
    one, other = pool.feed([0], MANY), pool.feed([0], MANY)
    waiting, leave = threading.Event(), threading.Event()
    ended: list[str] = []

    def hash_it() -> None:
        def watch() -> None:
            if leave.is_set():
                raise Stop

        with pytest.raises(Stop):
            one.get(0, watch)
        ended.append("one")

    def wait_for_it() -> None:
        def watch() -> None:
            waiting.set()
            if ended:
                raise Stop

        with pytest.raises(Stop):
            other.get(0, watch)
        ended.append("other")

    threads = [threading.Thread(target=hash_it), threading.Thread(target=wait_for_it)]
    threads[0].start()
    assert eventually(lambda: pool._state[0].name == "RUNNING")
    threads[1].start()
    assert waiting.wait(20)
    leave.set()
    for thread in threads:
        thread.join(20)
    assert ended == ["one", "other"]


def test_a_feed_that_is_closed_wants_nothing_more(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    gate = Gate(monkeypatch)
    pool = HashPool([memoryview(bytes([number]) * 10) for number in range(6)], threads=1)
    one, other = pool.feed([0, 1, 2], 10), pool.feed([3, 4, 5], 10)
    pool.start()
    gate.wait(1)
    one.close()
    gate.go.release(6)
    for at in range(3):
        assert other.get(at, nothing) == 3 + at
        other.release(at)
    pool.close()
    assert gate.begun == [0, 3, 4, 5]


def test_fewer_threads_than_wanted_will_do(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    start = threading.Thread.start
    left = 2

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        if thread.name.startswith("weightwire-hash"):
            if not left:
                raise RuntimeError("can't start new thread")
            left -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    payloads = random_payloads(9)
    for expected in (2, 0):
        pool = HashPool(payloads, threads=4)
        feed = pool.feed(range(9), MANY)
        pool.start()
        assert pool.threads == expected
        assert [feed.get(at, nothing) for at in range(9)] == [fnv1a64(payload) for payload in payloads]
        pool.close()


def test_two_threads_hash_at_the_same_time(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    gate = Gate(monkeypatch)
    pool = HashPool([memoryview(bytes([number])) for number in range(5)], threads=3)
    pool.feed(range(5), MANY)
    pool.start()
    gate.wait(3)
    time.sleep(0.05)
    assert len(gate.begun) == 3
    pool.close()
