"""The core's clock: always in one stage, and what streams tell it of waiting."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest
from support.leaks import eventually

from weightwire._native._profile import INSIDE, STAGES, Profile
from weightwire.profile import Stage
from weightwire.transport.rdma import RdmaStream
from weightwire.transport.tcp import TcpStream
from weightwire.wire.commands import Command
from weightwire.wire.framing import request_header


def test_the_numbers_are_those_of_the_stages() -> None:
    assert len(Stage) == STAGES
    assert Stage.ALLOC == INSIDE
    assert [int(stage) for stage in Stage] == list(range(STAGES))


def test_switch_returns_what_was_left() -> None:
    profile = Profile()
    assert profile.on
    stages = [Stage.GAP, Stage.ASK, Stage.HASH, Stage.HASH, Stage.VERIFY, Stage.GAP]
    for left, entered in pairwise(stages):
        assert profile.switch(entered) == left


@pytest.mark.parametrize("stage", [-1, STAGES, 1000])
@pytest.mark.parametrize("on", [True, False])
def test_no_such_stage(stage: int, on: bool) -> None:
    with pytest.raises(ValueError, match=f"no stage {stage}"):
        Profile(on).switch(stage)


def test_every_nanosecond_between_begin_and_mark_is_in_one_stage() -> None:
    profile = Profile()
    for stage in (Stage.READ, Stage.WIRE, Stage.GAP):
        profile.switch(stage)
    before = time.monotonic_ns()
    profile.begin()
    begun = time.monotonic_ns()
    for number in range(2000):
        profile.switch(Stage(number % INSIDE))
    ending = time.monotonic_ns()
    profile.mark()
    after = time.monotonic_ns()
    inside = profile.spent()[:INSIDE]
    assert ending - begun <= sum(inside) <= after - before
    assert all(ns > 0 for ns in inside)
    profile.switch(Stage.WIRE)
    assert profile.spent()[:INSIDE] == inside, "what comes after the mark is not in it"


def test_without_a_beginning_there_is_no_span() -> None:
    profile = Profile()
    profile.switch(Stage.WIRE)
    profile.mark()
    assert not any(profile.spent()[:INSIDE])


def test_what_lies_between_two_stretches_is_in_neither() -> None:
    profile = Profile()
    profile.begin()
    profile.switch(Stage.WIRE)
    profile.mark()
    first = profile.spent()
    profile.switch(Stage.HASH)
    profile.switch(Stage.READ)
    profile.begin()
    profile.mark()
    second = profile.spent()
    assert second[Stage.HASH] == first[Stage.HASH] == 0
    assert second[Stage.READ] > 0


def test_begin_once_leaves_a_span_that_has_begun() -> None:
    profile = Profile()
    profile.switch(Stage.HASH)
    profile.begin_once()
    profile.switch(Stage.READ)
    profile.switch(Stage.WIRE)
    profile.begin_once()
    profile.mark()
    spent = profile.spent()
    assert spent[Stage.READ] > 0
    assert spent[Stage.WIRE] > 0


def test_what_is_beside_the_span_needs_none() -> None:
    profile = Profile()
    for stage in (Stage.ALLOC, Stage.VERIFY, Stage.INDEX, Stage.GAP):
        profile.switch(stage)
    spent = profile.spent()
    assert all(spent[stage] > 0 for stage in (Stage.ALLOC, Stage.VERIFY, Stage.INDEX))
    profile.switch(Stage.VERIFY)
    assert profile.spent()[Stage.VERIFY] > spent[Stage.VERIFY], "the one at hand counts up to now"


def test_requests_are_counted_with_their_time() -> None:
    profile = Profile()
    since = profile.now()
    assert 0 < since <= time.monotonic_ns()
    profile.command(6, since)
    profile.command(6, since, 40)
    profile.command(31, since)
    for number in (32, 255, (1 << 32) - 1):
        profile.command(number, since)
    found = profile.commands()
    assert set(found) == {6, 31}
    assert found[6][0] == 41
    assert 0 < found[6][1] <= 2 * (time.monotonic_ns() - since)


def test_off_counts_nothing() -> None:
    profile = Profile(False)
    assert not profile.on
    profile.begin()
    profile.begin_once()
    for stage in Stage:
        assert profile.switch(stage) == 0
    profile.mark()
    assert profile.now() == 0
    profile.command(6, 0)
    assert not any(profile.spent())
    assert profile.commands() == {}


ALLOCATIONS = """
import gc, sys
from weightwire._native._profile import Profile
from weightwire.profile import Stage
profile, hash_, gap = Profile({on}), Stage.HASH, Stage.GAP
def work(rounds):
    for _ in rounds:
        previous = profile.switch(hash_)
        profile.begin(); profile.mark(); profile.begin_once()
        since = profile.now()
        profile.command(6, since)
        profile.switch(previous)
