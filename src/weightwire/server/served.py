"""The tensors a server holds, by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from weightwire.server.destinations import HostMemory
from weightwire.wire.tensor import RpcTensor
from weightwire.wire.types import TYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightwire.server.buffers import Block

__all__ = ["Registry", "ServedTensor"]

logger = logging.getLogger(__name__)


class ServedTensor:
    """One tensor of which every byte has arrived. Read-only.

    ``ne`` is its shape as ggml has it (``ne[0]`` varies fastest, ones at the end left out), ``shape`` the same as
    numpy has it, ``type_code`` and ``type_name`` its ggml type, ``nbytes`` the bytes from its first to its last. A
    tensor that was sent as plain bytes, because its type or strides do not fit the protocol, is served as ``i8``.

    Views and arrays keep their memory alive, whatever the client or the server does. What they show still changes if
    the client that pushed the tensor writes to it again.
    """

    __slots__ = ("_block", "_listed", "_offset", "_view", "name", "nb", "nbytes", "ne", "type_code", "type_name")

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
        found = self._registry.find(name)
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
    """

    def __init__(self, *, keep: bool, on_tensor: Callable[[ServedTensor], object] | None) -> None:
        self.keep = keep
        self.tensors: Mapping[str, ServedTensor] = _Names(self)
        self._on_tensor = on_tensor
        self._lock = threading.Lock()
        self._closed = False
        self._by_name: dict[str, list[ServedTensor]] = {}

    def add(self, served: ServedTensor) -> None:
        """List a tensor that has become complete, and tell the embedder. A tensor without a name is only told of."""
        replaced: list[ServedTensor] = []
        with self._lock:
            if self._closed:
                return
            served._listed = True
            if served._block is not None:
                served._block.hold()
            same = self._by_name.setdefault(served.name, []) if served.name else []
            if self.keep:
                # The last client that pushed this name may be long gone, so nothing else would ever end its tensor.
                replaced, same[:] = same[:], []
            same.append(served)
            for old in replaced:
                old._listed = False
        self._drop(replaced)
        if self._on_tensor is not None:
            try:
                self._on_tensor(served)
            except Exception:
                logger.exception("on_tensor failed for tensor %r", served.name)

    def listed(self, served: ServedTensor) -> bool:
        """Whether ``served`` is still in here."""
        return served._listed

    def remove(self, served: ServedTensor) -> None:
        """Take one tensor out; nothing if it is not in here."""
        with self._lock:
            if not served._listed:
                return
            served._listed = False
            same = self._by_name.get(served.name, [])
            same[:] = [other for other in same if other is not served]
            if not same:
                self._by_name.pop(served.name, None)
        self._drop([served])

    def forget(self, name: str) -> bool:
        """Take every tensor called ``name`` out. Whether there was one."""
        with self._lock:
            gone = self._by_name.pop(name, [])
            for served in gone:
                served._listed = False
        self._drop(gone)
        return bool(gone)

    def close(self) -> None:
        """Take everything out, and in nothing any more."""
        with self._lock:
            self._closed = True
        for name in self.names():
            self.forget(name)

    def find(self, name: str) -> ServedTensor | None:
        """The tensor called ``name``."""
        with self._lock:
            same = self._by_name.get(name)
            return same[-1] if same else None

    def names(self) -> list[str]:
        """The names at this moment, oldest first."""
        with self._lock:
            return list(self._by_name)

    @staticmethod
    def _drop(gone: list[ServedTensor]) -> None:
        for served in gone:
            if served._block is not None:
                served._block.drop()
