"""The RDMA devices of this machine, and which of them leads to a peer."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from weightwire._native import _verbs
from weightwire.errors import ConfigError, RdmaUnavailable, VerbsError

__all__ = [
    "NO_RDMA",
    "Choice",
    "DeviceInfo",
    "Gid",
    "PortInfo",
    "address_gid",
    "asks_for_a_device",
    "check_environment",
    "choose",
    "device_addresses",
    "list_devices",
]

NO_RDMA: Final = "GGML_RPC_NO_RDMA"
_DEVICE: Final = "GGML_RDMA_DEV"
_GID: Final = "GGML_RDMA_GID"

_STATES: Final = ("none", "down", "initialising", "armed", "active", "active, deferred")
_ACTIVE: Final = 4
_LAYERS: Final = {1: "InfiniBand", 2: "Ethernet"}
_LANES: Final = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
_LANE_GBITS: Final = {1: 2.5, 2: 5.0, 4: 10.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0, 256: 200.0}
_GID_TYPES: Final = {-1: "unknown", 0: "IB", 1: "RoCE v1", 2: "RoCE v2"}
_ROCE_V2: Final = 2
# The index has eight bits in a queue pair's address.
_LAST_INDEX: Final = 255
_ONLY_PORT: Final = 1


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table: index, 16 bytes, and type ("RoCE v2", "RoCE v1", "IB", "unknown")."""

    index: int
    raw: bytes
    type: str

    @property
    def text(self) -> str:
        """As an IPv6 address; one that stands for an IPv4 address as ``::ffff:10.0.0.1``."""
        return gid_text(self.raw)


@dataclass(frozen=True, slots=True)
class PortInfo:
    """A port: its number (from 1), state ("active"), link layer, MTUs in bytes, speed in Gbit/s, and GID table."""

    number: int
    state: str
    link_layer: str
    mtu: int
    max_mtu: int
    speed: float
    gids: tuple[Gid, ...]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device: its name, node GUID (16 hex digits), transport ("ib", also for RoCE, or "iwarp") and ports."""

    name: str
    guid: str
    transport: str
    ports: tuple[PortInfo, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The device, port and GID that a connection uses, its path MTU (an ``enum ibv_mtu`` value), and why these."""

    device: str
    port: int
    gid: Gid
    mtu: int
    why: str


def gid_text(raw: bytes) -> str:
    """16 bytes as an IPv6 address."""
    address = ipaddress.IPv6Address(raw)
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)


def mtu_bytes(value: int) -> int:
    """Bytes of an ``enum ibv_mtu`` value: 1 is 256, 5 is 4096."""
    return 128 << value if 1 <= value <= 5 else 0


def address_gid(address: str) -> bytes:
    """The GID that stands for an IP address, 16 bytes: IPv4 as ``::ffff:a.b.c.d``. ValueError for no address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv4Address):
        return bytes(10) + b"\xff\xff" + parsed.packed
    return parsed.packed


def list_devices() -> list[DeviceInfo]:
    """Every device with its ports and GIDs; none where the kernel has no RDMA.

    Raises ``RdmaUnavailable`` without libibverbs, ``VerbsError`` for a device that cannot be asked.
    """
    return [_describe(device) for device in _verbs.devices()]


def check_environment(environ: Mapping[str, str]) -> None:
    """ConfigError for a variable of RDMA that can mean nothing on any machine; where RDMA is off, none is looked at."""
    text = environ.get(_GID, "")
    if NO_RDMA not in environ and text and _index(text) is None:
        raise ConfigError(
            f"environment variable {_GID}: {text!r} is not an index from 0 to {_LAST_INDEX}",
            hint=f"correct or unset {_GID}; see docs/configuration.md",
        )


def asks_for_a_device(environ: Mapping[str, str]) -> bool:
    """Whether somebody has named a device or a GID, and so will want to know that it is not used."""
    return NO_RDMA not in environ and any(environ.get(name) for name in (_DEVICE, _GID))


def device_addresses(environ: Mapping[str, str]) -> list[str]:
    """The addresses of this machine that a device leads to, those of the loopback interface first."""
    found: dict[str, None] = {}
    with contextlib.suppress(RdmaUnavailable, VerbsError):
        for device in list_devices():
            if environ.get(_DEVICE, "") in ("", device.name):
                for port in device.ports:
                    if (port.number, port.state) == (_ONLY_PORT, _STATES[_ACTIVE]):
                        found.update(dict.fromkeys(gid.text.removeprefix("::ffff:") for gid in port.gids))
    local = [named for address in found for named in _local(address)]
    return sorted(local, key=lambda address: not ipaddress.ip_address(address.partition("%")[0]).is_loopback)


def _local(address: str) -> Iterator[str]:
    """``address`` if it is one of this machine's, with its zone where it needs one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    zones = [""]
    if family == socket.AF_INET6 and ipaddress.IPv6Address(address).is_link_local:
        zones = [f"%{name}" for _, name in socket.if_nameindex()]
    for zone in zones:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(socket.getaddrinfo(address + zone, 0, family, socket.SOCK_DGRAM, 0, socket.AI_NUMERICHOST)[0][4])
            yield address + zone


