"""The ggml RPC protocol, versions 1.0 to 8.0: bytes in and bytes out, no I/O. Source: docs/protocol.md."""

from __future__ import annotations

from weightwire.wire.commands import CACHE_THRESHOLD, COMPUTE_COMMANDS, DEFAULT_PORT, Command
from weightwire.wire.dialect import DIALECTS, Dialect, described_version, dialect_for
from weightwire.wire.framing import (
    EMPTY_RESPONSE,
    MAX_CONTROL_BYTES,
    MAX_MESSAGE_BYTES,
    REQUEST_HEADER_BYTES,
    RESPONSE_HEADER_BYTES,
    parse_request_header,
    parse_u64,
    request_header,
    response_header,
)
from weightwire.wire.hello import CACHE_BIT, Greeting
from weightwire.wire.tensor import RPC_TENSOR_BYTES, RpcTensor, weight_tensor
from weightwire.wire.types import TYPES, TensorType

__all__ = [
    "CACHE_BIT",
    "CACHE_THRESHOLD",
    "COMPUTE_COMMANDS",
    "DEFAULT_PORT",
    "DIALECTS",
    "EMPTY_RESPONSE",
    "MAX_CONTROL_BYTES",
    "MAX_MESSAGE_BYTES",
    "REQUEST_HEADER_BYTES",
    "RESPONSE_HEADER_BYTES",
    "RPC_TENSOR_BYTES",
    "TYPES",
    "Command",
    "Dialect",
    "Greeting",
    "RpcTensor",
    "TensorType",
    "described_version",
    "dialect_for",
    "parse_request_header",
    "parse_u64",
    "request_header",
    "response_header",
    "weight_tensor",
]
