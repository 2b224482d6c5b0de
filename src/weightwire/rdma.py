"""``weightwire.rdma.devices()``: the RDMA devices of this machine."""

from __future__ import annotations

from weightwire.transport.devices import DeviceInfo, Gid, PortInfo, list_devices

__all__ = ["DeviceInfo", "Gid", "PortInfo", "devices"]


def devices() -> list[DeviceInfo]:
    """The RDMA devices of this machine, with ports, speeds, MTUs and GID tables; an empty list where there are none.

    Raises ``RdmaUnavailable`` where libibverbs is missing or weightwire was built without RDMA, ``VerbsError`` for a
    device that cannot be asked.
    """
    return list_devices()
