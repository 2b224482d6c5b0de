"""One server that is given under two names is found out before anything is sent to it."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.leaks import LeakCheck, eventually

import weightwire
from weightwire import Target, push_all, warm
from weightwire.client import peers
from weightwire.client.peers import Peers
from weightwire.errors import ConfigError
from weightwire.transport.tcp import TcpStream, connect_tcp


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "model.safetensors"
    save_file({"t": np.ones(11 << 20, np.uint8)}, path)
    return path


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(peers, "_LONGEST", 1000.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("call", [push_all, warm])
@pytest.mark.parametrize("names", [("127.0.0.1", "localhost"), ("[::ffff:127.0.0.1]", "127.0.0.1")])
def test_one_server_under_two_names(
    call: Callable[..., Any], names: tuple[str, str], model: Path, no_leaks: LeakCheck
) -> None:
    """What listens answers nobody, as a stock server that is busy, and hears nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=5) as listener:
        port = listener.getsockname()[1]
        one, other = (f"{name}:{port}" for name in names)
        said = re.escape(f"targets: {one} and {other} are one server, 127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=said) as caught:
            call(model, [one, Target(other, layers="other")], index=False)
        assert "each server once" in caught.value.hint
        listener.settimeout(20)
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(20)
                assert connection.recv(1) == b""


def test_two_servers_of_one_machine(model: Path, no_leaks: LeakCheck) -> None:
    with weightwire.Server(port=0) as one, weightwire.Server(port=0) as other:
        endpoints = [f"localhost:{one.port}", f"127.0.0.1:{other.port}"]
        with push_all(model, endpoints, index=False) as pushed:
            pushed.check()
            assert [set(server.tensors) for server in (one, other)] == [{"t"}, {"t"}]


@pytest.fixture
def listening() -> Any:
    with socket.create_server(("127.0.0.1", 0), backlog=8) as listener:
        yield listener.getsockname()[1]


def reach(port: int) -> TcpStream:
    return connect_tcp(f"127.0.0.1:{port}", 20.0)


@pytest.mark.usefixtures("patient")
def test_who_is_not_there_is_not_waited_for(listening: int) -> None:
    servers = Peers(["a", "b"])
    with reach(listening) as stream:
        servers.gone(1)
        servers.connected(0, stream, 1000.0)
        assert servers.error is None


def test_who_comes_late_is_found_out_all_the_same(listening: int) -> None:
    servers = Peers(["a", "b", "c"])
    with reach(listening) as first, reach(listening) as late:
        servers.connected(0, first, 0.01)
        assert servers.error is None
        with pytest.raises(ConfigError, match="a and c are one server"):
            servers.connected(2, late, 0.01)
    assert isinstance(servers.error, ConfigError)


@pytest.mark.usefixtures("patient")
def test_whoever_waits_hears_of_it(listening: int, no_leaks: LeakCheck) -> None:
    """One that is another server's, too: what is asked for cannot be done."""
    servers, heard = Peers(["a", "b", "c", "d"]), []
    with socket.create_server(("127.0.0.1", 0)) as listener, reach(listener.getsockname()[1]) as stream:

        def wait() -> None:
            try:
                servers.connected(0, stream, 1000.0)
            except ConfigError as error:
                heard.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert eventually(lambda: 0 not in servers._outstanding)
        with reach(listening) as one, reach(listening) as same:
            servers.connected(1, one, 0.0)
            with pytest.raises(ConfigError):
                servers.connected(2, same, 0.0)
        waiting.join(20)
    assert heard == [servers.error]
