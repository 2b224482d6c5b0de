"""What a server holds for us: buffers, and tensors in them, whose bytes can be read and written."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from weightwire.client.channel import MAX_OUTSTANDING, Channel
from weightwire.errors import ConfigError, WeightwireError
from weightwire.model.mapped import reading
from weightwire.profile import Stage
from weightwire.wire.commands import Command
from weightwire.wire.framing import request_header
from weightwire.wire.tensor import RpcTensor, weight_tensor
from weightwire.wire.types import TYPES, contiguous_nbytes, type_by_name

if TYPE_CHECKING:
    from typing import Any, TypeAlias

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from weightwire.wire.dialect import Dialect

    Data: TypeAlias = Buffer | NDArray[Any]  # numpy's stubs declare the buffer protocol from Python 3.12 only

__all__ = [
    "READ_CHUNK",
    "Piece",
    "RemoteBuffer",
    "RemoteTensor",
    "big_endian",
    "bytes_of",
    "describe",
    "pieces_of",
    "read_pieces",
    "whole",
]

READ_CHUNK: Final = 4 * 1024 * 1024
"""Bytes asked for in one GET_TENSOR: a server builds each answer in memory before it sends it."""


class RemoteBuffer:
    """``nbytes`` bytes of a server's memory: its ``handle`` and the ``base`` address it starts at there.

    The server frees it when the connection closes, at the latest.
    """

    __slots__ = ("_freed", "base", "channel", "device", "handle", "nbytes")

    def __init__(self, channel: Channel, handle: int, base: int, nbytes: int, device: int) -> None:
        self.channel = channel
        self._freed = False
        self.handle = handle
        self.base = base
        self.nbytes = nbytes
        self.device = device

    def __repr__(self) -> str:
        state = ", freed" if self._freed else ""
        return f"<weightwire.RemoteBuffer of {self.nbytes} bytes at {self.channel.endpoint}{state}>"

    @property
    def freed(self) -> bool:
        """Whether `free` was called or the connection is closed."""
        return self._freed or self.channel.closed

    def free(self) -> None:
        """Give the memory back; its tensors cannot be used any more. Idempotent, and nothing to do once the
        connection is closed. Raises TransportError or TransferTimeout if the server is lost meanwhile.
        """
        if self.freed:
            return
        with self.channel.exclusive("free"):
            self.release()

    def release(self) -> None:
        """`free` for a caller inside `Channel.exclusive`."""
        if self._freed:
            return
        # First, because a second FREE_BUFFER of the same handle would make the server close the connection.
        self._freed = True
        self.channel.post(Command.FREE_BUFFER, self.channel.dialect.encode_handle(self.handle))
        self.channel.settle()

    def check_usable(self) -> None:
        """ConfigError after `free`."""
        if self._freed:
            raise ConfigError(
                "this buffer was freed", hint="allocate another, or free it after the last use of its tensors"
            )

    def tensor(self, name: str, type: int | str, ne: Sequence[int], offset: int = 0) -> RemoteTensor:
        """A tensor of ggml ``type`` (number or name, such as ``"q4_K"``) and shape ``ne`` (elements, ``ne[0]`` varies
        fastest) ``offset`` bytes into the buffer. Nothing is sent.

        Raises ConfigError for an unknown type, a shape it cannot have, or a tensor past the buffer's end.
        """
        self.check_usable()
        if not isinstance(name, str):
            raise ConfigError(f"name: {name!r} is not text")
        try:
            code = type_by_name(type).code if isinstance(type, str) else whole("type", type)
            shape = tuple(whole("ne", extent) for extent in ne)
            nbytes = contiguous_nbytes(code, shape)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"tensor {name!r}: {error}") from None
        offset = whole("offset", offset)
        if not 0 <= offset <= self.nbytes - nbytes:
            raise ConfigError(
                f"tensor {name!r} of {nbytes} bytes at offset {offset} does not fit a buffer of {self.nbytes} bytes",
                hint="a stock server would abort; allocate a larger buffer",
            )
        return RemoteTensor(name, code, shape, nbytes, self, offset)


class RemoteTensor:
    """A tensor on a server: ``nbytes`` bytes, ``offset`` bytes into ``buffer``.

    ``type_code`` is ggml's number (None where ggml has no such type) and ``ne`` the shape in elements, ``ne[0]``
    varying fastest. ``dtype`` is numpy's string for a type that the pushed model has and ggml has not, if numpy does.
    """

    __slots__ = ("buffer", "dtype", "name", "nbytes", "ne", "offset", "type_code")

    def __init__(
        self,
        name: str,
        type_code: int | None,
        ne: tuple[int, ...],
        nbytes: int,
        buffer: RemoteBuffer,
        offset: int,
        dtype: str | None = None,
    ) -> None:
        self.name = name
        self.type_code = type_code
        self.ne = ne
        self.nbytes = nbytes
        self.buffer = buffer
        self.offset = offset
        self.dtype = dtype

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.ne))
        return f"<weightwire.RemoteTensor {self.name!r} {self.type_name} {shape}, {self.nbytes} bytes>"

    @property
    def type_name(self) -> str:
        """The type as ggml spells it, or ``"bytes"`` where ggml has none."""
        known = TYPES.get(self.type_code) if self.type_code is not None else None
        return known.name if known is not None else "bytes"

    def wire(self) -> RpcTensor:
        """How requests speak of it. Made anew each time: kept, it would cost more memory than many a tensor."""
        buffer = self.buffer
        return describe(buffer.channel.dialect, self, buffer=buffer.handle, data=buffer.base + self.offset)

    def read(self, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """``nbytes`` bytes (all that follow, if None) from byte ``offset``, as a new array of uint8.

        Raises ConfigError for a range that is not inside the tensor; PeerClosed, TransferTimeout or TransportError if
        the server is lost.
        """
        import numpy as np

        offset = whole("offset", offset)
        nbytes = max(self.nbytes - offset, 0) if nbytes is None else whole("nbytes", nbytes)
        self._check_range(offset, nbytes)
        array = np.empty(nbytes, np.uint8)
        self.read_into(array, offset)
        return array

    def read_into(self, buffer: Data, offset: int = 0) -> None:
        """Fill ``buffer`` (writable, contiguous) with the bytes from ``offset`` on, which are little-endian.

        Raises as `read` does, and ConfigError for a buffer of big-endian numbers, which they would not be.
        """
        _refuse_big_endian(buffer)
        view = bytes_of(buffer, writable=True)
        offset = whole("offset", offset)
        self._check_range(offset, view.nbytes)
        self.buffer.check_usable()
        with self.buffer.channel.exclusive("read"):
            for _ in read_pieces(self.buffer.channel, pieces_of(self, offset, view)):
                pass

    def numpy(self) -> NDArray[Any]:
        """The tensor as a new array of its own type, in numpy's order of dimensions (``ne`` reversed). One that was
        pushed under a type ggml does not have, such as uint8 or bool, comes back as what it was.

        Raises ConfigError for a type numpy does not have (bf16, the quantised ones); otherwise as `read` does.
        """
        import numpy as np

        known = TYPES.get(self.type_code) if self.type_code is not None else None
        dtype = self.dtype if known is None else known.numpy
        if dtype is None:
            why = "it is of no type that ggml has" if known is None else f"numpy has no type for {known.name}"
            raise ConfigError(f"tensor {self.name!r}: {why}", hint="read() returns its bytes")
        array = np.empty(tuple(reversed(self.ne)), np.dtype(dtype))
        if array.nbytes != self.nbytes:
            raise ConfigError(f"tensor {self.name!r}: its {self.nbytes} bytes are not its shape's", hint="use read()")
        if array.nbytes:
            self.read_into(array.reshape(-1).view(np.uint8))
        return array

    def write(self, data: Data, offset: int = 0) -> None:
        """Send ``data`` (any contiguous buffer) to byte ``offset`` of the tensor, never into the server's cache.

        Its bytes are sent as they are: no type is converted, and numbers are little-endian. From protocol 2 on the
        server does not answer; `Connection.barrier` says when it has arrived. Raises ConfigError for a range that is
        not inside the tensor, and for big-endian numbers; PeerClosed, TransferTimeout or TransportError if the server
        is lost.
        """
        _refuse_big_endian(data)
        view = bytes_of(data)
        offset = whole("offset", offset)
        self._check_range(offset, view.nbytes)
        self.buffer.check_usable()
        channel = self.buffer.channel
        with channel.exclusive("write"):
            if not view.nbytes:
                return
            head = channel.dialect.encode_set_tensor(self.wire(), offset, 0)
            header = request_header(Command.SET_TENSOR, len(head) + view.nbytes) + head
            recorder = channel.recorder
            recorder.begin()
            since = recorder.now()
            recorder.switch(Stage.WIRE)
            try:
                try:
                    with reading(data, view) as payload:
                        channel.begin(header, payload)
                        channel.end()
                except WeightwireError as error:
                    done = max(int(getattr(error, "bytes_done", 0)) - len(header), 0)
                    raise channel.explain(
                        error, "SET_TENSOR", tensor=self.name, position="inside", bytes_done=done, nbytes=view.nbytes
                    ) from error.__cause__
                channel.sent_tensors([self.name], view.nbytes, since)
                recorder.switch(Stage.WAIT)
                channel.settle()
                recorder.mark()
            finally:
                recorder.switch(Stage.GAP)

    def _check_range(self, offset: int, nbytes: int) -> None:
        if not (0 <= offset <= self.nbytes and 0 <= nbytes <= self.nbytes - offset):
            raise ConfigError(
                f"{nbytes} bytes at offset {offset} are not inside tensor {self.name!r} of {self.nbytes} bytes",
                hint="a stock server would abort, so nothing was sent",
            )


def describe(dialect: Dialect, tensor: RemoteTensor, *, buffer: int, data: int) -> RpcTensor:
    """The tensor as a server of ``dialect`` understands it: under its own type where every such server knows the
    type, and as plain bytes where one might not, because a server closes the connection on a type it does not know.
    """
    code = tensor.type_code
    if code is not None and not dialect.knows_type(code):
        code = None
    return weight_tensor(tensor.name, code, tensor.ne, tensor.nbytes, buffer=buffer, data=data)


class Piece(NamedTuple):
    """Bytes wanted: as many as ``into`` holds, from byte ``offset`` of ``tensor``."""

    tensor: RemoteTensor
    offset: int
    into: memoryview


def pieces_of(tensor: RemoteTensor, offset: int, view: memoryview) -> Iterator[Piece]:
    """The pieces of at most `READ_CHUNK` bytes that fill ``view`` from byte ``offset`` on."""
    for start in range(0, view.nbytes, READ_CHUNK):
        yield Piece(tensor, offset + start, view[start : start + READ_CHUNK])


def read_pieces(channel: Channel, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Read ``pieces`` in order and yield each when its bytes are there.

    The next one is always asked for before this one is read, and more of them as long as they are small, so that the
    server never waits for a question. Pieces may share one view, since its bytes arrive only when their turn comes.
    For a caller inside `Channel.exclusive` with nothing outstanding.
    """
    asked: deque[Piece] = deque()
    waiting = 0
    for piece in pieces:
        payload = channel.dialect.encode_get_tensor(piece.tensor.wire(), piece.offset, piece.into.nbytes)
        channel.post_read(payload, piece.into, tensor=piece.tensor.name)
        asked.append(piece)
        waiting += piece.into.nbytes
        while len(asked) > 1 and (waiting > READ_CHUNK or len(asked) > MAX_OUTSTANDING):
            # One stays outstanding behind the one that is read here.
            channel.read_answer()
            waiting -= asked[0].into.nbytes
            yield asked.popleft()
    while asked:
        channel.read_answer()
        yield asked.popleft()


