"""Devices that are removed while they are used. Run by pytest inside the guest, after everything else: see
tests/rdma/test_guest.py."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
from support.ends import tcp_ends
from support.guest import ADDRESS, ServeProcess
from support.leaks import LeakCheck
from support.rdma import connect_rdma, request

import weightwire
import weightwire.rdma
from weightwire.errors import CompletionError, TransferTimeout, VersionError
from weightwire.transport.registration import CHUNK

MIB = 1 << 20
PATIENCE = 120.0


def no_device_is_left() -> None:
    deadline = time.monotonic() + PATIENCE
    while weightwire.rdma.devices():
        assert time.monotonic() < deadline, "the device is still listed"
        time.sleep(0.1)


def add_device() -> None:
    subprocess.run(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "veth0"], check=True, timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE
    wanted = f"::ffff:{ADDRESS}"
    while not any(gid.text == wanted for device in weightwire.rdma.devices() for gid in device.ports[0].gids):
        assert time.monotonic() < deadline, "the device did not come back"
        time.sleep(0.1)
    subprocess.run("chmod 666 /dev/infiniband/*", shell=True, check=True)


def test_a_device_that_is_deleted_under_connections(no_leaks: LeakCheck) -> None:
    """The kernel waits for those who use it, and they go on; whoever comes anew finds no device."""
    payload = os.urandom(MIB)
    with weightwire.Server(ADDRESS, 0, transport="rdma") as server, weightwire.Server(ADDRESS, 0) as other:
        connections = [weightwire.connect(server.endpoints[0], transport="rdma") for _ in range(3)]
        regions = [connection.register(payload) for connection in connections]
        assert all(region.pinned for region in regions)
        deleting = subprocess.Popen(["rdma", "link", "delete", "rxe0"])
        try:
            no_device_is_left()
            for connection in connections:
                pushed = connection.push({"w": memoryview(payload)}, verify=True)
                assert pushed.summary.profile.direct_bytes >= MIB - 4096
            with weightwire.connect(other.endpoints[0]) as late:
                assert late.transport["reason"] == "this machine has no RDMA device"
            with pytest.raises(VersionError, match="requires RDMA, which was not offered"):
                weightwire.connect(server.endpoints[0])
            assert deleting.poll() is None, "it did not wait"
            for connection in connections:
                connection.close()
        finally:
            for connection in connections:
                connection.close()
            server.close()
            # With the last of them the device goes.
            assert deleting.wait(PATIENCE) == 0
            add_device()


def test_a_serving_process_that_ends_lets_the_device_go() -> None:
    server = ServeProcess("--transport", "rdma")
    with weightwire.connect(server.endpoint, transport="rdma") as connection:
        connection.barrier()
        deleting = subprocess.Popen(["rdma", "link", "delete", "rxe0"])
        no_device_is_left()
        connection.barrier()
    server.stop()
    assert deleting.wait(PATIENCE) == 0
    add_device()


def test_an_interface_that_is_removed() -> None:
    """The last one: afterwards there is no device."""
    client, server = connect_rdma(*tcp_ends(ADDRESS))
    client.send(request(1, b""))
    assert server.recv(9) == request(1, b"")
    removing = subprocess.Popen(["ip", "link", "delete", "veth0"])
    time.sleep(1)
    client.timeout = server.timeout = 30.0
    with pytest.raises(CompletionError) as caught:
        client.send(request(6, bytes(40 * (CHUNK + 13))))
    print(caught.value)
    with pytest.raises(CompletionError):
        client.recv(1)
    client.close()
    # With its address gone, the end of the TCP connection does not arrive either: the deadline is what is left.
    with pytest.raises(TransferTimeout):
        server.recv_or_eof(1, timeout=1.0)
    server.close()
    assert removing.wait(PATIENCE) == 0
    no_device_is_left()
