from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.client.layout import lay_out
from weightwire.errors import AllocationError

alignments = st.sampled_from([1, 2, 32, 64, 128, 256, 4096])


@given(
    st.lists(st.integers(0, 10_000) | st.just(0), max_size=60),
    alignments,
    st.integers(10_000, 60_000) | st.just(2**63 - 1),
)
def test_tensors_are_aligned_in_order_and_apart(sizes: list[int], alignment: int, limit: int) -> None:
    layout = lay_out(sizes, alignment, limit)
    assert len(layout.places) == len(sizes)
    assert all(0 < nbytes <= limit for nbytes in layout.buffers)
    buffer = end = 0
    for size, place in zip(sizes, layout.places, strict=True):
        if not size:
            assert place.offset <= layout.buffers[place.buffer]
            continue
        assert place.offset % alignment == 0
        assert place.offset + size <= layout.buffers[place.buffer]
        if place.buffer == buffer:
            assert end <= place.offset < end + alignment, "no overlap, and no more gap than the alignment asks for"
        else:
            assert place.buffer == buffer + 1
            assert place.offset == 0
            assert -(-end // alignment) * alignment + size > limit, "a new buffer only where the old one has no room"
        buffer, end = place.buffer, place.offset + size
    assert len(layout.buffers) == buffer + 1


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=40), alignments)
def test_buffers_end_where_their_last_tensor_does_rounded_up(sizes: list[int], alignment: int) -> None:
    (buffer,) = lay_out(sizes, alignment, 2**63 - 1).buffers
    assert buffer == sum(-(-size // alignment) * alignment for size in sizes)


def test_a_buffer_is_not_rounded_past_the_maximum() -> None:
    assert lay_out([100], 64, 100).buffers == (100,)
    assert lay_out([100], 64, 127).buffers == (127,)
    assert lay_out([100], 64, 128).buffers == (128,)
    assert lay_out([64, 37], 64, 101).buffers == (101,)
    assert lay_out([64, 38], 64, 101).buffers == (64, 64)


def test_nothing_but_empty_tensors_still_has_a_buffer() -> None:
    layout = lay_out([0, 0], 64, 1000)
    assert layout.buffers == (64,)
    assert [place.offset for place in layout.places] == [0, 0]


def test_empty_tensors_never_open_a_buffer() -> None:
    layout = lay_out([100, 0, 100, 0], 64, 100)
    assert layout.buffers == (100, 100)
    assert [place.buffer for place in layout.places] == [0, 0, 1, 1]


def test_a_tensor_longer_than_the_largest_buffer_is_named() -> None:
    with pytest.raises(AllocationError, match=r"'b' takes 101 bytes.*100 bytes") as caught:
        lay_out([5, 101], 32, 100, ["a", "b"])
    assert caught.value.nbytes == 101
    assert caught.value.hint
