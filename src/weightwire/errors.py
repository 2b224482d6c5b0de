"""One tree of errors.

Every error carries ``.detail`` (what happened, one sentence) and ``.hint`` (what to do about it, or an empty
string); ``str()`` gives both. The leaves add the facts a program would act on as attributes, so that nobody has to
parse a message.
"""

from __future__ import annotations

__all__ = [
    "AllocationError",
    "CacheDirectoryError",
    "CacheError",
    "CacheUnavailable",
    "CompletionError",
    "ConfigError",
    "IntegrityError",
    "ModelError",
    "PeerClosed",
    "ProtocolError",
    "RdmaUnavailable",
    "RegistrationError",
    "ServerBusy",
    "TransferTimeout",
    "TransportError",
    "VerbsError",
    "VersionError",
    "WeightwireError",
]


class WeightwireError(Exception):
    """Base of everything weightwire raises on purpose."""

    def __init__(self, detail: str, *, hint: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.detail} ({self.hint})" if self.hint else self.detail


class ConfigError(WeightwireError, ValueError):
    """An option, argument or environment value that cannot be used; ``.detail`` names it."""


class ModelError(WeightwireError, ValueError):
    """A model that cannot be read.

    ``.path`` is the file, ``.offset`` the byte in it where reading went wrong (``None`` where no single byte is at
    fault).
    """

    def __init__(self, detail: str, *, path: str = "", offset: int | None = None, hint: str = "") -> None:
        where = path + (f" at byte {offset}" if offset is not None else "")
        super().__init__(f"{where}: {detail}" if where else detail, hint=hint)
        self.path = path
        self.offset = offset


class ProtocolError(WeightwireError):
    """The peer broke the wire format."""


class VersionError(ProtocolError):
    """The peer speaks a protocol nobody described; nothing was sent after HELLO.

    ``.ours`` is what weightwire speaks (text, such as ``"1.0 to 8.0"``), ``.theirs`` what the peer announced.
    """

    def __init__(self, detail: str, *, ours: str = "", theirs: str = "", hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.ours = ours
        self.theirs = theirs


class IntegrityError(WeightwireError):
    """Bytes that should be equal are not.

    ``.name`` is the tensor or cache entry, ``.expected`` and ``.actual`` describe the two sides.
    """

    def __init__(self, detail: str, *, name: str = "", expected: str = "", actual: str = "", hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.name = name
        self.expected = expected
        self.actual = actual


class CacheError(WeightwireError):
    """A cache directory that cannot be read or written.

    ``.path`` is the directory or the entry, ``.errno`` the operating system's error (``None`` where it had no part).
    """

    def __init__(self, detail: str, *, path: str = "", errno: int | None = None, hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.path = path
        self.errno = errno


class CacheDirectoryError(CacheError, ConfigError):
    """A cache directory that is missing and that the system does not let be made: where it would lie no directory can
    be made, or not by this user. ``.path`` and ``.errno`` say which and why.
    """


class AllocationError(WeightwireError, MemoryError):
    """A server could not give the memory asked for; ``.nbytes`` is what was asked, in bytes."""

    def __init__(self, detail: str, *, nbytes: int = 0, hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.nbytes = nbytes


class CacheUnavailable(WeightwireError):
    """A server keeps no tensor cache, or its cache does not keep what it is sent; ``.endpoint`` is the server."""

    def __init__(self, detail: str, *, endpoint: str = "", hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.endpoint = endpoint


class TransferTimeout(WeightwireError, TimeoutError):
    """Nothing moved for longer than the caller allowed.

    ``.phase`` is what was being waited for (``"connect"``, ``"hello"``, ``"send"``, ``"receive"`` …), ``.elapsed`` the
    seconds waited, ``.tensor`` and ``.bytes_done`` what was in flight, where known.
    """

    def __init__(
        self,
        detail: str,
        *,
        phase: str = "",
        elapsed: float = 0.0,
        tensor: str | None = None,
        bytes_done: int = 0,
        hint: str = "",
    ) -> None:
        super().__init__(detail, hint=hint)
        self.phase = phase
        self.elapsed = elapsed
        self.tensor = tensor
        self.bytes_done = bytes_done


class ServerBusy(TransferTimeout):
    """The server took the connection and did not answer HELLO.

    A stock server serves one client at a time, and one of weightwire's no more than it was told to.
    """


class TransportError(WeightwireError, OSError):
    """The operating system refused; ``.operation`` is the call, ``.errno`` its error, ``.endpoint`` the peer."""

    def __init__(
        self, detail: str, *, endpoint: str = "", operation: str = "", errno: int | None = None, hint: str = ""
    ) -> None:
        super().__init__(detail, hint=hint)
        self.endpoint = endpoint
        self.operation = operation
        self.errno = errno


class PeerClosed(TransportError, ConnectionError):
    """The peer closed the connection.

    ``.position`` says where: ``"before"`` a message, ``"inside"`` one, or ``"after"`` a request whose answer never
    came. ``.tensor`` is the tensor in flight, if any, ``.bytes_done`` how many bytes of the message had moved.
    """

    def __init__(
        self,
        detail: str,
        *,
        endpoint: str = "",
        operation: str = "",
        errno: int | None = None,
        position: str = "before",
        tensor: str | None = None,
        bytes_done: int = 0,
        hint: str = "",
    ) -> None:
        super().__init__(detail, endpoint=endpoint, operation=operation, errno=errno, hint=hint)
        self.position = position
        self.tensor = tensor
        self.bytes_done = bytes_done


class VerbsError(TransportError):
    """A call of libibverbs failed; ``.operation`` is the call (``"ibv_modify_qp to RTR"``), ``.errno`` its error."""


class RegistrationError(VerbsError):
    """The rings of an RDMA connection could not be registered, however small.

    ``.attempts`` is every rung tried, in order: see ``weightwire.transport.registration.Attempt``.
    """

    def __init__(
        self,
        detail: str,
        *,
        attempts: tuple[object, ...] = (),
        endpoint: str = "",
        operation: str = "ibv_reg_mr",
        errno: int | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(detail, endpoint=endpoint, operation=operation, errno=errno, hint=hint)
        self.attempts = attempts


class CompletionError(VerbsError):
    """A completion ended an RDMA connection.

    ``.status`` is its work completion status (``enum ibv_wc_status``; 0 where the device called it a success and it
    breaks the rules: longer than its slot, empty again and again, or of nothing that was posted), ``.vendor_err`` the
    vendor's code. ``.tensor`` is the tensor in flight, if any, ``.bytes_done`` how many bytes of it, or else of the
    message, had moved.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int = 0,
        vendor_err: int = 0,
        endpoint: str = "",
        operation: str = "ibv_poll_cq",
        errno: int | None = None,
        tensor: str | None = None,
        bytes_done: int = 0,
        hint: str = "",
    ) -> None:
        super().__init__(detail, endpoint=endpoint, operation=operation, errno=errno, hint=hint)
        self.status = status
        self.vendor_err = vendor_err
        self.tensor = tensor
        self.bytes_done = bytes_done


class RdmaUnavailable(TransportError):
    """RDMA was required and cannot be had; ``.reason`` says why in one sentence."""

    def __init__(
        self,
        detail: str,
        *,
        reason: str = "",
        endpoint: str = "",
        operation: str = "",
        errno: int | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(detail, endpoint=endpoint, operation=operation, errno=errno, hint=hint)
        self.reason = reason or detail
