"""Where each tensor lies: pure arithmetic, nothing asked and nothing sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weightwire.errors import AllocationError

__all__ = ["Layout", "Place", "lay_out"]


class Place(NamedTuple):
    """A tensor's place: the ``buffer``'s number in the layout and the ``offset`` in it, bytes."""

    buffer: int
    offset: int


class Layout(NamedTuple):
    """The sizes of the buffers to allocate (bytes, each at least 1) and one place per tensor, in the tensors' order."""

    buffers: tuple[int, ...]
    places: tuple[Place, ...]


def lay_out(sizes: Sequence[int], alignment: int, max_size: int, names: Sequence[str] = ()) -> Layout:
    """Place tensors of ``sizes`` bytes one after the other, each at a multiple of ``alignment`` bytes.

    A new buffer starts where the next tensor would make the present one longer than ``max_size`` bytes. A buffer's
    own size is rounded up to the alignment as far as ``max_size`` allows, as stock clients do it. Tensors of zero
    bytes take no room, but have a place; a layout of nothing else has one buffer of ``alignment`` bytes (a server
    answers a buffer of zero bytes like a failure).

    Raises AllocationError, naming the tensor from ``names``, if a single tensor is longer than ``max_size``.
    """
    buffers: list[int] = []
    places: list[Place] = []
    end = 0
    for index, size in enumerate(sizes):
        if size > max_size:
            name = repr(names[index]) if names else f"number {index}"
            raise AllocationError(
                f"tensor {name} takes {size} bytes, and the server's largest buffer is {max_size} bytes",
                nbytes=size,
                hint="leave it out with include, or use a device with larger buffers",
            )
        offset = -(-end // alignment) * alignment
        if size and offset + size > max_size:
            buffers.append(_rounded(end, alignment, max_size))
            offset = end = 0
        places.append(Place(len(buffers), offset if size else min(offset, end)))
        if size:
            end = offset + size
    buffers.append(_rounded(max(end, 1), alignment, max_size))
    return Layout(tuple(buffers), tuple(places))


def _rounded(end: int, alignment: int, max_size: int) -> int:
    return max(end, min(-(-end // alignment) * alignment, max_size))
