"""The tensors a server holds, by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from weightwire.server.capacity import Tally
from weightwire.server.destinations import HostMemory
from weightwire.server.errors import log_failure
from weightwire.wire.tensor import MAX_NAME, RpcTensor, wire_name
from weightwire.wire.types import TYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightwire.server.buffers import Block

__all__ = ["MAX_TENSORS", "Registry", "ServedTensor"]

logger = logging.getLogger(__name__)

MAX_TENSORS: Final = 1 << 18
"""Tensors of all clients together that are listed by name, and likewise that are being written. What comes after is
stored all the same, but not listed. Several of the largest models fit (one of 671B has 92,000 tensors).
"""

_MAX_PIECES: Final = 1 << 20
"""Separate pieces of tensors being written that are remembered for all clients together, about 100 bytes each."""


class ServedTensor:
    """One tensor of which every byte has arrived. Read-only.

    ``name`` is as it travels: one of more than 63 bytes of UTF-8 has been shortened by the client.
    ``ne`` is the shape as ggml has it (``ne[0]`` varies fastest, ones at the end left out), ``shape`` the same as
    numpy has it, ``type_code`` and ``type_name`` its ggml type, ``nbytes`` the bytes from its first to its last. A
    tensor that was sent as plain bytes, because its type or strides do not fit the protocol, is served as ``i8``.

    Views and arrays keep their memory alive, whatever the client or the server does. What they show still changes if
    the client that pushed the tensor writes to it again.
    """

    __slots__ = (
        "_block",
        "_held",
        "_listed",
        "_offset",
        "_view",
        "name",
        "nb",
        "nbytes",
        "ne",
        "type_code",
        "type_name",
    )

    def __init__(self, tensor: RpcTensor, block: Block | None, offset: int, nbytes: int) -> None:
        dims = 4
        while dims > 1 and tensor.ne[dims - 1] == 1:
            dims -= 1
        self.name = tensor.label
        self.type_code = tensor.type
        self.type_name = TYPES[tensor.type].name
        self.ne: tuple[int, ...] = tensor.ne[:dims]
        self.nb: tuple[int, ...] = tensor.nb[:dims]
        self.nbytes = nbytes
        self._block = block
        self._offset = offset
        self._listed = False
        self._held = False
        self._view: memoryview | None = None
        if block is None or not nbytes:
            self._view = memoryview(b"")
        elif isinstance(block.destination, HostMemory) and type(block.destination).read is HostMemory.read:
            self._view = block.destination.look(offset, nbytes)

    def __repr__(self) -> str:
        shape = " x ".join(str(extent) for extent in self.ne)
        return f"<ServedTensor {self.name!r}: {self.type_name}, {shape}, {self.nbytes} bytes>"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in numpy's order, slowest dimension first, in elements."""
        return self.ne[::-1]

    def view(self) -> memoryview:
        """The ``nbytes`` bytes, read-only. Host memory itself, without a copy; from any other `Destination` read back
        through its ``read`` into fresh memory, which raises ValueError once the buffer is gone.
        """
        if self._view is not None:
            return self._view
        block = self._block
        if block is None or block.closed:
            raise ValueError(f"the destination of tensor {self.name!r} has been closed")
        copy = memoryview(bytearray(self.nbytes))
        block.destination.read(self._offset, copy)
        return copy.toreadonly()

    def numpy(self) -> NDArray[Any]:
        """The tensor as a read-only array of `shape`, without a copy where `view` makes none.

        For f32, f16, f64, i8, i16, i32 and i64. TypeError for quantised types and bf16, which numpy does not have:
        take `view` (for bf16, ``numpy.frombuffer(t.view(), "<u2").reshape(t.shape)`` gives the bits).
        """
        dtype = TYPES[self.type_code].numpy
        if dtype is None:
            raise TypeError(f"tensor {self.name!r} is {self.type_name}, which numpy has no type for; use view()")
        import numpy as np

        if not self.nbytes:
            return np.empty(self.shape, np.dtype(dtype))
        strides = tuple(
            stride if extent > 1 else self.nbytes for extent, stride in zip(self.ne[::-1], self.nb[::-1], strict=True)
        )
        return np.ndarray(self.shape, np.dtype(dtype), buffer=self.view(), strides=strides)


