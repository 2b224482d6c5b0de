"""What tells one protocol version from another. Source: docs/protocol.md, section 7."""

from __future__ import annotations

from dataclasses import dataclass

from weightwire.wire.commands import Command

__all__ = ["Facts"]


@dataclass(frozen=True, slots=True)
class Facts:
    """The differences between versions, in bytes where a name says so.

    ``hello_request_bytes`` is 0 or 24 and ``hello_answer_bytes`` 3 or 28; ``hello_flags``: its answer has room for
    flags; ``device_prefix``: requests say a device; ``device_count``: DEVICE_COUNT exists; ``set_tensor_header_bytes``
    is 304, or 305 with a ``cache_flag``; ``alloc_size_sources``: GET_ALLOC_SIZE carries ten source tensors;
    ``graph_uid``: GRAPH_* carry a u64 number; ``rdma``: HELLO can move the connection to RDMA; ``commands``: those a
    server of this version knows.
    """

    version: tuple[int, int]
    text: str
    hello_request_bytes: int
    hello_answer_bytes: int
    hello_flags: bool
    device_prefix: bool
    device_count: bool
    set_tensor_header_bytes: int
    cache_flag: bool
    alloc_size_sources: bool
    graph_uid: bool
    rdma: bool
    commands: frozenset[Command]
