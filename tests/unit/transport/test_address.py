from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import ConfigError
from weightwire.transport.address import format_endpoint, format_sockaddr, parse_endpoint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server:50052", ("server", 50052)),
        ("server", ("server", 50052)),
        (" gpu-1.example.org:1 ", ("gpu-1.example.org", 1)),
        ("under_score.local.", ("under_score.local.", 50052)),
        ("10.0.0.7:65535", ("10.0.0.7", 65535)),
        ("[::1]:50052", ("::1", 50052)),
        ("[::1]", ("::1", 50052)),
        ("::1", ("::1", 50052)),
        ("[2001:db8::7]:9", ("2001:db8::7", 9)),
        ("[::ffff:10.0.0.1]:9", ("::ffff:10.0.0.1", 9)),
        ("[fe80::1%eth0]:50052", ("fe80::1%eth0", 50052)),
        ("fe80::1%br-lan.7", ("fe80::1%br-lan.7", 50052)),
        ("bücher.example:7", ("bücher.example", 7)),
    ],
)
def test_what_is_read(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text) == expected


def test_the_default_port_is_the_callers() -> None:
    assert parse_endpoint("server", 7) == ("server", 7)
    assert parse_endpoint("[::1]", 7) == ("::1", 7)
    assert parse_endpoint("::1", 7) == ("::1", 7)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no host"),
        ("   ", "no host"),
        (":50052", "no host"),
        ("server:", "not a port"),
        ("server:x", "not a port"),
        ("server:0", "not a port"),
        ("server:65536", "not a port"),
        ("server:-1", "not a port"),
        ("server:5٠", "not a port"),
        ("server:" + "9" * 5000, "not a port"),
        ("server: 5", "not a port"),
        ("[::1", "no ]"),
        ("[::1]50052", "after the ]"),
        ("[::1]:", "not a port"),
        ("[]:5", "not an IPv6 address"),
        ("[server]:5", "not an IPv6 address"),
        ("::1:50052:", "not an IPv6 address"),
        ("a:b:c", "not an IPv6 address"),
        ("[fe80::1%]:5", "network interface"),
        ("[fe80::1%e th]:5", "network interface"),
        ("tcp//server", "not a host"),
        ("http://server", "a URL"),
        ("http://127.0.0.1:51000", "a URL"),
        ("::1:51000", "one with a port needs brackets"),
        ("ser ver:5", "not a host"),
        ("-dash:5", "not a host"),
        ("a" * 300, "not a host"),
        ("ü" * 70, "not a host"),
        ("nul\0:5", "not a host"),
    ],
)
def test_what_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        parse_endpoint(text)
    assert "HOST:PORT" in caught.value.hint


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_as_a_config_error(text: str) -> None:
    try:
        host, port = parse_endpoint(text)
    except ConfigError:
        return
    assert host
    assert 1 <= port <= 65535


@given(st.ip_addresses(), st.integers(1, 65535))
def test_round_trip(address: object, port: int) -> None:
    assert parse_endpoint(format_endpoint(str(address), port)) == (str(address), port)


def test_format() -> None:
    assert format_endpoint("server", 1) == "server:1"
    assert format_endpoint("fe80::1%eth0", 1) == "[fe80::1%eth0]:1"


def test_socket_addresses() -> None:
    assert format_sockaddr(("192.0.2.1", 7)) == "192.0.2.1:7"
    assert format_sockaddr(("::1", 7, 0, 0)) == "[::1]:7"
    assert format_sockaddr("/run/socket") == ""
    assert format_sockaddr(b"\0abstract") == ""


@pytest.mark.parametrize("number", [index for index, _ in socket.if_nameindex()])
def test_a_socket_address_with_a_zone_names_the_interface(number: int) -> None:
    text = format_sockaddr(("fe80::7", 9, 0, number))
    assert text == f"[fe80::7%{socket.if_indextoname(number)}]:9"
    assert parse_endpoint(text) == (f"fe80::7%{socket.if_indextoname(number)}", 9)


def test_a_zone_without_an_interface_is_its_number() -> None:
    gone = (1 << 31) - 1
    with pytest.raises(OSError):
        socket.if_indextoname(gone)
    assert format_sockaddr(("fe80::7", 9, 0, gone)) == f"[fe80::7%{gone}]:9"
