"""Checks of what a `Server` is given: whatever cannot be used is a ConfigError, at once."""

from __future__ import annotations

import operator
import os
from pathlib import Path

from weightwire.cache.directory import checked_directory
from weightwire.cache.store import TensorCache
from weightwire.config import CACHE_VERIFY_MODES, parse_host, shown
from weightwire.errors import ConfigError

__all__ = ["cache_check", "cache_place", "host_name", "whole_number"]


def host_name(value: object) -> str:
    """An address or name to listen on, without brackets."""
    if not isinstance(value, str):
        raise ConfigError(
            f"host={shown(value)} is not text", hint='"0.0.0.0" is every IPv4 address, "::" every address'
        )
    try:
        return parse_host(value)
    except ValueError as error:
        raise ConfigError(f"host={shown(value)}: {error}") from None


def whole_number(name: str, value: object, least: int, most: int, hint: str = "") -> int:
    """An integer (numpy's too) from ``least`` to ``most``."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)} is not a whole number", hint=hint)
    if not least <= number <= most:
        raise ConfigError(f"{name}={shown(value)} is not between {least} and {most}", hint=hint)
    return number


def cache_place(value: object) -> Path | TensorCache | None:
    """A cache, the directory for one, or none."""
    if value is None or isinstance(value, TensorCache):
        return value
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"cache={shown(value)} is neither a path nor a TensorCache")
    return checked_directory(value)


def cache_check(cache: object, value: object) -> str:
    """What is checked of the entries in a directory; ``"content"`` if nothing is said."""
    if value is None:
        return "content"
    if value not in CACHE_VERIFY_MODES:
        raise ConfigError(f"cache_verify={shown(value)}", hint=f"one of {', '.join(CACHE_VERIFY_MODES)}")
    if isinstance(cache, TensorCache):
        raise ConfigError(
            "cache_verify is for a directory", hint="a TensorCache takes it: TensorCache(dir, verify=...)"
        )
    return str(value)