class _Names(Mapping[str, ServedTensor]):
    """The registry as the embedder sees it: live, read-only, usable from any thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __getitem__(self, name: str) -> ServedTensor:
        found = self._registry.find(name) if isinstance(name, str) else None
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry.names())

    def __len__(self) -> int:
        return len(self._registry.names())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._registry.find(name) is not None

    def __repr__(self) -> str:
        return f"<tensors: {len(self)}>"


class Registry:
    """Complete tensors of all clients by name; the last one completed under a name is the one that is found.
    Thread-safe.

    ``remembered`` and ``pieces`` bound what all clients together can make the server keep about tensors that are being
    written.
    """

    def __init__(self, *, keep: bool, on_tensor: Callable[[ServedTensor], object] | None) -> None:
        self.keep = keep
        self.tensors: Mapping[str, ServedTensor] = _Names(self)
        self.remembered = Tally(MAX_TENSORS)
        self.pieces = Tally(_MAX_PIECES)
        self._on_tensor = on_tensor
        self._lock = threading.Lock()
        self._closed = False
        self._count = 0
        # The tensors of a name in the order in which they were completed; a dict, so that taking one out is quick.
        self._by_name: dict[str, dict[ServedTensor, None]] = {}

    def add(self, served: ServedTensor) -> bool:
        """List a tensor that has become complete, and tell the embedder. False if there was no room in the list.

        A tensor without a name, or without room, is only told of.
        """
        replaced: list[ServedTensor] = []
        with self._lock:
            if self._closed:
                return True
            served._listed = True
            if self.keep:
                # The last client that pushed this name may be long gone, so nothing else would ever end its tensor.
                replaced = self._take_out(served.name)
            room = self._count < MAX_TENSORS
            if served.name and room:
                served._held = True
                if served._block is not None:
                    served._block.hold()
                self._by_name.setdefault(served.name, {})[served] = None
                self._count += 1
        self._drop(replaced)
        if self._on_tensor is not None:
            try:
                self._on_tensor(served)
            except Exception as error:
                log_failure(logger, error, "on_tensor failed for tensor %r", served.name)
        return room

    def listed(self, served: ServedTensor) -> bool:
        """Whether ``served`` has not been taken out (or has only been told of)."""
        return served._listed

    def remove(self, served: ServedTensor) -> None:
        """Take one tensor out; nothing if it is not in here."""
        with self._lock:
            if not served._listed:
                return
            served._listed = False
            if not served._held:
                return
            same = self._by_name[served.name]
            del same[served]
            self._count -= 1
            if not same:
                del self._by_name[served.name]
        self._drop([served])

    def forget(self, name: str) -> bool:
        """Take every tensor called ``name`` out. Whether there was one."""
        with self._lock:
            gone = self._take_out(self._key(name))
        self._drop(gone)
        return bool(gone)

    def close(self) -> None:
        """Take everything out, and in nothing any more."""
        with self._lock:
            self._closed = True
            gone = [served for name in list(self._by_name) for served in self._take_out(name)]
        self._drop(gone)

    def find(self, name: str) -> ServedTensor | None:
        """The tensor called ``name``."""
        with self._lock:
            same = self._by_name.get(self._key(name))
            return next(reversed(same)) if same else None

    @property
    def count(self) -> int:
        """How many tensors are listed, each of several with one name."""
        return self._count

    def names(self) -> list[str]:
        """The names at this moment, oldest first."""
        with self._lock:
            return list(self._by_name)

    def _key(self, name: str) -> str:
        """The name as it travelled, of a tensor that its client may call by a longer one."""
        if len(name) * 4 < MAX_NAME or name in self._by_name:
            return name
        return wire_name(name).decode("utf-8", "replace")

    def _take_out(self, name: str) -> list[ServedTensor]:
        gone = list(self._by_name.pop(name, ()))
        self._count -= len(gone)
        for served in gone:
            served._listed = False
        return gone

    @staticmethod
    def _drop(gone: list[ServedTensor]) -> None:
        for served in gone:
            if served._block is not None:
                served._block.drop()
