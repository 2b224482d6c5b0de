"""A caller's memory, pinned so that it can be sent without a copy."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Protocol, Self

from weightwire.client.remote import big_endian, bytes_of
from weightwire.errors import ConfigError, VerbsError
from weightwire.model.mapped import lies_in_a_file
from weightwire.transport.rdma import RdmaStream
from weightwire.transport.registration import limit_hint, locked_memory_limit

if TYPE_CHECKING:
    from weightwire.client.remote import Data
    from weightwire.transport.base import ByteStream

__all__ = ["RegisteredMemory", "register"]

_log = logging.getLogger(__name__)


_CONVERTED = "its numbers are big-endian, so that what is sent is a converted copy"
_IN_A_FILE = "it lies in a mapped file, which is read by position"


class _Region(Protocol):
    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...


class RegisteredMemory:
    """What `Connection.register` gives; a context manager that lets go of the memory.

    ``nbytes`` is the buffer's size. ``pinned`` says whether it is sent without a copy, ``reason`` why it is not (empty
    if it is).
    """

    __slots__ = ("_reason", "_region", "nbytes")

    def __init__(self, nbytes: int, region: _Region | None, reason: str = "") -> None:
        self.nbytes = nbytes
        self._reason = reason
        self._region = region

    def __repr__(self) -> str:
        state = "pinned" if self.pinned else "not pinned"
        return f"<weightwire.RegisteredMemory of {self.nbytes} bytes, {state}>"

    @property
    def pinned(self) -> bool:
        """Whether what lies in it is sent without a copy."""
        return self._region is not None and not self._region.closed

    @property
    def reason(self) -> str:
        """Why it is not pinned (any more); empty if it is."""
        if self._region is not None and self._region.closed:
            return "the connection was closed"
        return self._reason

    def close(self) -> None:
        """Let go of the memory: what lies in it is sent with a copy again. Idempotent, never raises."""
        region, self._region = self._region, None
        if region is not None:
            self._reason = "it was closed"
            region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def register(stream: ByteStream, buffer: Data) -> RegisteredMemory:
    """See `Connection.register`."""
    view = bytes_of(buffer)
    if not view.nbytes:
        raise ConfigError("the buffer is empty", hint="there is nothing to pin, and nothing to be sent out of it")
    if not isinstance(stream, RdmaStream):
        return RegisteredMemory(view.nbytes, None, "the connection is on TCP")
    if big_endian(buffer):
        return RegisteredMemory(view.nbytes, None, _CONVERTED)
    if lies_in_a_file(view):
        return RegisteredMemory(view.nbytes, None, _IN_A_FILE)
    try:
        return RegisteredMemory(view.nbytes, stream.register(view))
    except VerbsError as error:
        reason = error.detail
        if error.errno == errno.ENOMEM:
            limit = locked_memory_limit()
            allowed = "" if limit is None else f", within {limit >> 10} KiB of locked memory"
            reason = f"{reason}{allowed}; {limit_hint(limit)}"
        _log.info("%s: %d bytes cannot be registered and will be copied: %s", stream.endpoint, view.nbytes, reason)
        return RegisteredMemory(view.nbytes, None, reason)
