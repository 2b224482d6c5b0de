"""``weightwire demo``: the whole job on one machine, every byte checked."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from weightwire.cli.embedded import EmbeddedServer
from weightwire.cli.failures import ENVIRONMENT, Failure, as_usage, cannot_here
from weightwire.cli.options import SIZE, help_, json_output, optimized, profile, quiet, timeout, transport
from weightwire.cli.output import human_bytes, line, note, object_, printable
from weightwire.cli.progress import Progress, choose_display
from weightwire.cli.report import push_lines, push_object
from weightwire.cli.signals import deferred_signals, raising_on_signals
from weightwire.config import ClientConfig, parse_size
from weightwire.errors import ConfigError, IntegrityError, ModelError

__all__ = ["demo"]

DEFAULT_SIZE = parse_size("1GiB")
# What the two processes need beside the tensors, and a file beside its tensors' bytes.
MEMORY_BESIDE = parse_size("256MiB")
DISK_BESIDE = parse_size("16MiB")


@click.command(add_help_option=False)
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--size", type=SIZE, metavar="SIZE", help="Size of the generated model, such as 512MiB. [default: 1GiB]")
@click.option("--keep", is_flag=True, help="Keep the generated model and say where it is.")
@timeout
@transport
@profile
@optimized
@json_output
@quiet
@help_
def demo(
    model: str | None,
    size: int | None,
    keep: bool,
    timeout: float | None,
    transport: str | None,
    show_profile: bool,
    optimized: bool | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Push a model to a server on this machine and verify every byte.

    Starts a server in a process of its own, pushes MODEL to it, reads everything back and says what the time went on.
    It listens on 127.0.0.1; with --transport rdma, where no device leads there, on a device's address.
    Without MODEL a GGUF file is generated: 876 tensors, sized like those of a 27B model scaled to --size.
    """
    if model is not None and (size is not None or keep):
        raise ConfigError("--size and --keep are for the generated model", hint="leave them out, or leave out MODEL")
    config = ClientConfig.resolve(
        timeout=timeout, transport=transport, optimized=optimized, settings=("timeout", "transport", "optimized")
    )
    size = DEFAULT_SIZE if size is None else _large_enough(size)
    with raising_on_signals(), ExitStack() as stack:
        host = _host(config.transport)
        if model is None:
            path, generated = _generate(stack, size, keep, quiet)
        else:
            path, generated = model, None
        report, texts = _run(path, config, host, show_profile or None, quiet)
        # In here, so that where the model is kept is said even if this cannot be.
        report = {"model": path, "generated": generated is not None, "kept": generated is not None and keep} | report
        if as_json:
            object_(report)
            return
        if generated is not None:
            where = f", kept at {path}" if keep else ""
            line(f"model: generated in {generated:.2f} s{printable(where)}")
        else:
            line(f"model: {printable(path)}")
        for text in texts:
            line(text)


def _large_enough(size: int) -> int:
    from weightwire.model.synthetic import MIN_NBYTES

    if size < MIN_NBYTES:
        raise ConfigError(f"--size: {size} bytes is less than {human_bytes(MIN_NBYTES)}", hint="876 tensors need room")
    return size


