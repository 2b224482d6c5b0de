"""Settings: an argument wins over the environment, the environment over the default.

Each setting is one field of a frozen dataclass; :meth:`resolve` builds the whole from keyword arguments (``None`` means
"not given") and an environment mapping. A value that cannot be used raises :class:`~weightwire.errors.ConfigError`,
which names the variable or the option it came from. docs/configuration.md lists every name.
"""

from __future__ import annotations

import ipaddress
import os
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from weightwire.errors import ConfigError

__all__ = [
    "CACHE_MODES",
    "CACHE_VERIFY_MODES",
    "DEFAULT_PORT",
    "HASH_VARIANTS",
    "MAX_THREADS",
    "READ_MODES",
    "RETAIN_MODES",
    "TRANSPORTS",
    "ClientConfig",
    "HashConfig",
    "LoadConfig",
    "PathConfig",
    "ServerConfig",
    "available_cpus",
    "checked_flag",
    "checked_progress",
    "checked_seconds",
    "parse_choice",
    "parse_host",
    "parse_port",
    "parse_seconds",
    "parse_size",
    "parse_switch",
    "parse_threads",
    "parse_version",
    "profile_wanted",
    "shown",
]

DEFAULT_PORT = 50052
CACHE_MODES = ("auto", "always", "never")
CACHE_VERIFY_MODES = ("content", "size")
HASH_VARIANTS = ("auto", "plain", "sse2", "avx2", "avxvnni", "avx512", "neon")
RETAIN_MODES = ("connection", "process")
TRANSPORTS = ("auto", "tcp", "rdma")
MAX_THREADS = 64
READ_MODES = ("auto", "mmap", "read")

_T = TypeVar("_T")
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:([kmgt])?(i?b)?)", re.IGNORECASE | re.ASCII)
_VERSION = re.compile(r"\d{1,3}\.\d{1,3}(?:\.\d{1,3})?", re.ASCII)
_MAX_BYTES = (1 << 63) - 1
_DEFAULT_THREADS = 8
_MAX_SECONDS = 86_400.0 * 365


def checked_seconds(name: str, value: object) -> float:
    """A number of seconds above 0 and at most a year; ConfigError, naming ``name``, for anything else."""
    # Compared before it is made a float: an int may be too large for one.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MAX_SECONDS:
        return float(value)
    raise ConfigError(f"{name}={shown(value)} is not a number of seconds above 0 and at most a year", hint="such as 30")


def checked_flag(name: str, value: object) -> bool:
    """``value``, a bool; ConfigError, naming ``name``, for anything else: ``"no"`` would count as yes."""
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{name}: {shown(value)} is neither True nor False")


def checked_progress(progress: object) -> None:
    """ConfigError unless ``progress`` is None or can be called."""
    if progress is not None and not callable(progress):
        raise ConfigError("progress: it cannot be called", hint="give a function of (name, done, total)")


def shown(value: object) -> str:
    """``value`` as a message shows it, shortened."""
    # Python refuses to write out a very long int.
    if isinstance(value, int) and value.bit_length() > 256:
        return f"(an int of {value.bit_length()} bits)"
    return reprlib.repr(value)


