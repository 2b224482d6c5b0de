"""One `Dialect` per protocol version: everything that differs, as data. Source: docs/protocol.md, sections 3 to 7."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from weightwire.errors import ConfigError, VersionError
from weightwire.wire.codec import DEVICE_COMMANDS, Codec
from weightwire.wire.commands import ALLOC_SIZE_SOURCES, CACHE_THRESHOLD, VARIABLE_COMMANDS, Command
from weightwire.wire.tensor import RPC_TENSOR_BYTES
from weightwire.wire.types import TYPES

__all__ = ["DIALECTS", "OURS", "Described", "Dialect", "described_version", "dialect_for"]

_T: Final = RPC_TENSOR_BYTES

_SINCE: Final[dict[Command, tuple[int, int]]] = {
    Command.DEVICE_COUNT: (3, 0),
    Command.GRAPH_RECOMPUTE: (3, 5),
    Command.MEMSET_TENSOR: (5, 0),
    Command.SET_TENSOR_2D: (8, 0),
    Command.GET_TENSOR_2D: (8, 0),
    Command.COMM_INIT: (8, 0),
    Command.COMM_ALLREDUCE: (8, 0),
    Command.COMM_FREE: (8, 0),
}
"""The version a command came with; the others are in every version."""

_SILENT_SINCE: Final[dict[Command, tuple[int, int]]] = {
    Command.SET_TENSOR: (2, 0),
    Command.GRAPH_COMPUTE: (3, 5),
    Command.FREE_BUFFER: (6, 0),
    Command.BUFFER_CLEAR: (6, 0),
    Command.INIT_TENSOR: (6, 0),
    Command.MEMSET_TENSOR: (6, 0),
    Command.GRAPH_RECOMPUTE: (3, 5),
    Command.SET_TENSOR_2D: (8, 0),
    Command.COMM_ALLREDUCE: (8, 0),
    Command.COMM_FREE: (8, 0),
}
"""The version from which a command has no answer; the others are always answered."""

_ANSWER_BYTES: Final[dict[Command, int | None]] = {
    Command.ALLOC_BUFFER: 16,
    Command.GET_ALIGNMENT: 8,
    Command.GET_MAX_SIZE: 8,
    Command.BUFFER_GET_BASE: 8,
    Command.FREE_BUFFER: 0,
    Command.BUFFER_CLEAR: 0,
    Command.SET_TENSOR: 0,
    Command.SET_TENSOR_HASH: 1,
    Command.GET_TENSOR: None,
    Command.COPY_TENSOR: 1,
    Command.GRAPH_COMPUTE: 1,
    Command.GET_DEVICE_MEMORY: 16,
    Command.INIT_TENSOR: 0,
    Command.GET_ALLOC_SIZE: 8,
    Command.DEVICE_COUNT: 4,
    Command.MEMSET_TENSOR: 0,
    Command.GET_TENSOR_2D: None,
    Command.COMM_INIT: 1,
}


class Dialect(Codec):
    """One version of the protocol: its `Facts`, what its commands look like, and (from `Codec`) their payloads.

    Methods that take a command raise ConfigError (a ValueError) if the version has no such command.
    """

    __slots__ = ()

    def _index(self, cmd: int) -> Command:
        if cmd not in self.commands:
            raise ConfigError(f"protocol {self.text} has no {self.name_of(cmd)}")
        return Command(cmd)

    def name_of(self, number: int) -> str:
        """``"SET_TENSOR"``, or ``"command 99"`` for a number that this version does not know."""
        return Command(number).name if number in self.commands else f"command {number}"

    def answered(self, cmd: int) -> bool:
        """Whether the server answers ``cmd``, be it with an empty answer."""
        silent = _SILENT_SINCE.get(self._index(cmd))
        return silent is None or self.version < silent

    def answer_bytes(self, cmd: int) -> int | None:
        """Payload of the answer to ``cmd`` in bytes (0: empty answer), None where the request decides it.

        ConfigError too if ``cmd`` is not answered.
        """
        known = self._index(cmd)
        if not self.answered(known):
            raise ConfigError(f"{known.name} has no answer in protocol {self.text}")
        return self.hello_answer_bytes if known is Command.HELLO else _ANSWER_BYTES[known]

    def request_bytes(self, cmd: int) -> int | None:
        """Payload of ``cmd`` in bytes, None where it varies (SET_TENSOR, SET_TENSOR_2D, GRAPH_COMPUTE)."""
        known = self._index(cmd)
        return None if known in VARIABLE_COMMANDS else self.min_request_bytes(known)

    def min_request_bytes(self, cmd: int) -> int:
        """The least payload of ``cmd`` in bytes: all of it for a fixed one, the head (and no data) for the others."""
        known = self._index(cmd)
        device = 4 if self.device_prefix else 0
        uid = 8 if self.graph_uid else 0
        if known in DEVICE_COMMANDS:
            return device
        return {
            Command.ALLOC_BUFFER: device + 8,
            Command.BUFFER_GET_BASE: 8,
            Command.FREE_BUFFER: 8,
            Command.BUFFER_CLEAR: 9,
            Command.SET_TENSOR: self.set_tensor_header_bytes,
            Command.SET_TENSOR_HASH: _T + 16,
            Command.GET_TENSOR: _T + 16,
            Command.COPY_TENSOR: 2 * _T,
            Command.GRAPH_COMPUTE: device + uid + 8,
            Command.INIT_TENSOR: _T,
            Command.GET_ALLOC_SIZE: device + _T + (ALLOC_SIZE_SOURCES * _T if self.alloc_size_sources else 0),
            Command.HELLO: self.hello_request_bytes,
            Command.DEVICE_COUNT: 0,
            Command.GRAPH_RECOMPUTE: device + uid,
            Command.MEMSET_TENSOR: _T + 17,
            Command.SET_TENSOR_2D: _T + 32,
            Command.GET_TENSOR_2D: _T + 32,
            Command.COMM_INIT: 80,
            Command.COMM_ALLREDUCE: device + _T,
            Command.COMM_FREE: device,
        }[known]

    def saves_to_cache(self, nbytes: int, flag: int) -> bool:
        """Whether a caching server keeps ``nbytes`` bytes that came by SET_TENSOR with cache flag ``flag``.

        Up to 6.0 it keeps everything above 10 MiB, from 7.0 whatever has the flag (docs/protocol.md, section 9).
        """
        return flag != 0 if self.cache_flag else nbytes > CACHE_THRESHOLD

    def knows_type(self, code: int) -> bool:
        """Whether every server of this version knows the ggml type; one that does not closes the connection on it."""
        found = TYPES.get(code)
        return found is not None and self.version >= found.since


def _build(major: int, minor: int) -> Dialect:
    version = (major, minor)
    with_caps = version >= (4, 0)
    cache_flag = version >= (7, 0)
    return Dialect(
        version=version,
        text=f"{major}.{minor}",
        hello_request_bytes=24 if with_caps else 0,
        hello_answer_bytes=28 if with_caps else 3,
        hello_flags=with_caps,
        device_prefix=version >= (3, 0),
        device_count=version >= (3, 0),
        set_tensor_header_bytes=_T + 8 + (1 if cache_flag else 0),
        cache_flag=cache_flag,
        alloc_size_sources=version >= (3, 6),
        graph_uid=version >= (8, 0),
        rdma=with_caps,
        commands=frozenset(cmd for cmd in Command if version >= _SINCE.get(cmd, (1, 0))),
    )


DIALECTS: Final[dict[tuple[int, int], Dialect]] = {
    version: _build(*version)
    for version in ((1, 0), (2, 0), (3, 0), (3, 5), (3, 6), (4, 0), (5, 0), (5, 1), (6, 0), (7, 0), (8, 0))
}
"""Every version in which something changed, oldest first, by (major, minor)."""

OURS: Final = "1.0 to 8.0"
"""What weightwire speaks, for messages."""

_TEXT: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,2}", re.ASCII)


def _parse(version: Sequence[int] | str) -> tuple[int, ...]:
    if isinstance(version, str):
        if not _TEXT.fullmatch(version):
            raise ConfigError(f"{version!r} is no protocol version", hint=f"write it as 7.0.0; {OURS} are known")
        return tuple(int(part) for part in version.split("."))
    if not version or any(part < 0 for part in version):
        raise ConfigError(f"{tuple(version)} is no protocol version", hint=f"(7, 0, 0) is one; {OURS} are known")
    return tuple(version)


def dialect_for(version: Sequence[int] | str) -> Dialect:
    """The dialect a peer of ``version`` speaks: (major, minor[, patch]), or text such as "7.0.0".

    A minor nobody described, in a known major, is taken for the newest known one before it; the patch only counts ggml
    operations and says nothing. VersionError for an unknown major, ConfigError for what is no version at all.
    """
    parts = _parse(version)
    major, minor = parts[0], parts[1] if len(parts) > 1 else 0
    known = [at for at in DIALECTS if at[0] == major and at[1] <= minor]
    if not known:
        theirs = ".".join(str(part) for part in parts)
        raise VersionError(
            f"protocol {theirs} is unknown; this is weightwire for {OURS}",
            ours=OURS,
            theirs=theirs,
            hint="a fork with numbers of its own: name the version it is compatible with (protocol=)",
        )
    return DIALECTS[max(known)]


class Described(NamedTuple):
    """A version a user named: its dialect, and the patch number, which says nothing about the protocol."""

    dialect: Dialect
    patch: int


_NAMED: Final = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})(?:\.([0-9]{1,3}))?", re.ASCII)


def described_version(version: object) -> Described:
    """What a user means by ``version``: text "major.minor" or "major.minor.patch" of a version in `DIALECTS`.

    Stricter than `dialect_for`, which makes the best of what a peer announces: what is announced or spoken on a user's
    word must be described here. ConfigError for anything else, also for a patch above 255 (it is one byte in HELLO).
    """
    found = _NAMED.fullmatch(version) if isinstance(version, str) else None
    if found is None:
        raise ConfigError(
            f"protocol {version!r} is not a version", hint='write it as text, such as "7.0.0"; ' + _known_ones()
        )
    major, minor, patch = (int(part or 0) for part in found.groups())
    dialect = DIALECTS.get((major, minor))
    if dialect is None:
        raise ConfigError(f"protocol {version} is not known", hint=_known_ones())
    if patch > 255:
        raise ConfigError(f"protocol {version}: the patch number is at most 255")
    return Described(dialect, patch)


def _known_ones() -> str:
    return f"weightwire speaks {', '.join(dialect.text for dialect in DIALECTS.values())}"
