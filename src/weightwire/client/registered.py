"""A caller's memory, pinned so that it can be sent without a copy."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, cast

from weightwire.errors import ConfigError, VerbsError
from weightwire.transport.rdma import RdmaStream

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from weightwire.client.remote import Data
    from weightwire.transport.base import ByteStream

__all__ = ["RegisteredMemory", "register"]

_log = logging.getLogger(__name__)


class _Region(Protocol):
    def close(self) -> None: ...


class RegisteredMemory:
    """What `Connection.register` gives; a context manager that lets go of the memory.

    ``nbytes`` is the buffer's size. ``pinned`` says whether it is sent without a copy, ``reason`` why it is not (empty
    if it is).
    """

    __slots__ = ("_region", "nbytes", "reason")

    def __init__(self, nbytes: int, region: _Region | None, reason: str = "") -> None:
        self.nbytes = nbytes
        self.reason = reason
        self._region = region

    def __repr__(self) -> str:
        state = "pinned" if self.pinned else "not pinned"
        return f"<weightwire.RegisteredMemory of {self.nbytes} bytes, {state}>"

    @property
    def pinned(self) -> bool:
        """Whether what lies in it is sent without a copy."""
        return self._region is not None

    def close(self) -> None:
        """Let go of the memory: what lies in it is sent with a copy again. Idempotent, never raises."""
        region, self._region = self._region, None
        if region is not None:
            self.reason = "it was closed"
            region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def register(stream: ByteStream, buffer: Data) -> RegisteredMemory:
    """See `Connection.register`."""
    try:
        view = memoryview(cast("Buffer", buffer))
    except TypeError as error:
        raise ConfigError(f"buffer: {error}", hint="give an array, or anything else with the buffer protocol") from None
    if not view.c_contiguous or not view.nbytes:
        raise ConfigError(
            "buffer: it is not contiguous" if view.nbytes else "buffer: it is empty",
            hint="numpy.ascontiguousarray makes a contiguous array of any",
        )
    if not isinstance(stream, RdmaStream):
        return RegisteredMemory(view.nbytes, None, "the connection is on TCP")
    try:
        return RegisteredMemory(view.nbytes, stream.register(view))
    except VerbsError as error:
        _log.info("%s: %d bytes cannot be registered and will be copied: %s", stream.endpoint, view.nbytes, error)
        return RegisteredMemory(view.nbytes, None, error.detail)
