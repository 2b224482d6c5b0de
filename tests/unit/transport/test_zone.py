"""Link-local addresses: the zone that says which network is meant is in every text that names one."""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.require import do_without

from weightwire import Server, connect
from weightwire.errors import TransportError
from weightwire.transport.tcp import TcpStream, connect_tcp, listen_tcp

TREE = Path(__file__).resolve().parents[3]


def link_local() -> str | None:
    """A usable link-local address of this machine with its zone, from proc_net_if_inet6(5): hex, index, prefix length,
    scope, flags, interface.
    """
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, _, _, zone = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            continue
        with socket.socket(socket.AF_INET6) as probe:
            try:
                probe.bind((str(address), 0, 0, socket.if_nametoindex(zone)))
            except OSError:
                continue
        return f"{address}%{zone}"
    return None


# Not `do_without`: whether a machine has one is its network's business; the last test here makes one.
@pytest.fixture
def host() -> str:
    found = link_local()
    if found is None:
        pytest.skip("no interface of this machine has a usable link-local IPv6 address")
    return found


@pytest.fixture
def listener(host: str) -> Iterator[socket.socket]:
    (made,) = listen_tcp(host, 0)
    with made:
        yield made


def test_a_servers_endpoint_can_be_connected_to(host: str) -> None:
    with Server(host, 0) as server:
        (endpoint,) = server.endpoints
        assert endpoint == f"[{host}]:{server.port}"
        with connect(endpoint, timeout=20) as connection:
            assert connection.endpoint == endpoint
            assert connection.transport["peer"] == endpoint
            assert re.fullmatch(rf"\[{re.escape(host)}\]:\d+", str(connection.transport["local"]))
            assert connection.device_count() == 1


def test_a_stream_names_its_peer_with_the_zone(host: str, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with connect_tcp(f"[{host}]:{port}", 20):
        accepted, peer = listener.accept()
        with TcpStream(accepted) as stream:
            assert stream.endpoint == f"[{host}]:{peer[1]}"


def test_a_failure_to_connect_names_the_zone(host: str) -> None:
    with socket.socket(socket.AF_INET6) as closed:
        address, _, zone = host.partition("%")
        closed.bind((address, 0, 0, socket.if_nametoindex(zone)))  # and does not listen
        port = closed.getsockname()[1]
        with pytest.raises(TransportError) as caught:
            connect_tcp(f"[{host}]:{port}", 20)
    # What was asked for is the address that was tried: it is named once, with its zone.
    assert caught.value.detail == f"could not connect to [{host}]:{port}: Connection refused"


def test_a_failure_to_listen_names_the_zone(host: str, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(TransportError, match="cannot listen") as caught:
        listen_tcp(host, port)
    assert f"[{host}]:{port}" in caught.value.detail


def test_all_of_it_in_a_network_of_its_own() -> None:
    """For machines without such an address: the other tests again, where loopback has been given one."""
    network = ["unshare", "--user", "--map-root-user", "--net", "sh", "-ec"]
    address = "ip link set lo up; ip address add fe80::7731/64 dev lo nodad"
    try:
        made = subprocess.run([*network, address], capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        do_without("a network of its own", "there is no unshare here")
    if made.returncode:
        do_without("a network of its own", made.stderr.strip())
    again = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not network_of_its_own", __file__]
    script = f'{address}; exec "$@"'
    done = subprocess.run(
        [*network, script, "sh", *again], capture_output=True, text=True, check=False, timeout=100, cwd=TREE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^4 passed, 1 deselected", done.stdout, re.MULTILINE), done.stdout
