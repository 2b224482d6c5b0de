"""Options that more than one verb has, and the types their values are read with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weightwire.config import parse_seconds, parse_size, parse_version
from weightwire.errors import ConfigError, VersionError

__all__ = [
    "PATTERN",
    "SECONDS",
    "SIZE",
    "VERSION",
    "check_protocol",
    "include",
    "json_output",
    "protocol",
    "quiet",
    "timeout",
]

_F = TypeVar("_F", bound=Callable[..., Any])


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]  # generic in newer click, and only there
else:
    _ParamType = click.ParamType


class _Parsed(_ParamType):
    """A click type around a parser that raises ValueError."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


SIZE = _Parsed("size", parse_size)
SECONDS = _Parsed("seconds", parse_seconds)
VERSION = _Parsed("version", parse_version)
PATTERN = _Parsed("regex", _pattern)


def check_protocol(version: str | None) -> None:
    """See that ``version`` is one weightwire describes, before anything is opened. Raises ConfigError otherwise."""
    from weightwire.wire.dialect import dialect_for

    if version is None:
        return
    try:
        dialect_for(version)
    except VersionError as error:
        raise ConfigError(f"protocol {version} is not known", hint=f"weightwire speaks {error.ours}") from None


def json_output(function: _F) -> _F:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")(function)


def quiet(function: _F) -> _F:
    """``-q``."""
    return click.option("-q", "--quiet", is_flag=True, help="Show no progress.")(function)


def timeout(function: _F) -> _F:
    """``--timeout``."""
    return click.option(
        "--timeout",
        type=SECONDS,
        metavar="S",
        help="Seconds without any progress before giving up. [WEIGHTWIRE_TIMEOUT; default: 30]",
    )(function)


def protocol(function: _F) -> _F:
    """``--protocol`` of a client."""
    return click.option(
        "--protocol",
        type=VERSION,
        metavar="V",
        help="Speak this protocol version whatever the server says it is; a wrong one corrupts what arrives. "
        "[WEIGHTWIRE_PROTOCOL; default: as the server says]",
    )(function)


def include(function: _F) -> _F:
    """``--include``."""
    return click.option(
        "--include", type=PATTERN, metavar="REGEX", help="Only tensors in whose name this regular expression is found."
    )(function)
