"""FNV-1a 64, the name under which ggml's tensor cache keeps a tensor: the 16 hex digits of its hash."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from weightwire._native import _fnv1a
from weightwire.config import HashConfig
from weightwire.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from weightwire.ranges import FileRange

__all__ = [
    "FNV_OFFSET",
    "CpuFeatures",
    "cpu_features",
    "fnv1a64",
    "fnv1a64_many",
    "hash_payload",
    "hash_payloads",
    "read_fnv1a64",
]

FNV_OFFSET: Final = 0xCBF29CE484222325

_settled = False


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """What hashes on this CPU, and what could (docs/hashing.md)."""

    single: str
    """The variant that hashes one buffer: ``"plain"``, or the vectors it uses."""

    many: str
    """What hashes many payloads: the same variant, or, where that is ``"plain"``, ``"interleaved"``: four at a time."""

    offered: tuple[str, ...]
    """The variants for which this CPU has the instructions, best first; ``"plain"`` is always the last."""

    unavailable: tuple[str, ...]
    """The variants of this architecture that would need another CPU."""


def cpu_features() -> CpuFeatures:
    """Which variant of the hasher is in use, and which there are.

    It is the best that the CPU offers, or the one that the environment variable WEIGHTWIRE_HASH names. That is read
    once, before the first hash; every function here raises ``ConfigError`` if it names none, or one that this CPU
    cannot run.
    """
    _settle()
    single = _fnv1a.chosen()
    known = _fnv1a.variants()
    return CpuFeatures(
        single=single,
        many="interleaved" if single == "plain" else single,
        offered=tuple(name for name, offered in known.items() if offered),
        unavailable=tuple(name for name, offered in known.items() if not offered),
    )


def _settle() -> None:
    """Do what WEIGHTWIRE_HASH asks for, once."""
    global _settled
    if _settled:
        return
    wanted = HashConfig.resolve().variant
    if wanted != "auto":
        known = _fnv1a.variants()
        if not known.get(wanted):
            offered = ", ".join(name for name, can in known.items() if can)
            raise ConfigError(
                f"environment variable WEIGHTWIRE_HASH: this CPU cannot run the variant {wanted!r}",
                hint=f"it can run {offered}; unset WEIGHTWIRE_HASH for the best of them",
            )
        _fnv1a.choose(wanted)
    _settled = True


def fnv1a64(data: Buffer, start: int = FNV_OFFSET) -> int:
    """FNV-1a 64 of the bytes of ``data``, any contiguous buffer.

    ``start`` continues an earlier hash: ``fnv1a64(b, fnv1a64(a)) == fnv1a64(a + b)``. Raises ``TypeError`` for what is
    no buffer, ``ValueError`` for one that is not contiguous, ``OverflowError`` for a start outside 64 bits.

    The bytes are read where they are: if ``data`` maps a file that is cut short, this ends the process as any access
    would (SIGBUS, mmap(2)). `hash_payload` of a FileRange reads by position and raises.
    """
    _settle()
    return _fnv1a.fnv1a64(data, start)


def read_fnv1a64(fd: int, target: Buffer, offset: int, start: int = FNV_OFFSET) -> tuple[int, int]:
    """Fill ``target``, any contiguous writable buffer, from byte ``offset`` of the file ``fd``, and hash it on the way.

    How many bytes the file had for it (fewer only where it ends), and their FNV-1a 64, continued from ``start``. The
    GIL is free until all has been read: ask for a few MiB at a time. Raises ``OSError`` for what pread(2) says, and for
    ``target`` and ``start`` as ``fnv1a64`` does.
    """
    _settle()
    return _fnv1a.read_fnv1a64(fd, target, offset, start)


def fnv1a64_many(buffers: Iterable[Buffer], starts: Sequence[int] | None = None) -> list[int]:
    """FNV-1a 64 of each buffer, in order, in one thread. Many small buffers are hashed sooner than one by one.

    ``starts``, one for each, continue earlier hashes. Raises as ``fnv1a64`` does, ``ValueError`` for another number of
    starts.
    """
    _settle()
    payloads = list(buffers)
    if starts is not None and len(starts) != len(payloads):
        raise ValueError(f"{len(starts)} starts for {len(payloads)} buffers")
    return _fnv1a.fnv1a64_payloads(payloads, starts=starts)


def hash_payload(payload: Buffer | FileRange) -> int:
    """FNV-1a 64 of one payload: the bytes of a buffer, or of a range of a file, read with ``pread(2)``.

    Raises as ``fnv1a64`` does, ``ModelError`` for a file that has become too short or cannot be read.
    """
    _settle()
    return _fnv1a.fnv1a64_payloads((payload,))[0]


def hash_payloads(
    payloads: Sequence[Buffer | FileRange], *, check: Callable[[], object] | None = None, plain: bool = False
) -> list[int]:
    """FNV-1a 64 of each payload, in order, in this thread, in half a MiB beyond the payloads themselves.

    The GIL is free meanwhile: hash from several threads to use several cores. ``check`` is called on this thread about
    every 32 MiB, or every 0.1 s where files are slow; what it raises ends the hashing and is passed on. On the main
    thread Ctrl-C takes effect as often. ``plain`` takes one payload after another, byte by byte, whatever the CPU
    offers and whatever other calls use: to be measured against. Otherwise raises as ``hash_payload`` does.
    """
    _settle()
    return _fnv1a.fnv1a64_payloads(payloads, check, plain)
