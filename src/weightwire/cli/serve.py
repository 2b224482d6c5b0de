"""``weightwire serve``: take weights from whoever connects."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, Self

import click

from weightwire.cli.failures import ENVIRONMENT, Failure, by_signal, cannot_here
from weightwire.cli.options import SIZE, VERSION, WholeNumber, check_protocol, help_, json_output, optimized
from weightwire.cli.output import StdoutClosed, StdoutFailed, line, note, object_
from weightwire.config import CACHE_VERIFY_MODES, RETAIN_MODES, TRANSPORTS, ServerConfig
from weightwire.errors import ConfigError

if TYPE_CHECKING:
    from weightwire.metrics import MetricsEndpoint
    from weightwire.profile import LoadProfile
    from weightwire.server import Server

__all__ = ["serve"]

_LOOKS: Final = 3


@click.command(add_help_option=False)
@click.option("--host", metavar="H", help="Address to listen on. [WEIGHTWIRE_SERVER_HOST; default: 127.0.0.1]")
@click.option(
    "--port",
    type=WholeNumber(0, 65535),
    metavar="P",
    help="Port to listen on; 0 takes a free one. [WEIGHTWIRE_SERVER_PORT; default: 50052]",
)
@click.option(
    "--cache",
    metavar="DIR",
    help="Keep a tensor cache in DIR itself, in stock form. [WEIGHTWIRE_SERVER_CACHE; default: no cache]",
)
@click.option(
    "--cache-verify",
    type=click.Choice(CACHE_VERIFY_MODES),
    help="Check an entry's size and hash before it is used, or its size only. "
    "[WEIGHTWIRE_SERVER_CACHE_VERIFY; default: content]",
)
@click.option(
    "--protocol",
    type=VERSION,
    metavar="V",
    help="Protocol version to speak, 1.0 to 8.0. [WEIGHTWIRE_SERVER_PROTOCOL; default: 7.0.0]",
)
@click.option(
    "--retain",
    type=click.Choice(RETAIN_MODES),
    help="Keep tensors while their client is connected, or as long as this process runs. "
    "[WEIGHTWIRE_SERVER_RETAIN; default: connection]",
)
@click.option(
    "--memory",
    type=SIZE,
    metavar="SIZE",
    help="Give out at most this much memory, such as 16GiB. [WEIGHTWIRE_SERVER_MEMORY; default: what is available]",
)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    help="auto: RDMA with clients that offer it, TCP otherwise; rdma: refuse other clients. "
    "[WEIGHTWIRE_SERVER_TRANSPORT; default: auto]",
)
@click.option(
    "--metrics-port",
    type=WholeNumber(0, 65535),
    metavar="P",
    help="Serve metrics for Prometheus at http://H:P/metrics; 0 takes a free port. [WEIGHTWIRE_SERVER_METRICS_PORT; "
    "default: no metrics]",
)
@click.option(
    "--metrics-host",
    metavar="H",
    help="Address to serve metrics on. [WEIGHTWIRE_SERVER_METRICS_HOST; default: 127.0.0.1]",
)
@click.option(
    "--profile",
    "show_profile",
    is_flag=True,
    help="Say on stderr what each connection spent its time on, when it ends; with --json on stdout, one object for "
    "each. [GGML_RPC_LOADPROF=1 does so on stderr]",
)
@optimized
@click.option("--lifeline", is_flag=True, hidden=True, help="End when stdin ends: for a parent that may be killed.")
@json_output
@help_
def serve(
    host: str | None,
    port: int | None,
    cache: str | None,
    cache_verify: str | None,
    protocol: str | None,
    retain: str | None,
    memory: int | None,
    transport: str | None,
    metrics_port: int | None,
    metrics_host: str | None,
    show_profile: bool,
    optimized: bool | None,
    lifeline: bool,
    as_json: bool,
) -> None:
    """Store the weights that clients push, until SIGTERM or Ctrl-C.

    Prints the endpoint it listens on, one line each, as soon as clients can connect. The protocol has neither
    authentication nor encryption: listen on trusted networks only.
    """
    from weightwire.server import Server

    config = ServerConfig.resolve(
        host=host,
        port=port,
        cache=cache,
        cache_verify=cache_verify,
        protocol=protocol,
        retain=retain,
        memory=memory,
        transport=transport,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        optimized=optimized,
    )
    check_protocol(config.protocol, "WEIGHTWIRE_SERVER_PROTOCOL")
    profiles = _Profiles() if show_profile and as_json else None
    with _Stop() as stop, contextlib.ExitStack() as unmaking, contextlib.ExitStack() as ending:
        directory = _cache_directory(config.cache, unmaking) if config.cache is not None else None
        here = cannot_here("choose another --port (0 takes a free one); --host must be an address of this machine")
        with stop.at_once(), here:
            server = Server(
                config.host,
                config.port,
                cache=directory,
                cache_verify=config.cache_verify,
                protocol=config.protocol,
                retain=config.retain,
                memory=config.memory,
                transport=config.transport,
                profile=False if profiles else show_profile or None,
                on_profile=profiles.write if profiles else None,
                optimized=config.optimized,
            )
            # Before anybody can connect: if they cannot be had, no client is cut off.
            metrics = ending.enter_context(_metrics(server, config)) if config.metrics_port is not None else None
            ending.callback(server.close)
            server.start()
            unmaking.pop_all()
        try:
            _announce(server, config, metrics, as_json)
            if profiles:
                profiles.announced.set()
            stop.wait(lifeline=lifeline)
        finally:
            if profiles:
                profiles.announced.set()
    if stop.signals and stop.signals[0] != signal.SIGTERM:
        sys.exit(by_signal(stop.signals[0]))


def _metrics(server: Server, config: ServerConfig) -> MetricsEndpoint:
    try:
        from weightwire.metrics import MetricsEndpoint
    except ModuleNotFoundError as error:
        raise Failure(
            error, ENVIRONMENT,
            detail="--metrics-port needs prometheus_client, which is not installed",
            hint="pip install prometheus_client, or leave --metrics-port out",
        ) from error  # fmt: skip
    assert config.metrics_port is not None
    with cannot_here("choose another --metrics-port (0 takes a free one)"):
        return MetricsEndpoint(server, config.metrics_host, config.metrics_port)


def _announce(server: Server, config: ServerConfig, metrics: MetricsEndpoint | None, as_json: bool) -> None:
    endpoints = list(server.endpoints)
    if not as_json:
        for endpoint in endpoints:
            line(endpoint)
        if metrics is not None:
            note(f"weightwire: metrics at {metrics.url}")
        return
    object_(
        {
            "endpoint": endpoints[0],
            "endpoints": endpoints,
            "port": server.port,
            "protocol": config.protocol,
            "cache": config.cache,
            "cache_verify": config.cache_verify,
            "retain": config.retain,
            "memory": config.memory,
            "transport": config.transport,
            "metrics": metrics.url if metrics is not None else None,
            "metrics_port": metrics.port if metrics is not None else None,
            "optimized": config.optimized,
            "pid": os.getpid(),
        }
    )


class _Profiles:
    """Objects of what connections spent their time on, on stdout, one at a time and none before the announcement."""

    def __init__(self) -> None:
        self.announced = threading.Event()
        self._lock = threading.Lock()

    def write(self, profile: LoadProfile) -> None:
        """Whoever has stopped reading them does not want them."""
        if profile.loaded:
            self.announced.wait()
            with self._lock, contextlib.suppress(StdoutClosed, StdoutFailed):
                object_({"profile": profile.as_dict()})


def _cache_directory(text: str, unmaking: contextlib.ExitStack) -> Path:
    """Make the cache directory if need be and see that entries can be written there; ``unmaking`` undoes that."""
    from weightwire.cache.directory import WRITABLE, checked_directory, make_directory, unmake_directories

    try:
        directory = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--cache: {text}: {error}", hint="write the path without ~") from error
    for _ in range(_LOOKS):
        unmaking.callback(unmake_directories, make_directory(checked_directory(directory)))
        if os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            return directory
        if os.path.isdir(directory):
            break
        # Another server made it, and has unmade it since because it could not begin.
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
    raise Failure(refused, ENVIRONMENT, detail=f"--cache: cannot write to {directory}", hint=WRITABLE)


class _Stopped(BaseException):
    """A signal ends the server before it serves; not an Exception, so that nothing swallows it."""


class _Stop:
    """Wait for a signal that ends the server.

    The interpreter itself writes to a pipe when the signal comes: a handler in Python would never run if that is
    between the last look at pending signals and the wait. A signal that is being ignored stays ignored: SIGINT in a
    shell's background jobs, SIGHUP under nohup.
    """

    _raising = False

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> bool:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)
        return kind is _Stopped

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if self._raising:
            # Those that follow must not interrupt what is undone.
            self._raising = False
            raise _Stopped

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, where a name server may be waited for, a signal leaves the ``with`` block of this object at once."""
        self._raising = True
        try:
            if self.signals:
                raise _Stopped
            yield
        finally:
            self._raising = False

    def wait(self, *, lifeline: bool) -> None:
        """Return at a signal, or with ``lifeline`` when stdin ends, as it does however its holder dies."""
        watched = [self._reader, 0] if lifeline else [self._reader]
        while not self.signals:
            ready, _, _ = select.select(watched, [], [])
            if self._reader in ready:
                os.read(self._reader, 4096)
            elif self._stdin_ended():
                return

    @staticmethod
    def _stdin_ended() -> bool:
        try:
            return not os.read(0, 4096)
        except OSError:
            return True
