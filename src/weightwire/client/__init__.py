"""The client: a connection to a ggml RPC server, and pushing models over it."""

from __future__ import annotations

from weightwire.client.bench import BenchLatency, BenchQuestions, BenchResult, BenchTransfer, bench
from weightwire.client.connection import Connection, connect
from weightwire.client.crew import Target
from weightwire.client.device import DeviceMemory
from weightwire.client.fanout import Pushed, PushedAll, push_all
from weightwire.client.registered import RegisteredMemory
from weightwire.client.remote import RemoteBuffer, RemoteTensor
from weightwire.client.result import PushResult, PushSummary
from weightwire.client.warm import Warmed, WarmSummary, warm

__all__ = [
    "BenchLatency",
    "BenchQuestions",
    "BenchResult",
    "BenchTransfer",
    "Connection",
    "DeviceMemory",
    "PushResult",
    "PushSummary",
    "Pushed",
    "PushedAll",
    "RegisteredMemory",
    "RemoteBuffer",
    "RemoteTensor",
    "Target",
    "WarmSummary",
    "Warmed",
    "bench",
    "connect",
    "push_all",
    "warm",
]
