from __future__ import annotations

from pathlib import Path

import pytest
from support.fakeverbs import ROCE_V1, ROCE_V2, FakeVerbs

import weightwire.rdma
from weightwire.errors import ConfigError, RdmaUnavailable, VerbsError
from weightwire.transport.devices import (
    address_gid,
    asks_for_a_device,
    check_environment,
    choose,
    device_addresses,
    list_devices,
)
from weightwire.transport.rdma import usable_address

PORT_DOWN = 1


def test_listing(fake: FakeVerbs) -> None:
    fake.set("devices", 2)
    devices = weightwire.rdma.devices()
    assert [device.name for device in devices] == ["fake0", "fake1"]
    assert devices[1].guid == "020000fffe000001"
    assert devices[0].transport == "ib"
    (port,) = devices[0].ports
    assert (port.number, port.state, port.link_layer) == (1, "active", "Ethernet")
    assert (port.mtu, port.max_mtu, port.speed) == (1024, 4096, 100.0)
    assert [(gid.index, gid.text, gid.type) for gid in port.gids] == [
        (0, "fe80::1", "RoCE v2"),
        (1, "::ffff:127.0.0.1", "RoCE v1"),
        (2, "::ffff:127.0.0.1", "RoCE v2"),
        (4, "::1", "RoCE v2"),
    ]
    assert fake.handles() == {}


@pytest.mark.parametrize("how", ["none", "ENOSYS"])
def test_no_device_is_an_empty_list(fake: FakeVerbs, how: str) -> None:
    if how == "none":
        fake.set("devices", 0)
    else:
        fake.fault("get_device_list:ENOSYS")
    assert list_devices() == []
    with pytest.raises(RdmaUnavailable, match="no RDMA device"):
        choose("127.0.0.1", {})


def test_types_from_sysfs_where_the_library_cannot_tell(fake: FakeVerbs, tmp_path: Path) -> None:
    fake.fault("query_gid_ex:EOPNOTSUPP")
    fake.sysfs(tmp_path)
    types = tmp_path / "ports" / "1" / "gid_attrs" / "types"
    types.mkdir(parents=True)
    (types / "1").write_text("IB/RoCE v1\n")
    (types / "2").write_text("RoCE v2\n")
    (port,) = list_devices()[0].ports
    types_by_index = {gid.index: gid.type for gid in port.gids}
    assert types_by_index == {0: "unknown", 1: "RoCE v1", 2: "RoCE v2", 4: "unknown"}
    assert choose("127.0.0.1", {}).gid.index == 2


@pytest.mark.parametrize("call", ["open_device", "query_device", "query_port", "query_gid_ex"])
def test_a_device_that_cannot_be_asked(fake: FakeVerbs, call: str) -> None:
    fake.fault(f"{call}:EIO")
    with pytest.raises(VerbsError) as caught:
        list_devices()
    assert caught.value.operation == f"ibv_{call}"
    if call != "query_device":
        with pytest.raises(RdmaUnavailable, match=f"ibv_{call}"):
            choose("127.0.0.1", {})
    assert fake.handles() == {}


@pytest.mark.parametrize(
    ("address", "raw"),
    [
        ("10.77.0.1", "00000000000000000000ffff0a4d0001"),
        ("::1", "00000000000000000000000000000001"),
        ("::ffff:10.77.0.1", "00000000000000000000ffff0a4d0001"),
        ("fe80::1%eth0", "fe800000000000000000000000000001"),
    ],
)
def test_address_as_gid(address: str, raw: str) -> None:
    assert address_gid(address).hex() == raw


def test_version_two_before_one(fake: FakeVerbs) -> None:
    choice = choose("127.0.0.1", {})
    assert (choice.device, choice.port, choice.gid.index, choice.gid.type) == ("fake0", 1, 2, "RoCE v2")
    assert choice.why == "GID 2 is the local address"
    fake.gid(2, None)
    assert choose("127.0.0.1", {}).gid.type == "RoCE v1"


def test_first_of_several(fake: FakeVerbs) -> None:
    fake.set("devices", 3)
    fake.gid(6, "127.0.0.1", ROCE_V2)
    assert (choose("127.0.0.1", {}).device, choose("127.0.0.1", {}).gid.index) == ("fake0", 2)
    assert choose("::1", {}).gid.index == 4


def test_the_environment_chooses(fake: FakeVerbs) -> None:
    fake.set("devices", 2)
    choice = choose("127.0.0.1", {"GGML_RDMA_DEV": "fake1"})
    assert (choice.device, choice.gid.index) == ("fake1", 2)
    assert choice.why == "GGML_RDMA_DEV names the device, GID 2 is the local address"
    choice = choose("192.0.2.1", {"GGML_RDMA_GID": "1"})
    assert (choice.device, choice.gid.index, choice.why) == ("fake0", 1, "GGML_RDMA_GID names it")
    choice = choose("192.0.2.1", {"GGML_RDMA_DEV": "fake1", "GGML_RDMA_GID": "0"})
    assert (choice.device, choice.gid.index) == ("fake1", 0)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"GGML_RPC_NO_RDMA": "1"}, "GGML_RPC_NO_RDMA is set"),
        ({"GGML_RDMA_DEV": "mlx5_0"}, "no RDMA device 'mlx5_0'"),
        ({"GGML_RDMA_GID": "x"}, "not an index"),
        ({"GGML_RDMA_GID": "-1"}, "not an index"),
        ({"GGML_RDMA_GID": "256"}, "not an index"),
        ({"GGML_RDMA_GID": "3"}, "no device has GID 3"),
        ({"GGML_RDMA_GID": "200"}, "no device has GID 200"),
    ],
)
def test_the_environment_rules_out(fake: FakeVerbs, environ: dict[str, str], reason: str) -> None:
    with pytest.raises(RdmaUnavailable) as caught:
        choose("127.0.0.1", environ)
    assert reason in caught.value.reason


