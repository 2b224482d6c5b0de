"""The group of verbs, and what all of them have in common: logging, exit codes, no traceback unless asked for."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from weightwire.cli import bench, cache, demo, hash_, info, push, seed, serve, warm
from weightwire.cli.failures import INTERRUPTED, PIPE_CLOSED, USAGE, Failure, as_failure, by_signal, debug, say
from weightwire.cli.options import help_, version
from weightwire.cli.output import StdoutClosed, check_stdout, note, occupy_standard_descriptors, printable
from weightwire.cli.signals import Terminated
from weightwire.errors import ConfigError

__all__ = ["root"]

# What newer click raises for a bare ``weightwire``; its message is the whole help.
_NO_ARGUMENTS: tuple[type[click.UsageError], ...] = tuple(
    kind for kind in (getattr(click.exceptions, "NoArgsIsHelpError", None),) if kind is not None
)
_LEVELS = ("debug", "info", "warning", "error")


class _Interrupted(Exception):
    """Ctrl-C, in a form click does not act on."""


class _Stopped(Exception):
    """Signal ``number``, likewise."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Root(click.Group):
    """A group that ends with our exit codes and never with a traceback, whoever runs it."""

    def invoke(self, ctx: click.Context) -> Any:
        # What a verb raises is wrapped here: click ends silently on some OSErrors, and TransportError is one.
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, StdoutClosed):
            raise
        except KeyboardInterrupt as error:
            raise _Interrupted from error
        except Terminated as error:
            raise _Stopped(error.number) from error
        except Exception as error:
            raise as_failure(error) from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line ``args`` (default: the process's own) and end the process with its exit code."""
        words = list(sys.argv[1:] if args is None else args)
        json = "--json" in words
        occupy_standard_descriptors()
        try:
            check_stdout()
            code = super().main(words, prog_name or "weightwire", complete_var, standalone_mode=False, **extra)
        except StdoutClosed:
            sys.exit(PIPE_CLOSED)
        except (click.exceptions.Abort, KeyboardInterrupt, _Interrupted):
            note("weightwire: interrupted")
            sys.exit(INTERRUPTED)
        except _Stopped as error:
            sys.exit(by_signal(error.number))
        except _NO_ARGUMENTS as error:
            note(error.format_message())
            path = error.ctx.command_path if error.ctx is not None else "weightwire"
            hint = f"give one of the above; '{path} VERB --help' says what it does and takes"
            sys.exit(say(Failure(error, USAGE, detail="a verb is missing", hint=hint, kind="UsageError"), json=json))
        except Exception as error:
            sys.exit(say(error, json=json))
        sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _logging(verb: str | None) -> Iterator[None]:
    """Inside, the library's log goes to stderr: here and nowhere else, since a library does not configure logging.

    A server's log is what it has to say; from the other verbs only warnings are of interest.
    """
    default = "debug" if debug() else "info" if verb == "serve" else "warning"
    name = os.environ.get("WEIGHTWIRE_LOG", "").strip().lower() or default
    if name not in _LEVELS:
        raise ConfigError(
            f"environment variable WEIGHTWIRE_LOG: {name!r} is not one of {', '.join(_LEVELS)}",
            hint="correct or unset WEIGHTWIRE_LOG",
        )
    logger = logging.getLogger("weightwire")
    before = logger.level, logger.propagate
    handler = _StderrHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.setLevel(name.upper())
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class _Formatter(logging.Formatter):
    """Keeps a message on its line, whatever name it tells; a traceback has lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


class _StderrHandler(logging.Handler):
    """Write records to whatever stderr is at the moment, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        note(self.format(record))


@click.group("weightwire", cls=_Root, add_help_option=False, context_settings={"help_option_names": ["-h", "--help"]})
@version
@help_
@click.pass_context
def root(context: click.Context) -> None:
    """Move model weights to the machines that will run them.

    weightwire speaks the ggml RPC protocol (llama.cpp's --rpc), as client and as server.

    Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 transfer failed, 2 usage, 3 this environment
    cannot do it, 4 content wrong.
    """
    context.with_resource(_logging(context.invoked_subcommand))
    if os.environ.get("WEIGHTWIRE_HASH"):  # refused before anything else happens
        from weightwire.hashing import cpu_features

        cpu_features()


for _verb in (
    serve.serve, push.push, warm.warm, seed.seed, cache.cache, hash_.hash_, info.info, bench.bench, demo.demo,
):  # fmt: skip
    root.add_command(_verb)