def whole(name: str, value: object) -> int:
    """``value`` as an int, be it numpy's. ConfigError for what is no whole number: a request made of it could not be
    put into bytes, in the midst of an operation.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise ConfigError(f"{name}: {value!r} is not a whole number", hint="give an int")


def big_endian(data: Data) -> bool:
    """Whether ``data`` holds numbers in that order, which is never the wire's. A struct is bytes, as in a push."""
    try:
        with memoryview(data) as view:  # type: ignore[arg-type, unused-ignore]  # as in `bytes_of`
            return view.format.startswith((">", "!"))
    except (TypeError, ValueError):  # no buffer, or of a dtype that the buffer protocol has not
        return str(getattr(getattr(data, "dtype", None), "str", "")).startswith(">")


def _refuse_big_endian(data: Data) -> None:
    if big_endian(data):
        raise ConfigError(
            "the buffer's numbers are big-endian, and a tensor's are little-endian",
            hint="convert it first: array.astype(array.dtype.newbyteorder('<')); array.view(numpy.uint8) is its bytes",
        )


def bytes_of(data: Data, *, writable: bool = False) -> memoryview:
    """The bytes of a contiguous buffer, where they lie. ConfigError for anything else."""
    try:
        view = memoryview(data)  # type: ignore[arg-type, unused-ignore]  # numpy 2.4: an array is no Buffer
    except TypeError:
        raise ConfigError(
            f"{type(data).__name__} has no buffer, so no bytes to use", hint="give bytes, a memoryview or a numpy array"
        ) from None
    except ValueError as error:
        # numpy has dtypes that the buffer protocol has not, such as datetime64 and bfloat16.
        view = _plain(data, error)
    if "O" in view.format:  # objects, or a field of that name
        view = _plain(data)
    if not view.c_contiguous:
        raise ConfigError(
            "the buffer is not contiguous", hint="copy it first, for instance with numpy.ascontiguousarray"
        )
    if writable and view.readonly:
        raise ConfigError("the buffer is read-only", hint="give a bytearray or a numpy array")
    if not view.nbytes:
        return memoryview(bytearray())
    try:
        return view.cast("B")
    except TypeError as error:  # a format of structs
        return _plain(data, error)


def _plain(data: Data, error: Exception | None = None) -> memoryview:
    import numpy as np

    array = np.asarray(data)
    if array.dtype.hasobject:
        raise ConfigError(
            f"the buffer holds Python objects (dtype {array.dtype}), which are addresses rather than numbers",
            hint="convert it first: array.astype(numpy.float32)",
        ) from error
    if not array.flags.c_contiguous:
        raise ConfigError(
            "the buffer is not contiguous", hint="copy it first, for instance with numpy.ascontiguousarray"
        ) from error
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
