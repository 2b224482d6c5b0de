"""The capabilities in HELLO, by which two peers agree on RDMA. Source: docs/protocol.md, section 8."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from weightwire.errors import ProtocolError
from weightwire.wire.hello import CAPS_BYTES, NO_CAPS
from weightwire.wire.tensor import Readable

__all__ = ["PSN_MASK", "RdmaCaps"]

PSN_MASK: Final = 0xFFFFFF
"""A packet sequence number has 24 bits."""

_LAYOUT: Final = struct.Struct("<II16s")


@dataclass(frozen=True, slots=True)
class RdmaCaps:
    """What a peer's RC queue pair is addressed by: its number, and the GID (16 bytes) of the port it stands on.

    The first packet sequence number follows from the number, as in every ggml peer of the Linux layout.
    """

    number: int
    gid: bytes

    @property
    def psn(self) -> int:
        """Sequence number of the first packet the queue pair sends."""
        return self.number & PSN_MASK

    def encode(self) -> bytes:
        """The 24 bytes: qpn u32, psn u32, gid. ValueError if a field does not fit."""
        if len(self.gid) != 16:
            raise ValueError(f"a GID has 16 bytes, not {len(self.gid)}")
        if not 0 < self.number <= 0xFFFFFFFF:
            raise ValueError(f"{self.number} is no queue pair number")
        return _LAYOUT.pack(self.number, self.psn, self.gid)

    @classmethod
    def decode(cls, caps: Readable) -> RdmaCaps | None:
        """What the peer offers, or ``None`` for 24 zero bytes: it stays on TCP.

        ProtocolError for capabilities of another layout: nothing tags them, but in ours the sequence number is the low
        24 bits of the queue pair's, and Apple's has other fields there.
        """
        if len(caps) != CAPS_BYTES:
            raise ProtocolError(f"connection capabilities are {CAPS_BYTES} bytes, not {len(caps)}")
        raw = bytes(caps)
        if raw == NO_CAPS:
            return None
        number, psn, gid = _LAYOUT.unpack(raw)
        if number == 0 or psn != number & PSN_MASK:
            raise ProtocolError(
                f"the peer offers RDMA in another layout than RC over RoCE (qpn {number:#x}, psn {psn:#x})",
                hint="Apple's Thunderbolt RDMA looks so; it is not spoken here",
            )
        if not any(gid):
            raise ProtocolError(f"the peer offers queue pair {number:#x} without a GID")
        return cls(number, gid)