def choose(address: str, environ: Mapping[str, str]) -> Choice:
    """The device and GID for a connection whose local address is ``address``: those whose GID is this very address,
    RoCE v2 before v1, on port 1.

    ``GGML_RDMA_DEV`` names the device, ``GGML_RDMA_GID`` the index of a GID, which then need not be the address;
    ``GGML_RPC_NO_RDMA`` turns RDMA off. Raises ``RdmaUnavailable`` with the reason. Source: docs/protocol.md,
    section 8.
    """
    if NO_RDMA in environ:
        raise _none(f"{NO_RDMA} is set", f"unset {NO_RDMA}")
    wanted = environ.get(_DEVICE, "")
    index = _forced_index(environ.get(_GID, ""))
    devices = _verbs.devices()
    if not devices:
        raise _none("this machine has no RDMA device", "'rdma link' lists those that the kernel knows")
    if wanted:
        names = ", ".join(device.name for device in devices)
        devices = [device for device in devices if device.name == wanted]
        if not devices:
            raise _none(f"there is no RDMA device {wanted!r}, which {_DEVICE} names", f"there is {names}")
    passed: list[str] = []
    found: list[Choice] = []
    for device in devices:
        try:
            found += _candidates(device, address_gid(address), index)
        except VerbsError as error:
            passed.append(error.detail)
        except _Unfit as unfit:
            passed.append(str(unfit))
    if not found and len(passed) == len(devices):
        raise _none("; ".join(passed), "is the device's network interface up?")
    if not found:
        names = ", ".join(device.name for device in devices)
        which = f"GID of {names} is the local address {address}" if index is None else f"device has GID {index}"
        raise _none(f"no {which}" + (f" ({'; '.join(passed)})" if passed else ""), _addresses_hint(environ))
    best = min(found, key=lambda choice: choice.gid.type != _GID_TYPES[_ROCE_V2])
    why = f"GID {best.gid.index} is the local address" if index is None else f"{_GID} names it"
    if wanted:
        why = f"{_DEVICE} names the device, {why}"
    return Choice(best.device, best.port, best.gid, best.mtu, why)


class _Unfit(Exception):
    """Why a device is passed over."""


def _none(reason: str, hint: str) -> RdmaUnavailable:
    return RdmaUnavailable(f"RDMA cannot be used: {reason}", reason=reason, hint=hint)


def _addresses_hint(environ: Mapping[str, str]) -> str:
    addresses = device_addresses(environ)
    return (
        f"both ends must use the device's network: here its addresses are {', '.join(addresses)}"
        if addresses
        else "no address of this machine is a device's: give the device's network interface one"
    )


def _index(text: str) -> int | None:
    fits = text.isascii() and text.isdigit() and len(text) <= 3 and int(text) <= _LAST_INDEX
    return int(text) if fits else None


def _forced_index(text: str) -> int | None:
    if not text:
        return None
    index = _index(text)
    if index is None:
        raise _none(f"{_GID}={text!r} is not an index from 0 to {_LAST_INDEX}", f"correct or unset {_GID}")
    return index


def _candidates(device: _verbs.Device, gid: bytes, index: int | None) -> list[Choice]:
    with _verbs.Context(device) as context:
        state, mtu, _, _, _, _, count = context.port(_ONLY_PORT)
        if state != _ACTIVE:
            raise _Unfit(f"port {_ONLY_PORT} of {device.name} is {_state(state)}")
        found = []
        for entry in _gids(context, _ONLY_PORT, min(count, _LAST_INDEX + 1), index):
            if index is not None or entry.raw == gid:
                found.append(Choice(device.name, _ONLY_PORT, entry, mtu, ""))
        return found


def _gids(context: _verbs.Context, port: int, count: int, only: int | None = None) -> Iterator[Gid]:
    for index in range(count) if only is None else range(only, min(only + 1, count)):
        entry = context.gid(port, index)
        if entry is not None:
            yield Gid(index, entry[0], _GID_TYPES.get(entry[1], "unknown"))


def _state(value: int) -> str:
    return _STATES[value] if 0 <= value < len(_STATES) else f"in state {value}"


def _describe(device: _verbs.Device) -> DeviceInfo:
    with _verbs.Context(device) as context:
        ports = tuple(_port(context, number) for number in range(1, context.port_count + 1))
    return DeviceInfo(device.name, device.guid, device.transport, ports)


def _port(context: _verbs.Context, number: int) -> PortInfo:
    state, mtu, max_mtu, layer, width, speed, count = context.port(number)
    return PortInfo(
        number=number,
        state=_state(state),
        link_layer=_LAYERS.get(layer, "unknown"),
        mtu=mtu_bytes(mtu),
        max_mtu=mtu_bytes(max_mtu),
        speed=_LANES.get(width, 0) * _LANE_GBITS.get(speed, 0.0),
        gids=tuple(_gids(context, number, count)),
    )
