"""What requests and answers say, once decoded. Sizes and offsets are bytes. Source: docs/protocol.md, section 5."""

from __future__ import annotations

from typing import NamedTuple

from weightwire.wire.tensor import RpcTensor

__all__ = [
    "AllocAnswer",
    "AllocBuffer",
    "AllocSize",
    "BufferClear",
    "BufferHandle",
    "CopyTensor",
    "DeviceRequest",
    "GetTensor",
    "InitTensor",
    "MemoryAnswer",
    "MemsetTensor",
    "SetTensor",
    "SetTensorHash",
    "Tensor2D",
]


class AllocBuffer(NamedTuple):
    """ALLOC_BUFFER: ``nbytes`` bytes wanted on ``device`` (0 where the version knows one device only)."""

    device: int
    nbytes: int


class DeviceRequest(NamedTuple):
    """GET_ALIGNMENT, GET_MAX_SIZE or GET_DEVICE_MEMORY of ``device``."""

    device: int


class BufferHandle(NamedTuple):
    """BUFFER_GET_BASE or FREE_BUFFER of a buffer."""

    handle: int


class BufferClear(NamedTuple):
    """BUFFER_CLEAR: the byte ``value`` everywhere in the buffer."""

    handle: int
    value: int


class SetTensor(NamedTuple):
    """The head of SET_TENSOR: the bytes that follow belong at ``offset`` of ``tensor``.

    ``cache_flag`` is the byte as sent from protocol 7.0 on, and 0 before, where it does not exist.
    """

    tensor: RpcTensor
    offset: int
    cache_flag: int


class SetTensorHash(NamedTuple):
    """SET_TENSOR_HASH: fill ``tensor`` from ``offset`` on with the cached bytes of FNV-1a 64 ``hash``."""

    tensor: RpcTensor
    offset: int
    hash: int


class GetTensor(NamedTuple):
    """GET_TENSOR: ``nbytes`` bytes from ``offset`` of ``tensor``."""

    tensor: RpcTensor
    offset: int
    nbytes: int


class CopyTensor(NamedTuple):
    """COPY_TENSOR, within one server."""

    src: RpcTensor
    dst: RpcTensor


class InitTensor(NamedTuple):
    """INIT_TENSOR, which lets a server clear the padding of a quantised tensor."""

    tensor: RpcTensor


class AllocSize(NamedTuple):
    """GET_ALLOC_SIZE: how many bytes ``tensor`` takes in a buffer of ``device``."""

    device: int
    tensor: RpcTensor


class MemsetTensor(NamedTuple):
    """MEMSET_TENSOR: the byte ``value``, ``nbytes`` times, from ``offset`` of ``tensor``."""

    tensor: RpcTensor
    offset: int
    nbytes: int
    value: int


class Tensor2D(NamedTuple):
    """SET_TENSOR_2D (its head) or GET_TENSOR_2D: ``n_copies`` rows of ``nbytes`` bytes.

    In the tensor they are ``stride`` bytes apart from ``offset`` on; on the wire there are no gaps between them.
    """

    tensor: RpcTensor
    offset: int
    nbytes: int
    n_copies: int
    stride: int


class AllocAnswer(NamedTuple):
    """The answer to ALLOC_BUFFER: (0, 0) if the server could not."""

    handle: int
    nbytes: int


class MemoryAnswer(NamedTuple):
    """The answer to GET_DEVICE_MEMORY, bytes."""

    free: int
    total: int
