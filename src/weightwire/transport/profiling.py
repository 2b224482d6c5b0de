"""The clock of one connection and what is counted beside it; what both sides make their `LoadProfile` of."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Final

from weightwire._native import _profile
from weightwire.profile import CommandStat, LoadProfile, Stage
from weightwire.wire.commands import Command

if TYPE_CHECKING:
    from weightwire.transport.base import ByteStream

__all__ = ["LoadRecorder", "print_profile"]

assert (len(Stage), Stage.ALLOC) == (_profile.STAGES, _profile.INSIDE)

_NAMES: Final = {int(command): command.name for command in Command}
_SETTING: Final = ("SET_TENSOR", "SET_TENSOR_2D")
_NO_COUNTS: Final = {
    "receives": 0,
    "direct_bytes": 0,
    "copied_bytes": 0,
    "copies": 0,
    "high_water": 0,
    "window_full": 0,
}


class LoadRecorder(_profile.Profile):
    """Counts what happens on one connection. ``switch`` and the other methods of the clock are the core's: a stage is
    entered and left by a pair of calls and not a ``with`` block, which would allocate even where the clock is off.

    The attributes are plain sums that whoever sees something adds to; they count whether the clock is on or not.
    """

    def __init__(self, side: str = "client", on: bool = True) -> None:
        super().__init__(on)
        self.side = side
        self.set_tensor_bytes = 0
        self.hits = 0
        self.misses = 0
        self.corrupt_hits = 0
        self.bytes_saved = 0
        self.copies = 0
        self.copied_bytes = 0
        self.hash_thread_ns = 0
        self._limits = (0, 0, 0)
        self._stream: ByteStream | None = None

    def watch(self, stream: ByteStream) -> None:
        """``stream`` is what carries the connection from here on; it tells the clock when it waits."""
        self._stream = stream
        stream.profile = self

    def sample(self) -> None:
        """Take down what the kernel says of the connection, before it is closed."""
        if self.on and self._stream is not None:
            self._limits = self._stream.send_limits() or self._limits

    def profile(self) -> LoadProfile:
        """Everything up to now: times within the span up to the last mark."""
        stream = self._stream
        counts = _NO_COUNTS if stream is None else getattr(stream, "counts", _NO_COUNTS)
        spent = self.spent()
        commands = {_NAMES[number]: CommandStat(*stat) for number, stat in self.commands().items() if number in _NAMES}
        copies, copied = self.copies + counts["copies"], self.copied_bytes + counts["copied_bytes"]
        if self.side == "server" and stream is not None and stream.kind == "rdma":
            # What comes in is copied out of its ring.
            copies, copied = copies + counts["receives"], copied + stream.bytes_received
        return LoadProfile(
            side=self.side,
            peer="" if stream is None else stream.endpoint,
            transport="tcp" if stream is None else stream.kind,
            device=getattr(stream, "details", {}).get("device"),
            send_depth=counts["high_water"],
            measured=self.on,
            set_tensor_calls=sum(commands[name].count for name in _SETTING if name in commands),
            set_tensor_bytes=self.set_tensor_bytes,
            span_ns=sum(spent[: Stage.ALLOC]),
            read_ns=spent[Stage.READ],
            hash_ns=spent[Stage.HASH],
            ask_ns=spent[Stage.ASK],
            staging_ns=spent[Stage.STAGING],
            wire_ns=spent[Stage.WIRE],
            wait_ns=spent[Stage.WAIT] + spent[Stage.BLOCKED],
            gap_ns=spent[Stage.GAP],
            blocked_ns=spent[Stage.BLOCKED],
            alloc_ns=spent[Stage.ALLOC],
            verify_ns=spent[Stage.VERIFY],
            index_ns=spent[Stage.INDEX],
            hash_thread_ns=self.hash_thread_ns if self.on else 0,
            hits=self.hits,
            misses=self.misses,
            corrupt_hits=self.corrupt_hits,
            bytes_saved=self.bytes_saved,
            copies=copies,
            copied_bytes=copied,
            direct_bytes=counts["direct_bytes"],
            window_full=counts["window_full"],
            busy_ns=self._limits[0],
            peer_limited_ns=self._limits[1],
            buffer_limited_ns=self._limits[2],
            commands=commands,
        )


def print_profile(profile: LoadProfile) -> None:
    """Write ``profile`` to stderr, in one go, if anything was loaded. A stderr that is gone is no reason to fail."""
    if not profile.loaded:
        return
    text = "\n".join(profile.lines()) + "\n"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        try:
            sys.stderr.write(text)
        except UnicodeEncodeError:
            sys.stderr.write(text.encode("ascii", "backslashreplace").decode("ascii"))
        sys.stderr.flush()
