"""What a server may be given, and what is refused before anything happens."""

from __future__ import annotations

import inspect
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.leaks import LeakCheck
from support.raw_client import RawClient

from weightwire.cache import TensorCache
from weightwire.errors import ConfigError, TransportError, VersionError
from weightwire.server import Server


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"host": ""}, "host=''"),
        ({"host": None}, "host=None"),
        ({"host": 5}, "host=5"),
        ({"host": b"127.0.0.1"}, "host=b'127"),
        ({"host": "127.0.0.1:5000"}, "names a port"),
        ({"host": "[::1]:5000"}, "names a port"),
        ({"port": -1}, "port=-1"),
        ({"port": 65536}, "port=65536"),
        ({"port": "x"}, "port='x'"),
        ({"port": "50052"}, "port='50052'"),
        ({"port": 1.5}, "port=1.5"),
        ({"port": True}, "port=True"),
        ({"port": None}, "port=None"),
        ({"retain": "for ever"}, "retain='for ever'"),
        ({"retain": None}, "retain=None"),
        ({"retain": ["process"]}, "retain="),
        ({"memory": -1}, "memory=-1"),
        ({"memory": 0}, "memory=0"),
        ({"memory": 1.5}, "memory=1.5"),
        ({"memory": "1GiB"}, "memory='1GiB'"),
        ({"memory": False}, "memory=False"),
        ({"memory": 1 << 64}, "memory="),
        ({"max_clients": 0}, "max_clients=0"),
        ({"max_clients": 2.0}, "max_clients=2.0"),
        ({"max_clients": None}, "max_clients=None"),
        ({"max_clients": 1 << 40}, "max_clients="),
        ({"hello_timeout": 0}, "hello_timeout=0"),
        ({"hello_timeout": None}, "hello_timeout=None"),
        ({"hello_timeout": "10"}, "hello_timeout='10'"),
        ({"hello_timeout": True}, "hello_timeout=True"),
        ({"hello_timeout": 10**5000}, r"hello_timeout=\(an int"),
        ({"memory": 10**5000}, r"memory=\(an int"),
        ({"stall_timeout": -1.0}, "stall_timeout=-1.0"),
        ({"stall_timeout": float("nan")}, "stall_timeout=nan"),
        ({"stall_timeout": float("inf")}, "stall_timeout=inf"),
        ({"destination": 5}, "destination=5"),
        ({"on_tensor": "print"}, "on_tensor='print'"),
        ({"protocol": "seven"}, "'seven'"),
        ({"protocol": 7}, "protocol 7"),
        ({"protocol": None}, "protocol None"),
        ({"protocol": "7.0.256"}, r"protocol 7\.0\.256"),
        ({"protocol": "7.3.9"}, r"protocol 7\.3\.9"),
        ({"protocol": "8.9"}, r"protocol 8\.9"),
        ({"protocol": "0.5"}, r"protocol 0\.5"),
        ({"protocol": "9.0"}, r"protocol 9\.0"),
        ({"protocol": "107.0.0"}, r"protocol 107\.0"),
        ({"cache": ""}, "cache directory ''"),
        ({"cache": "  "}, "cache directory '  '"),
        ({"cache": "a\0b"}, "cache directory"),
        ({"cache": 5}, "cache=5"),
        ({"cache": b"cache"}, "cache=b'cache'"),
        ({"cache": True}, "cache=True"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Server(**arguments)
    assert not isinstance(caught.value, VersionError)


def test_a_size_in_text_is_told_how_to_be_written() -> None:
    with pytest.raises(ConfigError) as caught:
        Server(memory="1GiB")  # type: ignore[arg-type]
    assert "1 << 30" in caught.value.hint


def test_numbers_of_numpy_are_numbers(no_leaks: LeakCheck) -> None:
    with (
        Server(port=np.int64(0), memory=np.uint32(1 << 20), max_clients=np.int8(3)) as server,  # type: ignore[arg-type]
        RawClient(server.port) as client,
    ):
        assert client.barrier() == (1 << 20, 1 << 20)


def test_a_cache_in_either_form(tmp_path: Path, no_leaks: LeakCheck) -> None:
    for cache in (str(tmp_path), tmp_path, TensorCache(tmp_path)):
        with Server(port=0, cache=cache) as server, RawClient(server.port) as client:
            assert client.greeting[3] == 1


def test_brackets_around_an_address_are_taken_off() -> None:
    assert Server("[::1]", 0)._host == "::1"


def test_a_client_has_ten_seconds_for_hello_unless_told_otherwise() -> None:
    with Server(port=0) as server:
        assert server._hello_timeout == 10.0
    assert inspect.signature(Server).parameters["hello_timeout"].default == 10.0


def test_a_server_that_does_not_start_leaves_no_cache_directory(tmp_path: Path, no_leaks: LeakCheck) -> None:
    directory = tmp_path / "a" / "b"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = Server(port=taken.getsockname()[1], cache=directory)
        with pytest.raises(TransportError):
            server.start()
        assert list(tmp_path.iterdir()) == []
    with Server(port=0, cache=directory):
        assert directory.is_dir()
    assert directory.is_dir()
