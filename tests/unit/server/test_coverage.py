"""Merged ranges against a set of byte numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.server.capacity import Tally
from weightwire.server.coverage import MAX_PIECES
from weightwire.server.coverage import Coverage as Shared

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))), max_size=20
)


def Coverage(nbytes: int) -> Shared:
    return Shared(nbytes, Tally(1 << 20))


@given(st.integers(0, 60), RANGES)
def test_like_a_set_of_bytes(nbytes: int, ranges: list[tuple[int, int]]) -> None:
    coverage = Coverage(nbytes)
    model: set[int] = set()
    for start, end in ranges:
        if end > nbytes:
            with pytest.raises(ValueError, match="not within"):
                coverage.add(start, end)
            continue
        coverage.add(start, end)
        model |= set(range(start, end))
        pieces = coverage.pieces
        assert {byte for low, high in pieces for byte in range(low, high)} == model
        assert all(left[1] < right[0] for left, right in pairwise(pieces))  # apart, in order
        assert all(low < high for low, high in pieces)
        assert coverage.complete == (model == set(range(nbytes)))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 4), st.integers(0, 10))
def test_rows(nbytes: int, rows: int, gap: int, offset: int) -> None:
    stride = nbytes + gap
    coverage = Coverage(200)
    coverage.add_rows(offset, nbytes, rows, stride)
    covered = {byte for low, high in coverage.pieces for byte in range(low, high)}
    assert covered == {offset + row * stride + byte for row in range(rows) for byte in range(nbytes)}


def test_an_empty_tensor_is_complete() -> None:
    assert Coverage(0).complete
    assert not Coverage(1).complete


def test_scattered_writes_do_not_make_it_remember_without_end() -> None:
    coverage = Coverage(4 * MAX_PIECES)
    for at in range(MAX_PIECES + 10):
        coverage.add(2 * at, 2 * at + 1)
    assert len(coverage.pieces) <= MAX_PIECES
    assert not coverage.complete
    coverage.add(0, 4 * MAX_PIECES)
    assert coverage.complete


def test_a_great_many_rows_are_not_remembered() -> None:
    coverage = Coverage(1 << 40)
    coverage.add_rows(0, 1, 1 << 38, 4)
    assert not coverage.complete
    assert coverage.pieces == []


def scatter(coverage: Shared, pieces: int) -> None:
    coverage.add_rows(0, 1, pieces, 2)


def test_pieces_of_all_tensors_together_are_bounded() -> None:
    tally = Tally(1000)
    tensors = [Shared(10_000, tally) for _ in range(10)]
    for one in tensors:
        scatter(one, 300)
    remembered = [one for one in tensors if one.pieces]
    assert 0 < len(remembered) < 10
    assert sum(len(one.pieces) for one in tensors) <= 1000 + 10 * 8
    assert tally.free >= 0


def test_a_tensor_that_comes_in_order_costs_nothing() -> None:
    tally = Tally(0)
    coverage = Shared(1000, tally)
    for at in range(0, 1000, 10):
        coverage.add(at, at + 10)
    assert coverage.complete


def test_pieces_go_back_when_they_are_given_up_or_the_tensor_is_done() -> None:
    tally = Tally(1000)
    coverage, other = Shared(10_000, tally), Shared(10_000, tally)
    scatter(coverage, 500)
    assert tally.free < 1000
    scatter(other, 900)
    assert other.pieces == []
    coverage.clear()
    assert tally.free == 1000
    scatter(coverage, 500)
    del coverage
    assert tally.free == 1000
