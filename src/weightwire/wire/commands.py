"""Command numbers and the sizes that no version changes. Source: docs/protocol.md, sections 4 and 5."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = [
    "ALLOC_SIZE_SOURCES",
    "CACHE_THRESHOLD",
    "COMPUTE_COMMANDS",
    "DEFAULT_PORT",
    "VARIABLE_COMMANDS",
    "Command",
]

DEFAULT_PORT: Final = 50052

CACHE_THRESHOLD: Final = 10 * 1024 * 1024
"""Bytes; a tensor strictly longer is worth a cache entry (docs/protocol.md, section 9)."""


class Command(IntEnum):
    """The first byte of a request. Which of them a server knows depends on its version: see ``Dialect.commands``."""

    ALLOC_BUFFER = 0
    GET_ALIGNMENT = 1
    GET_MAX_SIZE = 2
    BUFFER_GET_BASE = 3
    FREE_BUFFER = 4
    BUFFER_CLEAR = 5
    SET_TENSOR = 6
    SET_TENSOR_HASH = 7
    GET_TENSOR = 8
    COPY_TENSOR = 9
    GRAPH_COMPUTE = 10
    GET_DEVICE_MEMORY = 11
    INIT_TENSOR = 12
    GET_ALLOC_SIZE = 13
    HELLO = 14
    DEVICE_COUNT = 15
    GRAPH_RECOMPUTE = 16
    MEMSET_TENSOR = 17
    SET_TENSOR_2D = 18
    GET_TENSOR_2D = 19
    COMM_INIT = 20
    COMM_ALLREDUCE = 21
    COMM_FREE = 22


COMPUTE_COMMANDS: Final = frozenset(
    {
        Command.GRAPH_COMPUTE,
        Command.GRAPH_RECOMPUTE,
        Command.COMM_INIT,
        Command.COMM_ALLREDUCE,
        Command.COMM_FREE,
    }
)
"""What a server that only stores weights does not do."""

VARIABLE_COMMANDS: Final = frozenset({Command.SET_TENSOR, Command.SET_TENSOR_2D, Command.GRAPH_COMPUTE})
"""Requests whose payload has no fixed size: a head, then data."""

ALLOC_SIZE_SOURCES: Final = 10