rounds = [None] * 10_000
work(rounds)
gc.collect(); gc.disable()
before = sys.getallocatedblocks()
work(rounds)
print(sys.getallocatedblocks() - before)
"""


@pytest.mark.parametrize("on", [True, False])
def test_nothing_stays_allocated(on: bool) -> None:
    # A process of its own: the block count is the interpreter's.
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATIONS.format(on=on)], capture_output=True, text=True, timeout=60, check=True
    )
    assert abs(int(done.stdout)) < 10, "over 10000 rounds"


OFF = """
import gc, tracemalloc
from weightwire.profile import Stage
from weightwire.transport.profiling import LoadRecorder
OFTEN = {"switch", "begin", "begin_once", "mark", "now", "command"}
ONCE = {"spent", "commands", "watch", "sample", "profile"}
methods = {name for name in dir(LoadRecorder) if not name.startswith("_") and callable(getattr(LoadRecorder, name))}
assert methods == OFTEN | ONCE, methods
recorder, hash_, gap = LoadRecorder(on=False), Stage.HASH, Stage.GAP
rounds = [None] * 100
def work(one):
    for _ in rounds:
        one()
def switch(): recorder.switch(recorder.switch(hash_))
def begin(): recorder.begin()
def begin_once(): recorder.begin_once()
def mark(): recorder.mark()
def now(): recorder.now()
def command(): recorder.command(6, recorder.now())
def mistake(): [None] * 100
gc.disable()
tracemalloc.start()
for one in (mistake, switch, begin, begin_once, mark, now, command):
    work(one)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    work(one)
    print(one.__name__, tracemalloc.get_traced_memory()[1] - before)
"""


def test_off_no_call_allocates_even_for_a_moment() -> None:
    """None of what is called for each tensor; the others are called once for a push or a connection."""
    done = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, timeout=60, check=True)
    peaks = {name: int(nbytes) for name, nbytes in map(str.split, done.stdout.splitlines())}
    assert peaks.pop("mistake") >= 800, "what is allocated is seen"
    # Asking for it makes a tuple and two ints.
    assert set(peaks) == {"switch", "begin", "begin_once", "mark", "now", "command"}
    assert all(nbytes <= 120 for nbytes in peaks.values()), peaks


def test_threads_lose_and_double_nothing() -> None:
    profile = Profile()
    before = time.monotonic_ns()
    profile.begin()

    def work() -> None:
        for number in range(3000):
            profile.switch(Stage(number % INSIDE))
            profile.mark()
            profile.command(1, profile.now())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    profile.mark()
    ended = time.monotonic_ns()
    assert 0 < sum(profile.spent()[:INSIDE]) <= ended - before
    assert profile.commands()[1][0] == 12_000


Pair = tuple[TcpStream, TcpStream] | tuple[RdmaStream, RdmaStream]


@pytest.fixture(params=["tcp", "rdma"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Two ends of each transport."""
    found: Pair = request.getfixturevalue(f"{request.param}_pair")
    return found


