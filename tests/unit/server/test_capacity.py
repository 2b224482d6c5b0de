"""Shared capacity, and addresses that are none."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from weightwire.server.capacity import BASE_ALIGNMENT, AddressSpace, Capacity


def test_take_and_give_back() -> None:
    capacity = Capacity(100)
    assert capacity.take(60)
    assert not capacity.take(41)
    assert capacity.free == 40
    assert capacity.take(40)
    capacity.give_back(60)
    assert capacity.free == 60
    assert not capacity.take((1 << 64) - 1)


def test_many_threads_never_take_more_than_there_is() -> None:
    capacity = Capacity(1000)
    over: list[int] = []

    def work() -> None:
        for _ in range(2000):
            if capacity.take(300):
                if capacity.free < 0:
                    over.append(capacity.free)
                capacity.give_back(300)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not over
    assert capacity.free == 1000


@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([1, 4096, 2 << 20, (2 << 20) + 1, 1 << 30, 1 << 44])), max_size=80
    )
)
def test_buffers_are_apart_aligned_and_below_2_47(steps: list[tuple[bool, int]]) -> None:
    space = AddressSpace()
    live: dict[int, int] = {}
    for keep, nbytes in steps:
        base = space.place(nbytes)
        if base is None:
            assert sum(live.values()) + nbytes > 1 << 45  # only when the space is really crowded
            continue
        assert base % BASE_ALIGNMENT == 0
        assert 0 < base < base + nbytes < 1 << 47
        for other, size in live.items():
            assert base + nbytes + BASE_ALIGNMENT <= other or other + size + BASE_ALIGNMENT <= base
        live[base] = nbytes
        if not keep:
            space.vacate(base)
            del live[base]


def test_freed_space_is_used_again_without_end() -> None:
    space = AddressSpace()
    kept = space.place(1 << 30)
    assert kept is not None
    for _ in range(2000):
        base = space.place(1 << 42)
        assert base is not None
        assert base + (1 << 42) <= kept or base >= kept + (1 << 30)
        space.vacate(base)


def test_more_than_the_whole_space() -> None:
    assert AddressSpace().place(1 << 47) is None
    assert AddressSpace().place(1 << 63) is None


def test_two_sessions_start_at_different_places() -> None:
    assert len({AddressSpace().place(1) for _ in range(20)}) > 1


def test_vacating_what_was_not_placed_changes_nothing() -> None:
    space = AddressSpace()
    base = space.place(1)
    assert base is not None
    space.vacate(base + 1)
    space.vacate(0)
    other = space.place(1)
    assert other != base
