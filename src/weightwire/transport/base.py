"""What every transport offers: whole messages over one ordered stream of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from weightwire._native._sentinel import UNSET, Unset

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from weightwire._native._profile import Profile
    from weightwire.ranges import FileRange

__all__ = ["UNSET", "ByteStream", "Unset"]


@runtime_checkable
class ByteStream(Protocol):
    """An ordered, reliable stream of bytes to one peer.

    ``timeout`` is the longest time in seconds without progress, ``None`` for ever; each receiving call can override it.
    One thread may send while another receives. Every method but ``peer_gone``, ``peek``, ``shutdown`` and ``close``
    raises ``PeerClosed`` (with ``.position`` "before" or "inside" the message and ``.bytes_done``), ``TransferTimeout``
    (with ``.phase`` "send" or "receive"), or ``TransportError``; after any of these the stream stands somewhere inside
    a message: close it.
    Wherever bytes go in, any contiguous buffer does (``ValueError`` otherwise).
    """

    @property
    def kind(self) -> str:
        """``"tcp"``, or what else carries the bytes."""

    @property
    def endpoint(self) -> str:
        """The peer, as ``host:port``."""

    @property
    def timeout(self) -> float | None:
        """Longest time without progress in seconds; ``None``: for ever."""

    @timeout.setter
    def timeout(self, value: float | None) -> None: ...

    @property
    def bytes_sent(self) -> int:
        """Bytes that have left so far."""

    @property
    def bytes_received(self) -> int:
        """Bytes that have arrived so far."""

    @property
    def profile(self) -> Profile | None:
        """What is told when the stream waits for the peer; assigned once (``ValueError`` after that)."""

    @profile.setter
    def profile(self, value: Profile) -> None: ...

    @property
    def watcher(self) -> Callable[[], object] | None:
        """What is called some ten times a second while a call waits for the peer, or None.

        What it raises ends the call, with the stream somewhere inside a message.
        """

    @watcher.setter
    def watcher(self, value: Callable[[], object] | None) -> None: ...

    def send_limits(self) -> tuple[int, int, int] | None:
        """Nanoseconds so far with data to send; of those, with the peer's window closed; with the send buffer full.

        None where the transport cannot tell. Never raises.
        """

    def send(self, *parts: Buffer) -> None:
        """Sends the bytes of all parts in order, without copying them together."""

    def send_range(self, head: Sequence[Buffer], source: FileRange) -> None:
        """Sends the parts of ``head``, then the range of the file.

        Raises ``ModelError`` where the file has become shorter than the range.
        """

    def recv_into(self, view: Buffer, *, timeout: float | Unset | None = UNSET) -> None:
        """Fills a writable contiguous buffer to its last byte (``TypeError`` for any other)."""

    def recv(self, nbytes: int, *, timeout: float | Unset | None = UNSET) -> bytes:
        """Exactly ``nbytes`` bytes; meant for headers and answers, not for tensors."""

    def recv_or_eof(self, nbytes: int, *, timeout: float | Unset | None = UNSET) -> bytes | None:
        """Exactly ``nbytes`` bytes, or ``None`` where the stream ended in good order before the first of them.

        It also ends so when ``shutdown`` is called on this side.
        """

    def peer_gone(self) -> bool:
        """Whether the stream has ended: the peer closed or reset it, or this side did.

        As far as is known now, whatever has arrived and not been received: it takes no bytes, never waits, never
        raises. For one who does something else for long between two messages.
        """

    def peek(self, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes that have arrived, without taking them; ``b""`` if there are none.

        A hint, for one who can use what comes next: a transport that cannot look says ``b""``. Never waits and never
        raises.
        """

    def shutdown(self) -> None:
        """Ends the stream both ways, from any thread: a blocked call comes back at once. Never raises."""

    def close(self) -> None:
        """Gives the stream's resources back, from any thread; fine twice. Never blocks, never raises."""

    def fileno(self) -> int:
        """The file descriptor, -1 where there is none (any more)."""
