"""The client: a connection to a ggml RPC server, and pushing models over it."""

from __future__ import annotations

from weightwire.client.connection import Connection, connect
from weightwire.client.device import DeviceMemory
from weightwire.client.registered import RegisteredMemory
from weightwire.client.remote import RemoteBuffer, RemoteTensor
from weightwire.client.result import PushResult, PushSummary

__all__ = [
    "Connection",
    "DeviceMemory",
    "PushResult",
    "PushSummary",
    "RegisteredMemory",
    "RemoteBuffer",
    "RemoteTensor",
    "connect",
]