class _Folder:
    """Where the generated model is: it goes when the verb ends, unless it ``stays``. Where, a verb that fails says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = str(path / "synthetic.gguf")
        self.stays = False

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """For `ExitStack.push`."""
        with deferred_signals():
            if not self.stays:
                shutil.rmtree(self.path, ignore_errors=True)
                if self.path.exists():
                    note(f"weightwire: could not remove {printable(str(self.path))}")
            elif error is not None:
                note(f"weightwire: the generated model is kept at {printable(self.model)}")


def _generate(stack: ExitStack, size: int, keep: bool, quiet: bool) -> tuple[str, float]:
    """Write the synthetic model to a directory that goes with ``stack``; its path, and the seconds it took."""
    from weightwire.model.synthetic import write_synthetic_gguf

    parent = _parent()
    _check_disk(parent, size)
    _check_memory(size)
    folder = _Folder(Path(parent, f"weightwire-demo-{secrets.token_hex(8)}"))
    own = stack.enter_context(ExitStack())
    # Before there is something to remove, so that no interrupt comes between the two.
    own.push(folder.leave)
    with cannot_here("set TMPDIR to a directory that can be written"):
        try:
            folder.path.mkdir(0o700)
        except FileExistsError:
            own.pop_all()
            raise
    started = time.monotonic()
    try:
        with Progress("generating", size, choose_display(quiet)) as progress:
            write_synthetic_gguf(folder.model, size, progress=progress.report)
    except ModelError as error:
        raise Failure(
            error, ENVIRONMENT, hint="set TMPDIR to a directory with room, or choose a smaller --size"
        ) from error
    folder.stays = keep
    return folder.model, time.monotonic() - started


def _parent() -> str:
    """Where the generated model goes: $TMPDIR, or where the system has temporary files. ConfigError if TMPDIR cannot be
    used: another disk may not be the one that has room.
    """
    if named := os.environ.get("TMPDIR"):
        if not (os.path.isdir(named) and os.access(named, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"environment variable TMPDIR: {named!r} is no directory that can be written",
                hint="correct or unset TMPDIR; the generated model goes there",
            )
        return os.path.abspath(named)
    # It tries out where it can write, and would leave a file behind.
    with deferred_signals():
        return tempfile.gettempdir()


def _run(
    path: str, config: ClientConfig, host: str, profile: bool | None, quiet: bool
) -> tuple[dict[str, Any], list[str]]:
    """Serve at ``host``, push and verify ``path``; what there is to say about it, as an object and as lines."""
    from weightwire.client import connect
    from weightwire.client.plan import select
    from weightwire.model import open_model

    with as_usage():
        opened = open_model(path)
    with opened:
        with as_usage():
            select(opened, None)
        _check_memory(opened.nbytes)
        with (
            EmbeddedServer(
                ("--transport", config.transport, "--optimized" if config.optimized else "--no-optimized"),
                host=host,
            ) as server,
            connect(
                server.endpoint,
                timeout=config.timeout,
                transport=config.transport,
                profile=profile,
                optimized=config.optimized,
            ) as connection,
            Progress("pushing", opened.nbytes, choose_display(quiet), then="verifying") as progress,
        ):
            result = connection.push(opened, cache="never", verify=True, progress=progress.report)
            summary = result.summary
            if not summary.verified:
                raise IntegrityError("the push ended without having verified every byte")
            return push_object(connection, summary), [*push_lines(connection, summary), *summary.profile.lines()]


def _host(transport: str) -> str:
    """Where the server listens: on loopback, or on a device's address where RDMA is required and loopback has none."""
    if transport != "rdma":
        return "127.0.0.1"
    from weightwire.transport.rdma import usable_address

    with cannot_here():
        return usable_address(("127.0.0.1", "::"))


def _check_disk(directory: str, size: int) -> None:
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise Failure(error, ENVIRONMENT, detail=f"{directory}: {error.strerror}", hint="set TMPDIR") from error
    needed = size + DISK_BESIDE
    if free < needed:
        raise _too_small(
            f"{directory} has {free} bytes free ({human_bytes(free)}), "
            f"the model needs {needed} ({human_bytes(needed)})",
            "set TMPDIR to a directory with room, or choose a smaller --size",
        )


def _check_memory(size: int) -> None:
    from weightwire.transport.memory import available_memory

    available = available_memory()
    needed = size + MEMORY_BESIDE
    if available < needed:
        raise _too_small(
            f"{available} bytes of memory are available ({human_bytes(available)}), the server needs {needed} "
            f"({human_bytes(needed)}) to hold the model",
            "choose a smaller --size or model, or free memory",
        )


def _too_small(detail: str, hint: str) -> Failure:
    return Failure(MemoryError(detail), ENVIRONMENT, detail=detail, hint=hint, kind="NotEnoughRoom")
