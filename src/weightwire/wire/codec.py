"""Payloads of requests, to and from bytes, in one version's shape. Source: docs/protocol.md, section 5."""

from __future__ import annotations

import struct
from typing import Final

from weightwire.errors import ConfigError, ProtocolError
from weightwire.wire.commands import ALLOC_SIZE_SOURCES, VARIABLE_COMMANDS, Command
from weightwire.wire.facts import Facts
from weightwire.wire.messages import (
    AllocBuffer,
    AllocSize,
    BufferClear,
    BufferHandle,
    CopyTensor,
    DeviceRequest,
    GetTensor,
    InitTensor,
    MemsetTensor,
    SetTensor,
    SetTensorHash,
    Tensor2D,
)
from weightwire.wire.tensor import RPC_TENSOR_BYTES, Readable, RpcTensor

__all__ = ["DEVICE_COMMANDS", "Codec"]

DEVICE_COMMANDS: Final = frozenset({Command.GET_ALIGNMENT, Command.GET_MAX_SIZE, Command.GET_DEVICE_MEMORY})
"""The requests that say a device and nothing else."""

_FIELDS: Final = {"u8": (1, "B"), "u32": (4, "I"), "u64": (8, "Q")}


def _number(what: str, value: int, kind: str) -> bytes:
    nbytes, letter = _FIELDS[kind]
    if not 0 <= value < 1 << (8 * nbytes):
        raise ConfigError(f"{what} = {value} does not fit {kind}", hint=f"0 to {(1 << 8 * nbytes) - 1}")
    return struct.pack("<" + letter, value)


