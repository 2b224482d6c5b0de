"""How much memory an RDMA connection may pin: a ladder from the largest rings down to the smallest.

What binds is the limit of locked memory (RLIMIT_MEMLOCK, 8 MiB by default), and it binds the send and the receive ring
together. So both are registered on each rung: send slots 8, 4, 2, 1; where either does not fit, what was registered is
given back and the next rung tried. Only ENOMEM leads to the next rung; nothing stays registered after a failure.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from weightwire._native import _link
from weightwire.errors import RegistrationError, VerbsError

__all__ = [
    "CHUNK",
    "RECEIVE_SLOTS",
    "SEND_RUNGS",
    "Attempt",
    "Rings",
    "limit_hint",
    "locked_memory_limit",
    "register_rings",
]

CHUNK: Final = _link.CHUNK
"""Bytes in a slot: what a ggml peer's receive slots hold."""
RECEIVE_SLOTS: Final = _link.RECEIVE_SLOTS
SEND_RUNGS: Final = (8, 4, 2, 1)

_CAP_IPC_LOCK: Final = 14
_EVERY_USER: Final = "0 0 4294967295"


class Region(Protocol):
    """Registered memory."""

    def close(self) -> None:
        """Give it back."""


R = TypeVar("R", bound=Region)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rung: how many slots of 256 KiB were asked for, and which ring failed ("send", "receive", or "" for neither)
    with which errno (0 for none)."""

    send_slots: int
    receive_slots: int
    failed: str = ""
    errno: int = 0

    def as_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        asked = f"{self.send_slots} + {self.receive_slots} slots"
        if not self.failed:
            return f"{asked}: registered"
        return f"{asked}: the {self.failed} ring failed ({errno.errorcode.get(self.errno, self.errno)})"


@dataclass(frozen=True, slots=True)
class Rings(Generic[R]):
    """Both rings, registered, and the rungs it took."""

    send: R
    receive: R
    attempts: tuple[Attempt, ...]

    @property
    def send_slots(self) -> int:
        """SENDs that may be in flight."""
        return self.attempts[-1].send_slots

    @property
    def degraded(self) -> bool:
        """Whether it is less than the most."""
        return len(self.attempts) > 1


def register_rings(
    register: Callable[[int], R], *, receive_slots: int = RECEIVE_SLOTS, depth: int = SEND_RUNGS[0]
) -> Rings[R]:
    """The largest rings that can be had, with at most ``depth`` send slots; ``register`` pins so many bytes.

    Raises ``RegistrationError`` with every rung in ``.attempts`` when the smallest did not fit, or when ``register``
    failed with anything but ENOMEM. Nothing stays registered then.
    """
    attempts: list[Attempt] = []
    for send_slots in (rung for rung in SEND_RUNGS if rung <= depth):
        send: R | None = None
        try:
            send = register(send_slots * CHUNK)
            receive = register(receive_slots * CHUNK)
        except VerbsError as error:
            failed = "receive" if send is not None else "send"
            if send is not None:
                send.close()
            attempts.append(Attempt(send_slots, receive_slots, failed, error.errno or 0))
            if error.errno != errno.ENOMEM:
                raise _refused(attempts, error) from error
        except BaseException:
            if send is not None:
                send.close()
            raise
        else:
            attempts.append(Attempt(send_slots, receive_slots))
            return Rings(send, receive, tuple(attempts))
    raise _exhausted(attempts)


def _refused(attempts: list[Attempt], error: VerbsError) -> RegistrationError:
    last = attempts[-1]
    return RegistrationError(
        f"the {last.failed} ring of {last.send_slots} + {last.receive_slots} slots was not registered: {error.detail}",
        attempts=tuple(attempts),
        operation=error.operation,
        errno=error.errno,
    )


def _exhausted(attempts: list[Attempt]) -> RegistrationError:
    limit = locked_memory_limit()
    allowed = "without a limit of locked memory" if limit is None else f"within {limit >> 10} KiB of locked memory"
    smallest = (attempts[-1].send_slots + attempts[-1].receive_slots) * CHUNK >> 10
    return RegistrationError(
        f"no rings fit {allowed}; the smallest take {smallest} KiB and what the driver pins besides"
        f" ({'; '.join(map(str, attempts))})",
        attempts=tuple(attempts),
        errno=errno.ENOMEM,
        hint=limit_hint(limit),
    )


def limit_hint(limit: int | None) -> str:
    """What to do where memory could not be pinned under ``limit`` (see `locked_memory_limit`)."""
    if limit is None:
        return "no limit binds this process: the machine, or its control group, has no memory left that can be pinned"
    return "raise the limit: ulimit -l unlimited, LimitMEMLOCK=infinity for systemd, --ulimit memlock=-1 for docker"


def locked_memory_limit(process: Path = Path("/proc/self")) -> int | None:
    """Bytes this process may pin, ``None`` for no limit.

    RLIMIT_MEMLOCK does not bind a process with CAP_IPC_LOCK, but only where it holds in the first user namespace: root
    in a container with users of its own is bound. Source: getrlimit(2), capabilities(7), user_namespaces(7).
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _may_lock(process):
        return None
    return soft


def _may_lock(process: Path) -> bool:
    try:
        users = " ".join((process / "uid_map").read_text().split())
        status = (process / "status").read_text()
    except OSError:
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return users == _EVERY_USER and bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)
