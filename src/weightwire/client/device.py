"""What a server is asked about its devices, and for memory on them. For callers inside `Channel.exclusive`."""

from __future__ import annotations

from typing import Final, NamedTuple

from weightwire.client.channel import Channel
from weightwire.client.remote import RemoteBuffer, whole
from weightwire.errors import AllocationError, ConfigError, ProtocolError, WeightwireError
from weightwire.wire.answers import decode_alloc_answer, decode_memory_answer, decode_u32_answer, decode_u64_answer
from weightwire.wire.commands import Command
from weightwire.wire.framing import MAX_MESSAGE_BYTES

__all__ = [
    "MAX_BUFFER",
    "DeviceMemory",
    "alignment",
    "allocate",
    "barrier",
    "check_device",
    "device_count",
    "max_size",
    "memory",
    "release_all",
]

MAX_BUFFER: Final = MAX_MESSAGE_BYTES
"""Bytes; a server that names no limit says 2^64-1, and no message about more than this may be sent."""

_SANE_ALIGNMENT: Final = 1 << 30

_SANE_DEVICES: Final = 4096


class DeviceMemory(NamedTuple):
    """One device of a server: its number, and its free and total memory in bytes."""

    device: int
    free: int
    total: int


def device_count(channel: Channel) -> int:
    """How many devices the server has; before protocol 3 it cannot say, and there is one.

    ProtocolError for more than `_SANE_DEVICES`: every one of them would be asked about.
    """
    if not channel.dialect.device_count:
        return 1
    count = decode_u32_answer(channel.call(Command.DEVICE_COUNT, b""))
    if count > _SANE_DEVICES:
        raise ProtocolError(
            f"{channel.endpoint} says it has {count} devices",
            hint=f"the server may not really speak protocol {channel.dialect.text}",
        )
    return count


def check_device(channel: Channel, device: int, count: int) -> None:
    """ConfigError unless there is such a device; a server would close the connection. AllocationError if there is none
    at all, whatever was asked for.
    """
    if whole("device", device) < 0:
        raise ConfigError(f"device: {device!r} is not the number of a device", hint="they count from 0")
    if count == 0:
        raise AllocationError(
            f"{channel.endpoint} has no device, so there is no memory on it",
            hint="the server was started without one, or those it was given were not found; its log says more",
        )
    if device >= count:
        have = "only device 0" if count == 1 else f"devices 0 to {count - 1}"
        raise ConfigError(f"device: there is no device {device!r}", hint=f"the server has {have}")


def memory(channel: Channel, device: int) -> tuple[int, int]:
    """Free and total bytes of ``device``."""
    payload = channel.dialect.encode_device(Command.GET_DEVICE_MEMORY, device)
    answer = decode_memory_answer(channel.call(Command.GET_DEVICE_MEMORY, payload))
    return answer.free, answer.total


def alignment(channel: Channel, device: int) -> int:
    """What each tensor's offset on ``device`` must be a multiple of, bytes. ProtocolError unless it is a power of
    two.
    """
    payload = channel.dialect.encode_device(Command.GET_ALIGNMENT, device)
    value = decode_u64_answer(channel.call(Command.GET_ALIGNMENT, payload), "GET_ALIGNMENT")
    if not 0 < value <= _SANE_ALIGNMENT or value & (value - 1):
        raise ProtocolError(
            f"{channel.endpoint} says its alignment is {value} bytes, which is no usable power of two",
            hint=f"the server may not really speak protocol {channel.dialect.text}",
        )
    return value


def max_size(channel: Channel, device: int) -> int:
    """The largest buffer ``device`` gives, bytes (2^64-1 where it knows no limit). ProtocolError for zero."""
    payload = channel.dialect.encode_device(Command.GET_MAX_SIZE, device)
    value = decode_u64_answer(channel.call(Command.GET_MAX_SIZE, payload), "GET_MAX_SIZE")
    if value == 0:
        raise ProtocolError(f"{channel.endpoint} says its largest buffer has 0 bytes")
    return value


def barrier(channel: Channel, device: int = 0) -> None:
    """Wait until the server has done all that was sent: it answers in order (docs/protocol.md, section 1)."""
    channel.settle()
    channel.call(Command.GET_ALIGNMENT, channel.dialect.encode_device(Command.GET_ALIGNMENT, device))


def allocate(channel: Channel, nbytes: int, device: int) -> RemoteBuffer:
    """A buffer of ``nbytes`` bytes on ``device``.

    Raises ConfigError for a size that cannot be asked for, AllocationError if the server does not have it,
    ProtocolError if what it gives is not what was asked for.
    """
    nbytes = whole("nbytes", nbytes)
    if not 0 < nbytes <= MAX_BUFFER:
        raise ConfigError(f"nbytes: {nbytes!r} bytes cannot be allocated", hint=f"1 to {MAX_BUFFER} can")
    dialect = channel.dialect
    answer = decode_alloc_answer(channel.call(Command.ALLOC_BUFFER, dialect.encode_alloc_buffer(device, nbytes)))
    if answer.handle == 0:
        free, total = memory(channel, device)
        raise AllocationError(
            f"{channel.endpoint} could not allocate {nbytes} bytes on device {device}",
            nbytes=nbytes,
            hint=f"it says that {free} of {total} bytes are free; free buffers, or push fewer tensors with include",
        )
    if answer.nbytes < nbytes:
        raise ProtocolError(f"{channel.endpoint} was asked for {nbytes} bytes and gave a buffer of {answer.nbytes}")
    base = decode_u64_answer(
        channel.call(Command.BUFFER_GET_BASE, dialect.encode_handle(answer.handle)), "BUFFER_GET_BASE"
    )
    if base == 0 or base + nbytes > 1 << 64:
        raise ProtocolError(f"{channel.endpoint} says that a buffer of {nbytes} bytes starts at address {base:#x}")
    return RemoteBuffer(channel, answer.handle, base, nbytes, device)


def release_all(buffers: list[RemoteBuffer]) -> None:
    """Give ``buffers`` back after a failure, as far as the connection allows it."""
    try:
        for buffer in buffers:
            buffer.release()
    except WeightwireError:
        # The connection is lost, and with it the buffers; the failure that led here is the one to report.
        pass
