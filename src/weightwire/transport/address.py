"""Endpoints as text: ``host:port``, ``[::1]:50052``, ``[fe80::1%eth0]:50052``, or a host alone."""

from __future__ import annotations

import ipaddress
import re
import socket

from weightwire.errors import ConfigError

__all__ = ["DEFAULT_PORT", "format_endpoint", "format_sockaddr", "parse_endpoint"]

DEFAULT_PORT = 50052

_FORMS = "write HOST:PORT or [IPV6]:PORT, such as server:50052 or [::1]:50052"
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host (no brackets) and port of an endpoint; ``default_port`` where the text names none.

    Raises ``ConfigError`` for anything else: an empty host, a port that is no number from 1 to 65535, an IPv6 address
    without brackets but with a port.
    """
    if not isinstance(text, str):
        raise ConfigError(f"endpoint {text!r}: it is no text", hint=_FORMS)
    given = text
    text = text.strip()
    if "://" in text:
        raise ConfigError(f"endpoint {given!r}: that is a URL, and only host and port are wanted", hint=_FORMS)
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed:
            raise ConfigError(f"endpoint {given!r}: no ] after the address", hint=_FORMS)
        if rest and not rest.startswith(":"):
            raise ConfigError(f"endpoint {given!r}: {rest!r} after the ]", hint=_FORMS)
        _check_ipv6(host, given)
        return host, _port(rest[1:], given) if rest else default_port
    if text.count(":") > 1:
        _check_ipv6(text, given)
        return text, default_port
    host, colon, port = text.partition(":")
    if not host:
        raise ConfigError(f"endpoint {given!r}: no host", hint=_FORMS)
    if not _is_host(host):
        raise ConfigError(f"endpoint {given!r}: {host!r} is not a host name or address", hint=_FORMS)
    return host, _port(port, given) if colon else default_port


def format_endpoint(host: str, port: int) -> str:
    """``host:port``, with brackets where the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def format_sockaddr(address: object) -> str:
    """The endpoint of a socket's address as the ``socket`` module gives it; empty text for one that is not IP.

    An IPv6 address that means something on one network only (its scope id, ipv6(7), is not 0) gets that network's
    interface as its zone, so that the text can be connected to.
    """
    if not isinstance(address, tuple):
        return ""
    host, port = str(address[0]), int(address[1])
    scope = int(address[3]) if len(address) > 3 else 0
    if scope and "%" not in host:
        try:
            host += f"%{socket.if_indextoname(scope)}"
        except OSError:
            host += f"%{scope}"  # the interface has gone; its number is all that is left of it
    return format_endpoint(host, port)


def _is_host(host: str) -> bool:
    if host.isascii():
        return len(host) <= 253 and _NAME.fullmatch(host) is not None
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def _check_ipv6(host: str, given: str) -> None:
    address, percent, zone = host.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        what = "is not an IPv6 address"
        if "[" not in given and address.rpartition(":")[2].isdigit():
            what += "; one with a port needs brackets"
        raise ConfigError(f"endpoint {given!r}: {address!r} {what}", hint=_FORMS) from None
    if percent and not re.fullmatch(r"[^\s%/\]]+", zone):
        raise ConfigError(f"endpoint {given!r}: {zone!r} is not the name of a network interface", hint=_FORMS)


def _port(text: str, given: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise ConfigError(f"endpoint {given!r}: {text!r} is not a port (1 to 65535)", hint=_FORMS)
    return int(text)