def test_an_address_no_device_has(fake: FakeVerbs) -> None:
    with pytest.raises(RdmaUnavailable, match=r"no GID of fake0 is the local address 192\.0\.2\.1"):
        choose("192.0.2.1", {})


def test_a_port_that_is_down(fake: FakeVerbs) -> None:
    fake.set("port_state", PORT_DOWN)
    with pytest.raises(RdmaUnavailable) as caught:
        choose("127.0.0.1", {})
    assert caught.value.reason == "port 1 of fake0 is down"
    assert "interface up" in caught.value.hint
    assert device_addresses({}) == []


def test_a_reason_has_a_hint(fake: FakeVerbs) -> None:
    for environ in ({"GGML_RPC_NO_RDMA": ""}, {"GGML_RDMA_DEV": "mlx5_0"}, {"GGML_RDMA_GID": "200"}, {}):
        with pytest.raises(RdmaUnavailable) as caught:
            choose("192.0.2.1", environ)
        assert caught.value.hint, environ
    assert "127.0.0.1, ::1" in caught.value.hint
    fake.set("devices", 0)
    with pytest.raises(RdmaUnavailable) as caught:
        choose("192.0.2.1", {})
    assert caught.value.hint


# Addresses of this machine.


def test_addresses_that_a_device_leads_to(fake: FakeVerbs) -> None:
    """A GID need not be an address here: the table of a device in another network namespace, say."""
    fake.gid(5, "198.51.100.7", ROCE_V1)
    assert device_addresses({}) == ["127.0.0.1", "::1"]
    assert device_addresses({"GGML_RDMA_DEV": "fake0"}) == ["127.0.0.1", "::1"]
    assert device_addresses({"GGML_RDMA_DEV": "mlx5_0"}) == []
    fake.gid(4, None)
    assert device_addresses({}) == ["127.0.0.1"]
    fake.fault("open_device:EIO")
    assert device_addresses({}) == []


@pytest.mark.parametrize(
    ("addresses", "found"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["192.0.2.1", "::1"], "::1"),
        (["0.0.0.0"], "127.0.0.1"),
        (["::"], "127.0.0.1"),
    ],
)
def test_an_address_that_will_do(fake: FakeVerbs, addresses: list[str], found: str) -> None:
    assert usable_address(addresses, {}) == found
    assert fake.handles() == {}


def test_every_address_of_another_family(fake: FakeVerbs) -> None:
    """Who listens on 0.0.0.0 is not reached over IPv6."""
    fake.gid(1, None)
    fake.gid(2, None)
    assert usable_address(["::"], {}) == "::1"
    with pytest.raises(RdmaUnavailable):
        usable_address(["0.0.0.0"], {})


def test_no_address_will_do(fake: FakeVerbs) -> None:
    with pytest.raises(RdmaUnavailable) as caught:
        usable_address(["192.0.2.1", "192.0.2.2"], {})
    assert "192.0.2.1" in caught.value.reason
    assert "192.0.2.2" in caught.value.reason
    fake.fault("reg_mr:ENOMEM")
    with pytest.raises(RdmaUnavailable, match="no rings fit"):
        usable_address(["::"], {})
    assert fake.handles() == {}


# What the environment may say.


@pytest.mark.parametrize("value", ["abc", "-1", "1x", "256", " 1", "1.0", "١", "9" * 5000])
def test_an_index_that_is_none_anywhere(fake: FakeVerbs, value: str) -> None:
    with pytest.raises(ConfigError, match="environment variable GGML_RDMA_GID"):
        check_environment({"GGML_RDMA_GID": value})
    check_environment({"GGML_RDMA_GID": value, "GGML_RPC_NO_RDMA": ""})
    with pytest.raises(RdmaUnavailable, match="not an index"):
        choose("127.0.0.1", {"GGML_RDMA_GID": value})


@pytest.mark.parametrize("value", ["", "0", "3", "255", "007"])
def test_an_index_that_may_be_one(value: str) -> None:
    check_environment({"GGML_RDMA_GID": value})


def test_who_names_a_device_wants_to_know() -> None:
    assert asks_for_a_device({"GGML_RDMA_DEV": "mlx5_0"})
    assert asks_for_a_device({"GGML_RDMA_GID": "1"})
    assert not asks_for_a_device({"GGML_RDMA_GID": "", "OTHER": "1"})
    assert not asks_for_a_device({"GGML_RDMA_DEV": "mlx5_0", "GGML_RPC_NO_RDMA": "1"})


def test_version_one_alone_will_do(fake: FakeVerbs) -> None:
    fake.gid(5, "198.51.100.7", ROCE_V1)
    assert choose("198.51.100.7", {}).gid.index == 5
