"""The command line: ``weightwire VERB ...``.

Results go to stdout; progress, logs and errors to stderr. docs/configuration.md lists options, variables and exit
codes.
This package is the only place that imports click and rich.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from weightwire import __version__
from weightwire.cli import demo, hash_, info, push, serve
from weightwire.cli.failures import (
    INTERRUPTED,
    PIPE_CLOSED,
    TERMINATED,
    USAGE,
    Failure,
    as_failure,
    debug,
    say,
)
from weightwire.cli.output import StdoutClosed, note
from weightwire.cli.signals import Terminated
from weightwire.errors import ConfigError

__all__ = ["main"]

# What newer click raises for a bare ``weightwire``; its message is the whole help.
_NO_ARGUMENTS: tuple[type[click.UsageError], ...] = tuple(
    kind for kind in (getattr(click.exceptions, "NoArgsIsHelpError", None),) if kind is not None
)
_LEVELS = ("debug", "info", "warning", "error")


class _Interrupted(Exception):
    """Ctrl-C, in a form click does not act on."""


class _Stopped(Exception):
    """SIGTERM, likewise."""


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
            raise _Stopped from error
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
        try:
            code = super().main(words, prog_name or "weightwire", complete_var, standalone_mode=False, **extra)
        except StdoutClosed:
            sys.exit(PIPE_CLOSED)
        except (click.exceptions.Abort, KeyboardInterrupt, _Interrupted):
            note("weightwire: interrupted")
            sys.exit(INTERRUPTED)
        except _Stopped:
            sys.exit(TERMINATED)
        except _NO_ARGUMENTS as error:
            note(error.format_message())
            sys.exit(USAGE)
        except (Failure, click.ClickException) as error:
            sys.exit(say(as_failure(error), json=json))
        sys.exit(code if isinstance(code, int) else 0)


def _start_logging(verb: str | None) -> None:
    """Send the library's log to stderr: here and nowhere else, since a library does not configure logging.

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
    logger.setLevel(name.upper())
    if not logger.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


class _StderrHandler(logging.Handler):
    """Write records to whatever stderr is at the moment, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        note(self.format(record))


@click.group("weightwire", cls=_Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="weightwire", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Move model weights to the machines that will run them.

    weightwire speaks the ggml RPC protocol (llama.cpp's --rpc), as client and as server.

    Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 transfer failed, 2 usage, 3 this environment
    cannot do it, 4 content wrong.
    """
    _start_logging(context.invoked_subcommand)


for _verb in (serve.serve, push.push, hash_.hash_, info.info, demo.demo):
    main.add_command(_verb)
