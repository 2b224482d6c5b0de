"""Options that more than one verb has, and the types their values are read with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weightwire import __version__
from weightwire.cli.output import counted, line
from weightwire.config import MAX_THREADS, TRANSPORTS, ClientConfig, parse_seconds, parse_size, parse_version
from weightwire.errors import ConfigError

__all__ = [
    "PATTERN",
    "SECONDS",
    "SIZE",
    "VERSION",
    "Sending",
    "WholeNumber",
    "check_protocol",
    "connecting",
    "help_",
    "include",
    "include_each",
    "json_output",
    "layers_each",
    "optimized",
    "profile",
    "protocol",
    "quiet",
    "sending",
    "targets_of",
    "threads_that",
    "timeout",
    "transport",
    "version",
]

_F = TypeVar("_F", bound=Callable[..., Any])


if TYPE_CHECKING:
    from weightwire.client import Target

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


class WholeNumber(click.IntRange):
    """A whole number in a range; what is none is called that."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)
        return super().convert(value, param, ctx)


def _pattern(text: str) -> str:
    from weightwire.model.choosing import compile_include

    compile_include(text)
    return text


def _layers(text: str) -> str:
    from weightwire.client.layers import parse_layers

    parse_layers(text)
    return text


def _version(text: str) -> str:
    from weightwire.wire.dialect import described_version

    version = parse_version(text)
    described_version(version)
    return version


SIZE = _Parsed("size", parse_size)
SECONDS = _Parsed("seconds", parse_seconds)
VERSION = _Parsed("version", _version)
PATTERN = _Parsed("regex", _pattern)
LAYERS = _Parsed("layers", _layers)


def check_protocol(version: str | None, variable: str) -> None:
    """See that ``version`` is one weightwire describes, before anything is opened.

    Raises ConfigError otherwise, which names ``variable``: an option has been checked when it was read.
    """
    if version is None:
        return
    try:
        _version(version)
    except ConfigError as error:
        raise ConfigError(f"environment variable {variable}: {error.detail}", hint=error.hint) from None


