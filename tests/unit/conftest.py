"""The stand-in libibverbs, for every test of RDMA that needs no device."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
from support.ends import tcp_ends
from support.fakeverbs import FakeVerbs, build, cannot_build
from support.rdma import connect_rdma
from support.require import do_without

from weightwire._native import _verbs
from weightwire.errors import RdmaUnavailable
from weightwire.transport.rdma import RdmaStream
from weightwire.transport.tcp import TcpStream


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> FakeVerbs:
    """The stand-in, loaded; the process has no other libibverbs from then on."""
    why = cannot_build()
    if why:
        do_without("the stand-in libibverbs", why)
    library = build(tmp_path_factory.mktemp("fake"))
    fake = FakeVerbs(library)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WEIGHTWIRE_LIBIBVERBS", str(library))
        with contextlib.suppress(RdmaUnavailable):  # built without RDMA: its tests say so
            fake.set("devices", 2)
            assert len(_verbs.devices()) == 2, "the process has opened another libibverbs, and cannot open a second"
    fake.reset()
    return fake


@pytest.fixture(scope="session", autouse=True)
def no_other_libibverbs(request: pytest.FixtureRequest) -> None:
    """Have the stand-in opened before the first test, whichever that is: a process opens only one."""
    if not cannot_build():
        request.getfixturevalue("fake_library")


@pytest.fixture
def fake(fake_library: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVerbs]:
    """The stand-in as at the start; afterwards nothing may be open, and nothing misused. Processes that the test starts
    open it too.
    """
    monkeypatch.delenv("GGML_RPC_NO_RDMA")
    monkeypatch.setenv("WEIGHTWIRE_LIBIBVERBS", str(fake_library.library))
    gc.collect()
    fake_library.reset()
    assert fake_library.handles() == {}
    yield fake_library
    gc.collect()
    misuse, handles = fake_library.get("misuse"), fake_library.handles()
    fake_library.reset()
    assert handles == {}, "left open"
    assert misuse == 0, "an object was destroyed before what is made of it, or an event was never acknowledged"


@pytest.fixture
def tcp_pair() -> Iterator[tuple[TcpStream, TcpStream]]:
    """The client's and the server's end of a loopback connection."""
    client, server = tcp_ends()
    yield client, server
    client.close()
    server.close()


@pytest.fixture
def rdma_pair(fake: FakeVerbs, tcp_pair: tuple[TcpStream, TcpStream]) -> Iterator[tuple[RdmaStream, RdmaStream]]:
    """The client's and the server's end of an RDMA connection over the stand-in."""
    client, server = connect_rdma(*tcp_pair)
    yield client, server
    client.close()
    server.close()