class Codec(Facts):
    """Encoders and decoders that follow the `Facts` of a version.

    An encoder raises ConfigError (a ValueError) if the version has no such command or a number does not fit its field,
    and ValueError if a tensor does not. A decoder raises ProtocolError if the payload has the wrong length, and takes
    every value: bounds are for the caller to check.
    """

    __slots__ = ()

    # What every method needs.

    def _sending(self, cmd: Command) -> None:
        if cmd not in self.commands:
            raise ConfigError(f"protocol {self.text} has no command {cmd.name}")

    def _fixed(self, cmd: Command, payload: Readable, expected: int) -> None:
        if cmd not in self.commands:
            raise ProtocolError(f"protocol {self.text} has no command {cmd.name}")
        if len(payload) != expected:
            part = "the head of " if cmd in VARIABLE_COMMANDS else ""
            raise ProtocolError(f"{part}{cmd.name} of protocol {self.text} has {expected} bytes, not {len(payload)}")

    def _device_head(self, device: int) -> bytes:
        if self.device_prefix:
            return _number("device", device, "u32")
        if device:
            raise ConfigError(f"device = {device}, but protocol {self.text} knows one device only", hint="use device 0")
        return b""

    def _device_of(self, payload: Readable) -> int:
        return int.from_bytes(payload[:4], "little") if self.device_prefix else 0

    @property
    def _device_bytes(self) -> int:
        return 4 if self.device_prefix else 0

    # Buffers and devices.

    def encode_alloc_buffer(self, device: int, nbytes: int) -> bytes:
        """ALLOC_BUFFER of ``nbytes`` bytes on ``device``."""
        return self._device_head(device) + _number("nbytes", nbytes, "u64")

    def decode_alloc_buffer(self, payload: Readable) -> AllocBuffer:
        """ALLOC_BUFFER."""
        self._fixed(Command.ALLOC_BUFFER, payload, self._device_bytes + 8)
        return AllocBuffer(self._device_of(payload), _u64(payload, self._device_bytes))

    def encode_device(self, cmd: Command, device: int) -> bytes:
        """GET_ALIGNMENT, GET_MAX_SIZE or GET_DEVICE_MEMORY of ``device``."""
        if cmd not in DEVICE_COMMANDS:
            raise ConfigError(f"{cmd.name} is not asked of a device alone")
        return self._device_head(device)

    def decode_device(self, cmd: Command, payload: Readable) -> DeviceRequest:
        """GET_ALIGNMENT, GET_MAX_SIZE or GET_DEVICE_MEMORY."""
        if cmd not in DEVICE_COMMANDS:
            raise ConfigError(f"{cmd.name} is not asked of a device alone")
        self._fixed(cmd, payload, self._device_bytes)
        return DeviceRequest(self._device_of(payload))

    def encode_handle(self, handle: int) -> bytes:
        """BUFFER_GET_BASE or FREE_BUFFER of the server's ``handle``."""
        return _number("handle", handle, "u64")

    def decode_handle(self, payload: Readable) -> BufferHandle:
        """BUFFER_GET_BASE or FREE_BUFFER."""
        if len(payload) != 8:
            raise ProtocolError(f"a buffer handle has 8 bytes, not {len(payload)}")
        return BufferHandle(_u64(payload, 0))

    def encode_buffer_clear(self, handle: int, value: int) -> bytes:
        """BUFFER_CLEAR with the byte ``value``."""
        return _number("handle", handle, "u64") + _number("value", value, "u8")

    def decode_buffer_clear(self, payload: Readable) -> BufferClear:
        """BUFFER_CLEAR."""
        self._fixed(Command.BUFFER_CLEAR, payload, 9)
        return BufferClear(_u64(payload, 0), payload[8])

    # Tensors.

    def encode_set_tensor(self, tensor: RpcTensor, offset: int, cache_flag: int) -> bytes:
        """The head of SET_TENSOR (304 bytes, 305 from 7.0), after which the data follows.

        ``offset`` is bytes into the tensor. ``cache_flag`` (0 to 255; anything but 0 asks a caching server to
        keep the data) is left out before 7.0.
        """
        flag = _number("cache_flag", cache_flag, "u8")
        return tensor.pack() + (flag if self.cache_flag else b"") + _number("offset", offset, "u64")

    def decode_set_tensor(self, payload: Readable) -> SetTensor:
        """The head of SET_TENSOR: exactly ``set_tensor_header_bytes``, without the data."""
        self._fixed(Command.SET_TENSOR, payload, self.set_tensor_header_bytes)
        flag = payload[RPC_TENSOR_BYTES] if self.cache_flag else 0
        return SetTensor(RpcTensor.unpack(payload), _u64(payload, self.set_tensor_header_bytes - 8), flag)

    def encode_set_tensor_hash(self, tensor: RpcTensor, offset: int, hash: int) -> bytes:
        """SET_TENSOR_HASH; ``hash`` is the FNV-1a 64 of the bytes wanted at ``offset``."""
        return tensor.pack() + _number("offset", offset, "u64") + _number("hash", hash, "u64")

    def decode_set_tensor_hash(self, payload: Readable) -> SetTensorHash:
        """SET_TENSOR_HASH."""
        self._fixed(Command.SET_TENSOR_HASH, payload, RPC_TENSOR_BYTES + 16)
        return SetTensorHash(RpcTensor.unpack(payload), _u64(payload, 296), _u64(payload, 304))

    def encode_get_tensor(self, tensor: RpcTensor, offset: int, nbytes: int) -> bytes:
        """GET_TENSOR of ``nbytes`` bytes from byte ``offset`` on."""
        return tensor.pack() + _number("offset", offset, "u64") + _number("nbytes", nbytes, "u64")

    def decode_get_tensor(self, payload: Readable) -> GetTensor:
        """GET_TENSOR."""
        self._fixed(Command.GET_TENSOR, payload, RPC_TENSOR_BYTES + 16)
        return GetTensor(RpcTensor.unpack(payload), _u64(payload, 296), _u64(payload, 304))

    def encode_copy_tensor(self, src: RpcTensor, dst: RpcTensor) -> bytes:
        """COPY_TENSOR between two tensors of one server."""
        return src.pack() + dst.pack()

    def decode_copy_tensor(self, payload: Readable) -> CopyTensor:
        """COPY_TENSOR."""
        self._fixed(Command.COPY_TENSOR, payload, 2 * RPC_TENSOR_BYTES)
        return CopyTensor(RpcTensor.unpack(payload), RpcTensor.unpack(payload, RPC_TENSOR_BYTES))

    def encode_init_tensor(self, tensor: RpcTensor) -> bytes:
        """INIT_TENSOR."""
        return tensor.pack()

    def decode_init_tensor(self, payload: Readable) -> InitTensor:
        """INIT_TENSOR."""
        self._fixed(Command.INIT_TENSOR, payload, RPC_TENSOR_BYTES)
        return InitTensor(RpcTensor.unpack(payload))

    def encode_alloc_size(self, device: int, tensor: RpcTensor) -> bytes:
        """GET_ALLOC_SIZE of ``tensor`` on ``device``; from 3.6 ten empty sources follow (a weight has none)."""
        return self._device_head(device) + tensor.pack() + bytes(self._sources_bytes)

    def decode_alloc_size(self, payload: Readable) -> AllocSize:
        """GET_ALLOC_SIZE; the sources are not looked at."""
        self._fixed(Command.GET_ALLOC_SIZE, payload, self._device_bytes + RPC_TENSOR_BYTES + self._sources_bytes)
        return AllocSize(self._device_of(payload), RpcTensor.unpack(payload, self._device_bytes))

    @property
    def _sources_bytes(self) -> int:
        return ALLOC_SIZE_SOURCES * RPC_TENSOR_BYTES if self.alloc_size_sources else 0

    def encode_memset(self, tensor: RpcTensor, offset: int, nbytes: int, value: int) -> bytes:
        """MEMSET_TENSOR (from 5.0): the byte ``value``, ``nbytes`` times, from byte ``offset`` on."""
        self._sending(Command.MEMSET_TENSOR)
        head = tensor.pack() + _number("offset", offset, "u64") + _number("nbytes", nbytes, "u64")
        return head + _number("value", value, "u8")

    def decode_memset(self, payload: Readable) -> MemsetTensor:
        """MEMSET_TENSOR."""
        self._fixed(Command.MEMSET_TENSOR, payload, RPC_TENSOR_BYTES + 17)
        return MemsetTensor(RpcTensor.unpack(payload), _u64(payload, 296), _u64(payload, 304), payload[312])

    # Rows with a stride, from 8.0.

    def encode_set_tensor_2d(self, tensor: RpcTensor, offset: int, nbytes: int, n_copies: int, stride: int) -> bytes:
        """The head of SET_TENSOR_2D (328 bytes); ``nbytes`` * ``n_copies`` bytes of packed rows follow."""
        return self._encode_2d(Command.SET_TENSOR_2D, Tensor2D(tensor, offset, nbytes, n_copies, stride))

    def decode_set_tensor_2d(self, payload: Readable) -> Tensor2D:
        """The head of SET_TENSOR_2D, without its rows."""
        return self._decode_2d(Command.SET_TENSOR_2D, payload)

    def encode_get_tensor_2d(self, tensor: RpcTensor, offset: int, nbytes: int, n_copies: int, stride: int) -> bytes:
        """GET_TENSOR_2D, answered by ``nbytes`` * ``n_copies`` bytes of packed rows."""
        return self._encode_2d(Command.GET_TENSOR_2D, Tensor2D(tensor, offset, nbytes, n_copies, stride))

    def decode_get_tensor_2d(self, payload: Readable) -> Tensor2D:
        """GET_TENSOR_2D."""
        return self._decode_2d(Command.GET_TENSOR_2D, payload)

    def _encode_2d(self, cmd: Command, what: Tensor2D) -> bytes:
        self._sending(cmd)
        numbers = zip(Tensor2D._fields[1:], what[1:], strict=True)
        return what.tensor.pack() + b"".join(_number(field, value, "u64") for field, value in numbers)

    def _decode_2d(self, cmd: Command, payload: Readable) -> Tensor2D:
        self._fixed(cmd, payload, RPC_TENSOR_BYTES + 32)
        offset, nbytes, n_copies, stride = (_u64(payload, 296 + 8 * index) for index in range(4))
        return Tensor2D(RpcTensor.unpack(payload), offset, nbytes, n_copies, stride)


def _u64(payload: Readable, offset: int) -> int:
    return int.from_bytes(payload[offset : offset + 8], "little")