def parse_size(text: str) -> int:
    """Turn ``"512MiB"``, ``"1GiB"``, ``"2G"`` or ``"4096"`` into bytes.

    Units are powers of 1024 however they are spelled (``G``, ``GB`` and ``GiB`` are the same), in either case; a
    fraction is allowed (``"1.5G"``) and rounded down to a byte. Raises ValueError for anything else, for zero, and for
    more than 2^63-1 bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB, 1GiB or 2G")
    number, unit, _ = match.groups()
    scale = 1 << (10 * _UNITS[(unit or "").lower()])
    nbytes = int(number) * scale if number.isdigit() else int(float(number) * scale)
    if not 0 < nbytes <= _MAX_BYTES:
        raise ValueError(f"{text!r} is not a size between 1 byte and 2^63-1 bytes")
    return nbytes


def parse_seconds(text: str) -> float:
    """Turn ``"30"`` or ``"0.5"`` into seconds. Raises ValueError unless more than 0 and at most a year."""
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None
    if not 0 < seconds <= _MAX_SECONDS:
        raise ValueError(f"{text!r} is not a number of seconds above 0 and at most a year")
    return seconds


def parse_host(text: str) -> str:
    """Check an address or name to listen on, and take the brackets off an IPv6 address (``"[::1]"``).

    Raises ValueError for what is empty (it would mean every address), for one with a port, and for what can be neither
    name nor address.
    """
    host = text.strip()
    if not host:
        raise ValueError("it is empty; 0.0.0.0 is every IPv4 address of this machine, and :: every address")
    bracketed = host.startswith("[")
    if bracketed:
        host, closed, rest = host[1:].partition("]")
        if closed and re.fullmatch(r":[0-9]*", rest):
            raise ValueError(f"{text!r} names a port, which is a setting of its own")
        if not closed or rest:
            raise ValueError(f"{text!r} is not an address in brackets, such as [::1]")
    if bracketed or ":" in host:
        address, percent, zone = host.partition("%")
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            if not bracketed and re.fullmatch(r"[^:]+:[0-9]*", host):
                raise ValueError(f"{text!r} names a port, which is a setting of its own") from None
            raise ValueError(f"{text!r} is not an IPv6 address") from None
        if percent and not re.fullmatch(r"[^\s%/\[\]\0]+", zone):
            raise ValueError(f"{text!r}: {zone!r} is not the name of a network interface")
    elif not re.fullmatch(r"[^\s/%*\[\]\0]+", host):
        raise ValueError(f"{text!r} is not a host name or address")
    return host


def parse_port(text: str) -> int:
    """Turn ``"50052"`` into a TCP port; 0 asks the system for a free one. Raises ValueError outside 0 to 65535."""
    if not re.fullmatch(r"[0-9]{1,5}", text.strip()) or int(text) > 65535:
        raise ValueError(f"{text!r} is not a port between 0 and 65535")
    return int(text)


def parse_version(text: str) -> str:
    """Check a protocol version such as ``"7.0"`` or ``"7.0.0"`` for its form. Raises ValueError otherwise."""
    if not _VERSION.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is not a protocol version such as 7.0.0")
    return text.strip()


def parse_threads(text: str) -> int:
    """Turn ``"4"`` into a number of threads; 0 is none beside the caller's. Raises ValueError outside 0 to 64."""
    if not re.fullmatch(r"[0-9]{1,4}", text.strip()) or int(text) > MAX_THREADS:
        raise ValueError(f"{text!r} is not a number of threads between 0 and {MAX_THREADS}")
    return int(text)


def parse_switch(text: str) -> bool:
    """Turn ``"1"``, ``"on"``, ``"yes"`` or ``"true"`` into True, their contraries into False; ValueError otherwise."""
    word = text.strip().lower()
    if word in ("1", "on", "yes", "true"):
        return True
    if word in ("0", "off", "no", "false"):
        return False
    raise ValueError(f"{text!r} is neither 1 (on) nor 0 (off)")


def profile_wanted(value: object, environ: Mapping[str, str] | None = None) -> bool | None:
    """Whether what a connection spent its time on is printed when it ends: the argument ``profile``, then
    GGML_RPC_LOADPROF; None where neither says. ConfigError, naming it, for one that cannot be used.
    """
    if value is not None:
        if isinstance(value, bool):
            return value
        raise ConfigError(f"profile={shown(value)} is none of True, False and None")
    text = (os.environ if environ is None else environ).get("GGML_RPC_LOADPROF")
    if text is None:
        return None
    try:
        return parse_switch(text)
    except ValueError as error:
        raise ConfigError(
            f"environment variable GGML_RPC_LOADPROF: {error}",
            hint="correct or unset GGML_RPC_LOADPROF; see docs/configuration.md",
        ) from None


def parse_choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    """Make a parser that takes one of ``choices``, in any case, and raises ValueError for anything else."""

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return word

    return parse


_OPTIMIZED = ("GGML_RPC_LOAD_OPT", parse_switch)


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    if "\0" in text:
        raise ValueError(f"{text!r} has a NUL character in it")
    return text


