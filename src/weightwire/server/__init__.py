"""The server: takes weights from any ggml RPC client and keeps them where an embedder wants them."""

from __future__ import annotations

from weightwire.server.destinations import Destination, HostMemory
from weightwire.server.listener import Server
from weightwire.server.served import ServedTensor
from weightwire.server.stats import ServerStats, TransportStats

__all__ = ["Destination", "HostMemory", "ServedTensor", "Server", "ServerStats", "TransportStats"]
