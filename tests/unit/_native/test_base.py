"""What the native streams have from their base, and that it is no stream by itself."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from weightwire._native._base import BaseStream
from weightwire._native._link import Link
from weightwire._native._stream import Stream
from weightwire.errors import TransportError
from weightwire.ranges import FileRange


def test_both_streams_have_it() -> None:
    own = {"send", "send_range", "recv", "recv_into", "recv_or_eof", "peek", "close", "shutdown", "timeout", "profile"}
    for kind in (Stream, Link):
        assert issubclass(kind, BaseStream)
        assert not own & set(vars(kind))


@pytest.mark.parametrize("make", [BaseStream, lambda: Stream.__new__(Stream), lambda: Link.__new__(Link)])
@pytest.mark.parametrize(
    "call",
    [
        lambda stream: stream.send(b"x"),
        lambda stream: stream.send_range([b"x"], FileRange(0, 0, 1, "file")),
        lambda stream: stream.recv(1),
        lambda stream: stream.recv_or_eof(1),
        lambda stream: stream.recv_into(bytearray(1)),
    ],
)
def test_what_was_never_opened_moves_nothing(
    make: Callable[[], BaseStream], call: Callable[[BaseStream], object]
) -> None:
    stream = make()
    for _ in range(2):
        with pytest.raises(TransportError, match="is closed") as caught:
            call(stream)
        assert caught.value.errno == errno.EBADF
        assert stream.peek(1) == b""
        stream.shutdown()
        stream.close()
    assert stream.closed
    assert (stream.bytes_sent, stream.bytes_received) == (0, 0)


@pytest.mark.parametrize("count", [1, 100])
def test_parts_that_are_none_are_given_back(count: int) -> None:
    good = bytearray(8)
    with pytest.raises(TypeError):
        BaseStream().send(*[good] * count, object())  # type: ignore[arg-type]
    good.append(1)  # a buffer that is still held could not grow