def _resolve(
    cls: type[_T],
    arguments: Mapping[str, Any],
    environ: Mapping[str, str] | None,
    sources: Mapping[str, tuple[str, Callable[[str], Any]]],
    settings: Collection[str] | None = None,
) -> _T:
    environ = os.environ if environ is None else environ
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in names:
            raise ConfigError(f"unknown setting {name!r}", hint=f"known ones: {', '.join(sorted(names))}")
        if value is None:
            continue
        try:
            values[name] = sources[name][1](value) if isinstance(value, str) else value
        except ValueError as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}", hint="see docs/configuration.md") from None
    for name, (variable, parse) in sources.items():
        if name in values or variable not in environ or (settings is not None and name not in settings):
            continue
        try:
            values[name] = parse(environ[variable])
        except ValueError as error:
            raise ConfigError(
                f"environment variable {variable}: {error}",
                hint=f"correct or unset {variable}; see docs/configuration.md",
            ) from None
    return cls(**values)


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """What a client needs to know.

    ``timeout`` in seconds, ``protocol`` (``None``: what the server says in HELLO), whether the server's tensor
    ``cache`` is asked (``"auto"``, ``"always"`` or ``"never"``), the ``transport`` (``"auto"``, ``"tcp"``, ``"rdma"``),
    and whether it loads the ``optimized`` way (see `PathConfig`).
    """

    timeout: float = 30.0
    protocol: str | None = None
    cache: str = "auto"
    transport: str = "auto"
    optimized: bool = True

    @classmethod
    def resolve(
        cls,
        *,
        timeout: float | None = None,
        protocol: str | None = None,
        cache: str | None = None,
        transport: str | None = None,
        optimized: bool | None = None,
        environ: Mapping[str, str] | None = None,
        settings: Collection[str] | None = None,
    ) -> Self:
        """Settle the client's settings. Raises ConfigError naming the option or variable that cannot be used.

        ``settings`` are those whose variables are read (``None``: all), for a verb that does not have the others.
        """
        return _resolve(
            cls,
            {
                "timeout": timeout,
                "protocol": protocol,
                "cache": cache,
                "transport": transport,
                "optimized": optimized,
            },
            environ,
            {
                "timeout": ("WEIGHTWIRE_TIMEOUT", parse_seconds),
                "protocol": ("WEIGHTWIRE_PROTOCOL", parse_version),
                "cache": ("WEIGHTWIRE_CACHE", parse_choice(CACHE_MODES)),
                "transport": ("WEIGHTWIRE_TRANSPORT", parse_choice(TRANSPORTS)),
                "optimized": _OPTIMIZED,
            },
            settings,
        )


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How tensors are read and hashed ahead of being sent: by how many ``threads`` (0: none beside the one that
    sends), and how many bytes of them at most (``in_flight``).
    """

    threads: int
    in_flight: int = 256 << 20

    @classmethod
    def resolve(
        cls, *, threads: int | None = None, in_flight: int | None = None, environ: Mapping[str, str] | None = None
    ) -> Self:
        """Settle both: argument, GGML_RPC_LOAD_THREADS or WEIGHTWIRE_IN_FLIGHT, default (for threads: the CPUs this
        process may use, at most 8). ConfigError names the argument or variable that cannot be used.
        """
        _check_whole("threads", threads, 0, MAX_THREADS, "0 hashes on the thread that sends")
        _check_whole("in_flight", in_flight, 1, _MAX_BYTES, "in bytes, such as 256 << 20")
        environ = os.environ if environ is None else environ
        values = {"threads": threads, "in_flight": in_flight}
        if threads is None and "GGML_RPC_LOAD_THREADS" not in environ:
            values["threads"] = min(available_cpus(), _DEFAULT_THREADS)
        return _resolve(
            cls,
            values,
            environ,
            {
                "threads": ("GGML_RPC_LOAD_THREADS", parse_threads),
                "in_flight": ("WEIGHTWIRE_IN_FLIGHT", parse_size),
            },
        )


@dataclass(frozen=True, slots=True)
class PathConfig:
    """Which of its two ways of loading a side takes: the ``optimized`` one, or the plain one, which is there to be
    measured against (docs/performance.md).
    """

    optimized: bool = True

    @classmethod
    def resolve(cls, *, optimized: bool | None = None, environ: Mapping[str, str] | None = None) -> Self:
        """Settle it: argument, GGML_RPC_LOAD_OPT, default. ConfigError names the one that cannot be used."""
        if optimized is not None and not isinstance(optimized, bool):
            raise ConfigError(f"optimized={shown(optimized)} is none of True, False and None")
        return _resolve(cls, {"optimized": optimized}, environ, {"optimized": _OPTIMIZED})


def available_cpus() -> int:
    """How many CPUs this process may use: those it is bound to, or fewer if its control group has a quota of time.

    Source: sched_setaffinity(2); the kernel's Documentation/admin-guide/cgroup-v2.rst, cpu.max.
    """
    count = len(os.sched_getaffinity(0))
    quota = _cgroup_quota("/proc/self/cgroup", "/sys/fs/cgroup")
    return count if quota is None else max(1, min(count, quota))


def _cgroup_quota(membership: str, root: str) -> int | None:
    """CPUs, rounded up, that the smallest ``cpu.max`` from this process's group (version 2) upwards allows."""
    try:
        with open(membership, encoding="utf-8") as file:
            group = next((line[3:].strip() for line in file if line.startswith("0::")), None)
    except OSError:
        return None
    if group is None:
        return None
    found: list[int] = []
    parts = [part for part in group.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        try:
            with open(os.path.join(root, *parts[:depth], "cpu.max"), encoding="utf-8") as file:
                quota, period = file.read().split()
            if quota != "max":
                found.append(-(-int(quota) // int(period)))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(found, default=None)


def _check_whole(name: str, value: object, low: int, high: int, hint: str) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name}={shown(value)} is not a whole number from {low} to {high}", hint=hint)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What a server needs to know.

    The address it listens on, the directory of its tensor ``cache`` (``None``: none) and what it checks of an entry
    (``cache_verify``: ``"content"`` or ``"size"``), the ``protocol`` it speaks, how long it keeps tensors (``retain``),
    how many bytes of ``memory`` it gives out (``None``: what is available), the ``transport`` (``"auto"``, ``"tcp"``,
    ``"rdma"``), where its metrics are served (``metrics_port`` ``None``: nowhere), and whether it receives the
    ``optimized`` way (see `PathConfig`).
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    cache: str | None = None
    protocol: str = "7.0.0"
    retain: str = "connection"
    memory: int | None = None
    transport: str = "auto"
    cache_verify: str = "content"
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    optimized: bool = True

    @classmethod
    def resolve(
        cls,
        *,
        host: str | None = None,
        port: int | None = None,
        cache: str | None = None,
        cache_verify: str | None = None,
        protocol: str | None = None,
        retain: str | None = None,
        memory: int | None = None,
        transport: str | None = None,
        metrics_host: str | None = None,
        metrics_port: int | None = None,
        optimized: bool | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """Settle the server's settings. Raises ConfigError naming the option or variable that cannot be used."""
        return _resolve(
            cls,
            {
                "host": host,
                "port": port,
                "cache": cache,
                "cache_verify": cache_verify,
                "protocol": protocol,
                "retain": retain,
                "memory": memory,
                "transport": transport,
                "metrics_host": metrics_host,
                "metrics_port": metrics_port,
                "optimized": optimized,
            },
            environ,
            {
                "host": ("WEIGHTWIRE_SERVER_HOST", parse_host),
                "port": ("WEIGHTWIRE_SERVER_PORT", parse_port),
                "cache": ("WEIGHTWIRE_SERVER_CACHE", _text),
                "cache_verify": ("WEIGHTWIRE_SERVER_CACHE_VERIFY", parse_choice(CACHE_VERIFY_MODES)),
                "protocol": ("WEIGHTWIRE_SERVER_PROTOCOL", parse_version),
                "retain": ("WEIGHTWIRE_SERVER_RETAIN", parse_choice(RETAIN_MODES)),
                "memory": ("WEIGHTWIRE_SERVER_MEMORY", parse_size),
                "transport": ("WEIGHTWIRE_SERVER_TRANSPORT", parse_choice(TRANSPORTS)),
                "metrics_host": ("WEIGHTWIRE_SERVER_METRICS_HOST", parse_host),
                "metrics_port": ("WEIGHTWIRE_SERVER_METRICS_PORT", parse_port),
                "optimized": _OPTIMIZED,
            },
        )


@dataclass(frozen=True, slots=True)
class HashConfig:
    """Which ``variant`` of the hasher to use, whatever the CPU: ``"auto"`` is the best it can."""

    variant: str = "auto"

    @classmethod
    def resolve(cls, *, environ: Mapping[str, str] | None = None) -> Self:
        """Settle it from the environment; empty is unset. Raises ConfigError naming the variable."""
        choice = parse_choice(HASH_VARIANTS)
        return _resolve(cls, {}, environ, {"variant": ("WEIGHTWIRE_HASH", lambda text: choice(text or "auto"))})
