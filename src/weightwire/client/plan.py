"""What comes before the bytes: which tensors go, whether they can, where they lie, and the memory for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from weightwire.client import device as devices
from weightwire.client.channel import MAX_OUTSTANDING, Channel
from weightwire.client.layers import Layers
from weightwire.client.layout import lay_out
from weightwire.client.remote import RemoteBuffer, RemoteTensor
from weightwire.errors import ConfigError, ModelError, ProtocolError
from weightwire.model import Model, ModelTensor
from weightwire.model.choosing import included
from weightwire.wire.answers import decode_u64_answer
from weightwire.wire.commands import Command
from weightwire.wire.tensor import weight_tensor
from weightwire.wire.types import TYPES

__all__ = ["place", "select"]

_PADDED_ROW: Final = 512
"""Elements; servers on CUDA pad shorter rows of quantised tensors (docs/protocol.md, section 11)."""


def select(model: Model, include: re.Pattern[str] | None, layers: Layers | None = None) -> list[ModelTensor]:
    """The model's tensors that ``include`` finds (anywhere in the name) and that are of ``layers``, in the model's
    order, each checked.

    Raises ModelError for a model without tensors or with one whose bytes are not what it says, ConfigError if nothing
    is found, by both together or by one of the ranges of ``layers``.
    """
    where = model.path or ""
    if not model.tensors:
        raise ModelError("there is no tensor in it", path=where)
    if layers is not None:
        layers.check(model.tensors)
    found = included(model, include)
    chosen = [tensor for tensor in found if layers is None or layers.holds(tensor.name)]
    if not chosen:
        raise ConfigError(
            f"layers: none of the {len(found)} tensors that include finds is of these layers",
            hint=f"the first that include finds is {found[0].name!r}; both have to match",
        )
    for tensor in chosen:
        if tensor.payload.nbytes != tensor.nbytes:
            raise ModelError(
                f"tensor {tensor.name!r} should have {tensor.nbytes} bytes and has {tensor.payload.nbytes}", path=where
            )
    return chosen


def place(
    channel: Channel, tensors: Sequence[ModelTensor], device: int, owned: list[RemoteBuffer]
) -> list[RemoteTensor]:
    """Lay ``tensors`` out by the server's rules and allocate their buffers.

    Every buffer is appended to ``owned`` as soon as it exists, so that the caller can free them if this raises:
    ConfigError for a device that is not there, AllocationError if a tensor is longer than the server's largest buffer
    or it has too little memory, ProtocolError for answers that make no sense.
    """
    devices.check_device(channel, device, devices.device_count(channel))
    alignment = devices.alignment(channel, device)
    limit = min(devices.max_size(channel, device), devices.MAX_BUFFER)
    padded = [index for index, tensor in enumerate(tensors) if _needs_padding(channel, tensor)]
    names = [tensor.name for tensor in tensors]
    sizes = [tensor.nbytes for tensor in tensors]
    lay_out(sizes, alignment, limit, names)  # before a server is asked anything about a tensor it could not hold
    _ask_sizes(channel, tensors, padded, sizes, device)
    layout = lay_out(sizes, alignment, limit, names)
    buffers: list[RemoteBuffer] = []
    for nbytes in layout.buffers:
        buffer = devices.allocate(channel, nbytes, device)
        owned.append(buffer)
        buffers.append(buffer)
        if buffer.base % alignment:
            raise ProtocolError(
                f"{channel.endpoint} gave a buffer at address {buffer.base:#x}, which is no multiple of its own "
                f"alignment of {alignment} bytes"
            )
    placed = [
        RemoteTensor(
            tensor.name, tensor.type_code, tensor.ne, tensor.nbytes, buffers[at.buffer], at.offset, tensor.dtype
        )
        for tensor, at in zip(tensors, layout.places, strict=True)
    ]
    for index in padded:
        tensor = placed[index]
        channel.post(Command.INIT_TENSOR, channel.dialect.encode_init_tensor(tensor.wire()), tensor=tensor.name)
        channel.settle(MAX_OUTSTANDING)
    channel.settle()
    return placed


def _needs_padding(channel: Channel, tensor: ModelTensor) -> bool:
    code = tensor.type_code
    if code is None or not tensor.nbytes or not tensor.ne or tensor.ne[0] % _PADDED_ROW == 0:
        return False
    if not channel.dialect.knows_type(code) or TYPES[code].block == 1:
        return False
    # A tensor that has to go as plain bytes has no rows to pad.
    return weight_tensor(tensor.name, code, tensor.ne, tensor.nbytes, buffer=0, data=0).type == code


def _ask_sizes(
    channel: Channel, tensors: Sequence[ModelTensor], padded: Sequence[int], sizes: list[int], device: int
) -> None:
    """Put the server's word on what the tensors at ``padded`` take (bytes) into ``sizes``."""
    answers: list[tuple[int, bytes]] = []
    for index in padded:
        tensor = tensors[index]
        wire = weight_tensor(tensor.name, tensor.type_code, tensor.ne, tensor.nbytes, buffer=0, data=0)

        def keep(answer: bytes, index: int = index) -> None:
            answers.append((index, answer))

        payload = channel.dialect.encode_alloc_size(device, wire)
        channel.post(Command.GET_ALLOC_SIZE, payload, tensor=tensor.name, then=keep)
        channel.settle(MAX_OUTSTANDING)
    channel.settle()
    for index, answer in answers:
        tensor = tensors[index]
        size = decode_u64_answer(answer, "GET_ALLOC_SIZE")
        if not tensor.nbytes <= size <= devices.MAX_BUFFER:
            raise ProtocolError(
                f"{channel.endpoint} says that tensor {tensor.name!r} of {tensor.nbytes} bytes takes {size}"
            )
        sizes[index] = size
