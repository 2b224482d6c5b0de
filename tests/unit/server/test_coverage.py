"""Merged ranges against a set of byte numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.server.coverage import MAX_PIECES, Coverage

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))), max_size=20
)


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