def message(nbytes: int) -> bytes:
    """A request with that much data: an RDMA stream sends it as its framing says."""
    return request_header(Command.SET_TENSOR, nbytes) + bytes(nbytes)


def receive_slowly(pair: Pair, profile: Profile, stage: Stage) -> tuple[int, ...]:
    """Receive one byte that comes late, in ``stage``; nanoseconds in every stage."""
    one, other = pair
    one.profile = profile
    profile.switch(stage)
    profile.begin()
    # Comes once the other has slept for a while: the clock itself says so where it is told.
    timer = threading.Timer(0.3, lambda: other.send(b"x"))
    timer.start()
    try:
        assert one.recv(1) == b"x"
    finally:
        timer.join()
    profile.mark()
    assert profile.switch(stage) == stage, "it is where it was"
    return profile.spent()


def test_waiting_for_bytes_is_told_from_moving_them(pair: Pair) -> None:
    spent = receive_slowly(pair, Profile(), Stage.WIRE)
    assert spent[Stage.WAIT] > spent[Stage.WIRE] > 0
    assert spent[Stage.BLOCKED] == 0


@pytest.mark.parametrize("stage", [Stage.ASK, Stage.GAP, Stage.HASH])
def test_who_waits_for_something_else_is_left_alone(pair: Pair, stage: Stage) -> None:
    spent = receive_slowly(pair, Profile(), stage)
    assert spent[stage] > 0
    assert spent[Stage.WAIT] == spent[Stage.BLOCKED] == 0


def test_a_send_without_room_is_blocked(pair: Pair) -> None:
    one, other = pair
    profile = Profile()
    one.profile = profile
    profile.switch(Stage.WIRE)
    profile.begin()
    data = message(64 << 20)
    sender = threading.Thread(target=lambda: one.send(data))
    sender.start()

    def blocked() -> bool:
        profile.mark()
        return profile.spent()[Stage.BLOCKED] > 0

    # Nobody reads: sooner or later there is no room, and the sender looks up from its sleep now and then.
    assert eventually(blocked)
    target = bytearray(len(data))
    other.recv_into(target)
    sender.join()
    profile.mark()
    spent = profile.spent()
    assert spent[Stage.BLOCKED] > 0
    assert spent[Stage.WIRE] > 0
    assert spent[Stage.WAIT] == 0
    if one.kind == "rdma":
        assert spent[Stage.STAGING] > 0, "copied into the ring"
        assert one.counts["window_full"] > 0
        assert one.counts["copies"] == one.counts["sends"]


def test_a_profile_is_given_once(pair: Pair) -> None:
    one, _ = pair
    assert one.profile is None
    profile = Profile()
    one.profile = profile
    one.profile = profile
    assert one.profile is profile
    with pytest.raises(ValueError, match="once"):
        one.profile = Profile()
    with pytest.raises(TypeError):
        one.profile = None  # type: ignore[assignment]


def test_what_the_kernel_says_of_sending(tcp_pair: tuple[TcpStream, TcpStream]) -> None:
    one, other = tcp_pair
    done = threading.Thread(target=lambda: other.recv_into(bytearray(32 << 20)))
    done.start()
    one.send(bytes(32 << 20))
    done.join()
    found = one.send_limits()
    assert found is not None
    busy, closed, full = found
    assert busy > 0
    assert 0 <= closed <= busy
    assert 0 <= full <= busy
    one.close()
    assert one.send_limits() is None


def test_what_is_no_tcp_cannot_say() -> None:
    near, far = socket.socketpair()
    with TcpStream(near) as stream, far:
        assert stream.send_limits() is None


def test_counts_outlive_a_link(rdma_pair: tuple[RdmaStream, RdmaStream]) -> None:
    one, other = rdma_pair
    assert one.send_limits() is None
    data = message(1 << 20)
    one.send(data)
    assert other.recv(len(data)) == data
    counts = one.counts
    assert counts["copied_bytes"] == len(data)
    assert counts["copies"] == counts["sends"] > 4
    one.close()
    assert one.counts == counts
