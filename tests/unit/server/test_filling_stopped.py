"""A server that ends while it reads an entry that has no end."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.leaks import LeakCheck
from support.raw_client import RawClient

from weightwire.cache import store
from weightwire.cache.directory import entry_name
from weightwire.server import Destination, Server, filling
from weightwire.wire import Command
from weightwire.wire.tensor import RpcTensor

HUGE = 1 << 39
"""Bytes of a file without any data: to hash them takes minutes."""
HASH = 0x1234


class Endless(Destination):
    """As many bytes as anybody wants, none of which is kept."""

    def __init__(self, nbytes: int, device: int) -> None:
        super().__init__(nbytes)

    def write(self, offset: int, view: memoryview) -> None: ...

    def read(self, offset: int, view: memoryview) -> None: ...

    def close(self) -> None: ...


def huge(client: RawClient) -> RpcTensor:
    small = client.place("huge", 1 << 20, client.allocate(HUGE))
    return replace(small, ne=(1 << 10, 1 << 10, 1 << 10, HUGE >> 30), nb=(1, 1 << 10, 1 << 20, 1 << 30))


@pytest.mark.parametrize(
    ("entry", "verify", "optimized", "where"),
    [
        (2 * HUGE, "content", True, "hash"),  # of another size: is it a bad one?
        (2 * HUGE, "content", False, "hash"),
        (HUGE, "content", True, "hash"),  # before a hook is shown anything
        (HUGE, "size", True, "read"),
    ],
)
def test_closing_stops_it(
    entry: int,
    verify: str,
    optimized: bool,
    where: str,
    tmp_path: Path,
    no_leaks: LeakCheck,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    reached = threading.Event()
    module, name = (store, "hash_payloads") if where == "hash" else (filling, "read_exactly")
    real = getattr(module, name)

    def reaching(*arguments: Any, **options: Any) -> Any:
        reached.set()
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, reaching)
    (tmp_path / entry_name(HASH)).touch()
    os.truncate(tmp_path / entry_name(HASH), entry)
    with (
        Server(
            port=0, cache=tmp_path, cache_verify=verify, destination=Endless, memory=2 * HUGE, optimized=optimized
        ) as server,
        RawClient(server.port) as client,
    ):
        client.send(Command.SET_TENSOR_HASH, client.dialect.encode_set_tensor_hash(huge(client), 0, HASH))
        assert reached.wait(20)
        server.close()
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("weightwire-")] == []
    assert not caplog.records
    assert os.listdir(tmp_path) == [entry_name(HASH)]
