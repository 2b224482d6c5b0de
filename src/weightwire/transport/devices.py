"""The RDMA devices of this machine, and which of them leads to a peer."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from weightwire._native import _verbs
from weightwire.errors import RdmaUnavailable, VerbsError

__all__ = ["Choice", "DeviceInfo", "Gid", "PortInfo", "address_gid", "choose", "list_devices"]

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


def choose(address: str, environ: Mapping[str, str]) -> Choice:
    """The device and GID for a connection whose local address is ``address``: those whose GID is this very address,
    RoCE v2 before v1, on port 1.

    ``GGML_RDMA_DEV`` names the device, ``GGML_RDMA_GID`` the index of a GID, which then need not be the address;
    ``GGML_RPC_NO_RDMA`` turns RDMA off. Raises ``RdmaUnavailable`` with the reason. Source: docs/protocol.md,
    section 8.
    """
    if "GGML_RPC_NO_RDMA" in environ:
        raise _none("GGML_RPC_NO_RDMA is set")
    wanted = environ.get("GGML_RDMA_DEV", "")
    index = _forced_index(environ.get("GGML_RDMA_GID", ""))
    devices = _verbs.devices()
    if not devices:
        raise _none("this machine has no RDMA device")
    if wanted:
        devices = [device for device in devices if device.name == wanted]
        if not devices:
            raise _none(f"there is no RDMA device {wanted!r}, which GGML_RDMA_DEV names")
    passed: list[str] = []
    found: list[Choice] = []
    for device in devices:
        try:
            found += _candidates(device, address_gid(address), index)
        except VerbsError as error:
            passed.append(error.detail)
        except _Unfit as unfit:
            passed.append(str(unfit))
    if not found:
        names = ", ".join(device.name for device in devices)
        which = f"GID of {names} is the local address {address}" if index is None else f"device has GID {index}"
        raise _none(f"no {which}" + (f" ({'; '.join(passed)})" if passed else ""))
    best = min(found, key=lambda choice: choice.gid.type != _GID_TYPES[_ROCE_V2])
    why = f"GID {best.gid.index} is the local address" if index is None else "GGML_RDMA_GID names it"
    if wanted:
        why = f"GGML_RDMA_DEV names the device, {why}"
    return Choice(best.device, best.port, best.gid, best.mtu, why)


class _Unfit(Exception):
    """Why a device is passed over."""


def _none(reason: str) -> RdmaUnavailable:
    return RdmaUnavailable(f"RDMA cannot be used: {reason}", reason=reason)


def _forced_index(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) <= _LAST_INDEX):
        raise _none(f"GGML_RDMA_GID={text!r} is not an index from 0 to {_LAST_INDEX}")
    return int(text)


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
