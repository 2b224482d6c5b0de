"""Fixtures of the checks in the guest: the slice of the real model, servers and stock peers on the device's address.

RDMA is what is tested here; elsewhere tests that do not ask for it run on TCP (tests/conftest.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.guest import ADDRESS, ServeProcess, rdma_objects
from support.leaks import eventually
from support.require import do_without
from support.stock import StockServer


@pytest.fixture(autouse=True)
def rdma_only_where_asked_for() -> None:
    """Takes the place of the fixture that keeps other tests on TCP."""


@pytest.fixture(scope="session")
def slice_path() -> Path:
    """A GGUF of 16.8 MiB: the real model's first block, and rows of its large tensor, of 13 MiB."""
    path = Path(os.environ["WEIGHTWIRE_GUEST_FOLDER"]) / "slice.gguf"
    return path if path.exists() else do_without("the real model", "nothing was cut from it for the guest")


@pytest.fixture(scope="session", autouse=True)
def held_at_the_start() -> dict[str, int]:
    """The RDMA objects that are there before any test: the kernel's own."""
    return rdma_objects()


@pytest.fixture
def nothing_held(held_at_the_start: dict[str, int]) -> Iterator[None]:
    """Nobody has an RDMA object when the test and what it started have ended, and this process has nothing pinned.

    It is asked for with `usefixtures`, so that it looks last.
    """
    yield
    assert eventually(lambda: rdma_objects() == held_at_the_start, 60), (held_at_the_start, rdma_objects())


@pytest.fixture
def serve() -> Iterator[Callable[..., ServeProcess]]:
    """Starts ``weightwire serve`` processes, which end with the test; what they logged is shown if it fails."""
    started: list[ServeProcess] = []

    def start(*options: str) -> ServeProcess:
        started.append(ServeProcess(*options))
        return started[-1]

    yield start
    for server in started:
        print(f"--- weightwire serve\n{server.stop()}")


@pytest.fixture
def stock_on_device(library_of: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[[str], StockServer]]:
    """Starts stock servers on the device's address."""
    started: list[StockServer] = []

    def start(protocol: str) -> StockServer:
        started.append(StockServer(library_of(protocol), protocol, tmp_path / f"{len(started)}.log", host=ADDRESS))
        return started[-1]

    yield start
    for server in started:
        server.stop()
        print(f"--- stock server {server.protocol} (exit code {server.process.returncode})\n{server.output()}")
