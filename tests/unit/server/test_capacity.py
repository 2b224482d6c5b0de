"""Shared capacity, and addresses that are none."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.server import capacity as module
from weightwire.server.capacity import BASE_ALIGNMENT, PAGE, AddressSpace, Capacity, Tally


def test_take_and_give_back() -> None:
    capacity = Tally(100)
    assert capacity.take(60)
    assert not capacity.take(41)
    assert capacity.free == 40
    assert capacity.take(40)
    capacity.give_back(60)
    assert capacity.free == 60
    assert not capacity.take((1 << 64) - 1)


def test_buffers_cost_whole_pages() -> None:
    capacity = Capacity(3 * PAGE)
    assert capacity.take(1)
    assert capacity.free == 2 * PAGE
    assert not capacity.take(2 * PAGE + 1)
    assert capacity.take(PAGE + 1)
    assert capacity.free == 0
    assert not capacity.take(1)
    assert capacity.take(0)
    capacity.give_back(1)
    assert capacity.free == PAGE


def test_what_is_free_can_be_had_in_one_piece() -> None:
    capacity = Capacity(10_000)
    assert capacity.take(capacity.free)
    assert capacity.free == 0
    assert not capacity.take(1)
    assert capacity.take(0)
    capacity.give_back(10_000)
    assert capacity.free == 10_000


def test_buffers_are_bounded_in_number_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BUFFERS", 3)
    capacity = Capacity(1 << 30)
    for nbytes in (1, 0, PAGE):
        assert not capacity.crowded
        assert capacity.take(nbytes)
    assert capacity.crowded
    assert not capacity.take(0)
    assert capacity.free == (1 << 30) - 2 * PAGE
    capacity.give_back(0)
    assert capacity.take(1)


def test_a_refusal_for_want_of_bytes_costs_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BUFFERS", 1)
    capacity = Capacity(PAGE)
    for _ in range(3):
        assert not capacity.take(PAGE + 1)
    assert capacity.take(PAGE)


def test_many_threads_never_take_more_than_there_is() -> None:
    capacity = Tally(1000)
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
