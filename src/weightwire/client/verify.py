"""Read tensors back and compare them with their source, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from weightwire.client.channel import Channel
from weightwire.client.dropping import Claim
from weightwire.client.remote import READ_CHUNK, Piece, RemoteTensor, read_pieces
from weightwire.errors import IntegrityError
from weightwire.model.reading import read_range
from weightwire.ranges import FileRange
from weightwire.transport.memory import first_difference

__all__ = ["verify_tensors"]

_SHOWN = 8

TELL_EVERY = 64 << 20
"""Bytes of a large tensor between two reports of progress."""

Source = FileRange | memoryview


def verify_tensors(
    channel: Channel,
    tensors: Sequence[RemoteTensor],
    sources: Sequence[Source],
    *,
    hint: str,
    tell: Callable[[str, int], None] | None = None,
    spared: Collection[int] = (),
    claim: Claim | None = None,
) -> list[int]:
    """Compare every tensor, byte for byte, with its source; at most two chunks of `READ_CHUNK` bytes are held.

    ``tell(name, done)``, in bytes of all tensors, is called after each tensor and every `TELL_EVERY` bytes within one.

    ``claim`` hears of every tensor whose source has been read and was not found to differ.

    Returns the numbers of those among ``spared`` that differ. Raises IntegrityError, with ``hint``, for the first
    difference in any other, with the connection still in step, and ModelError where the source cannot be read. For a
    caller inside `Channel.exclusive` with nothing outstanding.
    """
    longest = min(max((tensor.nbytes for tensor in tensors), default=0), READ_CHUNK)
    received = memoryview(bytearray(longest))
    scratch = memoryview(bytearray(longest))
    number_of = {id(tensor): number for number, tensor in enumerate(tensors)}
    wrong: list[int] = []
    wanted = (
        Piece(tensor, start, received[: min(READ_CHUNK, tensor.nbytes - start)])
        for tensor in tensors
        for start in range(0, tensor.nbytes, READ_CHUNK)
    )
    done = told = 0
    for piece in read_pieces(channel, wanted):
        current = piece.tensor
        number = number_of[id(current)]
        expected = _bytes_at(sources[number], piece.offset, scratch[: piece.into.nbytes])
        at = first_difference(piece.into, expected)
        if at >= 0 and number in spared:
            if not wrong or wrong[-1] != number:
                wrong.append(number)
        elif at >= 0:
            theirs = bytes(piece.into[at : at + _SHOWN])
            ours = bytes(expected[at : at + _SHOWN])
            channel.settle()
            raise IntegrityError(
                f"tensor {current.name!r} came back different: at byte {piece.offset + at} of {current.nbytes} "
                f"the server has {theirs.hex(' ')}, expected {ours.hex(' ')}",
                name=current.name,
                expected=ours.hex(" "),
                actual=theirs.hex(" "),
                hint=hint,
            )
        done += piece.into.nbytes
        whole = piece.offset + piece.into.nbytes == current.nbytes
        if claim is not None and whole and (not wrong or wrong[-1] != number):
            claim.done(number)
        if tell is not None and (whole or done - told >= TELL_EVERY):
            told = done
            tell(current.name, done)
    return wrong


def _bytes_at(source: Source, offset: int, scratch: memoryview) -> memoryview:
    """As many bytes as ``scratch`` holds from byte ``offset`` of ``source``, in ``scratch`` or where they are."""
    if isinstance(source, memoryview):
        return source[offset : offset + scratch.nbytes]
    return read_range(source, offset, scratch)