def _saying(text: Callable[[click.Context], str]) -> Callable[[click.Context, click.Parameter, bool], None]:
    """A callback that writes ``text`` and ends the command line. As a result is written: click's own would end
    differently when stdout cannot be written.
    """

    def say(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            line(text(ctx))
            ctx.exit()

    return say


def help_(function: _F) -> _F:
    """``--help``, of a command that is made with ``add_help_option=False``."""
    return click.option(
        *("-h", "--help"),
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_saying(lambda ctx: ctx.get_help()),
        help="Show this message and exit.",
    )(function)


def version(function: _F) -> _F:
    """``--version``."""
    return click.option(
        "--version",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_saying(lambda ctx: f"weightwire {__version__}"),
        help="Show the version and exit.",
    )(function)


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


def transport(function: _F) -> _F:
    """``--transport`` of a client."""
    return click.option(
        "--transport",
        type=click.Choice(TRANSPORTS),
        help="auto: RDMA where both ends can, TCP otherwise; rdma: nothing else. [WEIGHTWIRE_TRANSPORT; default: auto]",
    )(function)


def include(function: _F) -> _F:
    """``--include``."""
    return click.option(
        "--include", type=PATTERN, metavar="REGEX", help="Only tensors in whose name this regular expression is found."
    )(function)


def include_each(function: _F) -> _F:
    """``--include`` of a verb that takes several endpoints: once for all, or once for each."""
    return click.option(
        "--include",
        type=PATTERN,
        metavar="REGEX",
        multiple=True,
        help="Only tensors in whose name this regular expression is found. With several servers: once for all of them, "
        "or once for each in their order.",
    )(function)


def layers_each(function: _F) -> _F:
    """``--layers``, likewise."""
    return click.option(
        "--layers",
        type=LAYERS,
        metavar="N-M",
        multiple=True,
        help="Only tensors of these layers, such as 20-39, 7, 20-, -19 or 0-9,other: 'other' is what belongs to no "
        "layer. With several servers: once for all of them, or once for each in their order.",
    )(function)


def threads_that(work: str) -> Callable[[_F], _F]:
    """``--threads``, of threads that do ``work``."""
    return click.option(
        "--threads",
        type=WholeNumber(0, MAX_THREADS),
        metavar="N",
        help=f"Threads that {work}. [GGML_RPC_LOAD_THREADS; default: one for each CPU, at most 8]",
    )


def profile(function: _F) -> _F:
    """``--profile`` of a client."""
    return click.option(
        "--profile",
        "show_profile",
        is_flag=True,
        help="Say on stderr what each connection spent its time on. [GGML_RPC_LOADPROF=1 does the same]",
    )(function)


def optimized(function: _F) -> _F:
    """``--optimized`` and ``--no-optimized``."""
    return click.option(
        "--optimized/--no-optimized",
        default=None,
        help="The plain way instead of the fast one, to measure the one against the other: the same bytes, one message "
        "at a time, on one thread. [GGML_RPC_LOAD_OPT=0 is --no-optimized; default: --optimized]",
    )(function)


@dataclass(frozen=True, slots=True)
class Sending:
    """What every verb is told that sends a model to servers; see `sending`."""

    model: str
    endpoints: tuple[str, ...]
    drop_behind: bool
    no_mmap: bool
    threads: int | None
    no_index: bool
    timeout: float | None
    protocol: str | None
    transport: str | None
    show_profile: bool
    optimized: bool | None
    as_json: bool
    quiet: bool

    def config(self, **more: Any) -> ClientConfig:
        """The settings of a client, ``more`` being those that not every verb has. Raises ConfigError as `ClientConfig`
        does, and for a protocol that weightwire does not describe.
        """
        shared = {name: getattr(self, name) for name in ("timeout", "protocol", "transport", "optimized")}
        config = ClientConfig.resolve(**shared, **more, settings=(*shared, *more))
        check_protocol(config.protocol, "WEIGHTWIRE_PROTOCOL")
        return config

    def reading(self) -> dict[str, Any]:
        """How the model is read and hashed, as arguments of `push_all` and `warm`."""
        return {
            "threads": self.threads,
            "index": False if self.no_index else None,
            "drop_behind": self.drop_behind,
            "read": "read" if self.no_mmap else "auto",
        }


def connecting(config: ClientConfig) -> dict[str, Any]:
    """How servers are connected to, as arguments of `connect`, `push_all` and `warm`."""
    return {name: getattr(config, name) for name in ("timeout", "protocol", "transport", "optimized")}


def sending(function: Callable[..., int]) -> Callable[..., int]:
    """The arguments and options that `Sending` has, which is the first argument of ``function``; and ``--help``."""

    @functools.wraps(function)
    def call(**given: Any) -> int:
        told = Sending(**{each.name: given.pop(each.name) for each in fields(Sending)})
        return function(told, **given)

    decorated: Callable[..., int] = call
    for decorate in reversed(_SENDING):
        decorated = decorate(decorated)
    return decorated


_SENDING: tuple[Callable[[Callable[..., int]], Callable[..., int]], ...] = (
    click.argument("model", metavar="MODEL"),
    click.argument("endpoints", metavar="HOST:PORT...", nargs=-1, required=True),
    click.option(
        "--drop-behind",
        is_flag=True,
        help="Give the memory that caches the model's files back as they are sent: for a model larger than memory.",
    ),
    click.option(
        "--no-mmap",
        is_flag=True,
        help="Read the model's files in large blocks, instead of having the kernel send them.",
    ),
    threads_that("hash ahead for the server's cache; 0: none but the one that sends"),
    click.option(
        "--no-index", is_flag=True, help="Hash anew, and remember nothing. [WEIGHTWIRE_INDEX=off does the same]"
    ),
    timeout,
    protocol,
    transport,
    profile,
    optimized,
    json_output,
    quiet,
    help_,
)


def targets_of(endpoints: Sequence[str], include: Sequence[str], layers: Sequence[str]) -> list[Target]:
    """The targets that a command line names. Raises ConfigError as `as_targets` does, and unless there is one
    expression, and one choice of layers, for all of them, or one for each.
    """
    from weightwire.client import Target
    from weightwire.client.crew import as_targets

    for option, given in (("--include", include), ("--layers", layers)):
        if len(given) not in (0, 1, len(endpoints)):
            raise ConfigError(
                f"{option} is given {counted(len(given), 'time', 'times')}, for "
                f"{counted(len(endpoints), 'server', 'servers')}",
                hint="give it once for all servers, or once for each in their order",
            )

    def of(given: Sequence[str], number: int) -> str | None:
        return None if not given else given[number if len(given) > 1 else 0]

    return as_targets(
        [Target(endpoint, of(include, number), of(layers, number)) for number, endpoint in enumerate(endpoints)]
    )
