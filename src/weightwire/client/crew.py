"""One thread for each of several servers: connect, work, and end together when somebody wants to stop."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from weightwire.client.connection import Connection
from weightwire.client.layers import parse_layers
from weightwire.config import shown
from weightwire.errors import ConfigError, TransportError
from weightwire.model.choosing import compile_include
from weightwire.threads import Thread, start
from weightwire.transport.address import format_endpoint, parse_endpoint

if TYPE_CHECKING:
    from weightwire.client.options import ProgressCallback

__all__ = ["ONCE", "Member", "SummedProgress", "Target", "as_targets", "run_all"]

_R = TypeVar("_R")

_LOOK: Final = 0.2
"""Seconds between two looks at whether something has to stop everybody."""

ONCE: Final = "a stock server serves one client at a time: give each server once, with all that is for it"
"""What to do about a server that is given twice."""

_ENDPOINT: Final = "give HOST:PORT or a weightwire.Target"
_TARGET: Final = 'such as Target("192.0.2.7:50052", layers="20-39")'


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and what is for it: the tensors that ``include`` (a regular expression) and ``layers`` (``"20-39"``)
    both choose, all of them where neither is given, for its ``device``. ConfigError for a wrong type, an endpoint that
    cannot be read, and what is no expression or no layers; whether a model has such tensors is found out with it.
    """

    endpoint: str
    include: str | None = None
    layers: str | None = None
    device: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no text or number where one belongs, and texts that say nothing."""
        for name in ("endpoint", "include", "layers"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "endpoint"):
                raise ConfigError(f"target: {name}={reprlib.repr(value)} is not text", hint=_TARGET)
        if not isinstance(self.device, int) or isinstance(self.device, bool):
            raise ConfigError(f"target: device={reprlib.repr(self.device)} is not a whole number", hint=_TARGET)
        parse_endpoint(self.endpoint)
        compile_include(self.include)
        parse_layers(self.layers)


def as_targets(targets: str | Target | Iterable[str | Target]) -> list[Target]:
    """``targets`` as a list; a text is the endpoint of a server that gets everything.

    Raises ConfigError for none at all, an endpoint that cannot be read, and one that occurs twice: a stock server
    serves one client at a time, so the second connection would wait for the first until its timeout. The texts are
    compared; what they lead to is, where it is connected to (`weightwire.client.peers`).
    """
    if not isinstance(targets, Iterable | Target):
        raise ConfigError(f"targets: {shown(targets)} is no endpoint", hint=_ENDPOINT)
    given = [targets] if isinstance(targets, (str, Target)) else list(targets)
    made: list[Target] = []
    seen: set[str] = set()
    for target in given:
        if isinstance(target, str):
            target = Target(target)
        elif not isinstance(target, Target):
            raise ConfigError(f"targets: {shown(target)} is no endpoint", hint=_ENDPOINT)
        name = format_endpoint(*parse_endpoint(target.endpoint))
        if name in seen:
            raise ConfigError(
                f"targets: {name} is there twice",
                hint=ONCE,
            )
        seen.add(name)
        made.append(target)
    if not made:
        raise ConfigError("targets: there is none", hint="give at least one HOST:PORT")
    return made


class Member(Generic[_R]):
    """One of `run_all`: the ``connection`` it worked on (None if there was none), its ``result``, or its ``error``."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.connection: Connection | None = None
        self.result: _R | None = None
        self.error: Exception | None = None


def run_all(
    targets: Sequence[Target],
    connect: Callable[[Target], Connection],
    work: Callable[[int, Connection], _R],
    fatal: Callable[[], BaseException | None] = lambda: None,
) -> list[Member[_R]]:
    """``work(number, connection)`` for each of ``targets``, all at once; returns what became of each, in their order.

    An Exception of one is its own matter: the others go on. Whatever else is raised by one, an exception that
    ``fatal`` has, and an interrupt of the caller end all of them: their connections are closed, and when nobody works
    any more it is raised. Who is still connecting then is not waited for; that connection is closed once it is made,
    within its timeout. A connection whose work failed is closed, the others stay open.
    """
    crew = _Crew(targets, connect, work)
    try:
        crew.start()
        for thread in crew.threads:
            while not thread.ended():
                thread.join(_LOOK)
                _raise(crew.fatal or fatal())
        _raise(crew.fatal or fatal())
    except BaseException:
        crew.stop()
        raise
    return crew.members


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


class _Crew(Generic[_R]):
    def __init__(
        self,
        targets: Sequence[Target],
        connect: Callable[[Target], Connection],
        work: Callable[[int, Connection], _R],
    ) -> None:
        self.members: list[Member[_R]] = [Member(target) for target in targets]
        self.fatal: BaseException | None = None
        self._connect = connect
        self._work = work
        self._lock = threading.Lock()
        self._stopped = False
        self.threads: list[Thread] = []
        """One for each member, in their order, as far as they have been started."""

    def start(self) -> None:
        for number, member in enumerate(self.members):
            # A daemon, because it may be left behind while it connects.
            thread = Thread(
                target=self._run, args=(number, member), name=f"weightwire-to-{member.target.endpoint}", daemon=True
            )
            # Before it is started: an interrupt may come right after.
            self.threads.append(thread)
            try:
                start(thread, member.target.endpoint)
            except TransportError as error:
                member.error = error

    def stop(self) -> None:
        """Close every connection, and wait for those who work on one."""
        with self._lock:
            self._stopped = True
            working = [number for number, member in enumerate(self.members) if member.connection is not None]
            for number in working:
                connection = self.members[number].connection
                assert connection is not None
                connection.close()
        for number in working:
            self.threads[number].join()

    def _run(self, number: int, member: Member[_R]) -> None:
        try:
            connection = self._connect(member.target)
            with self._lock:
                if self._stopped:
                    connection.close()
                    return
                member.connection = connection
            try:
                member.result = self._work(number, connection)
            except BaseException:
                connection.close()
                raise
        except Exception as error:
            member.error = error
        except BaseException as error:
            self.fatal = self.fatal or error


class SummedProgress:
    """One callback of (name, done, total) for the work of several threads, called by one of them at a time.

    ``totals`` are the bytes of each; each reports them ``rounds`` times over (once more where it verifies), and the
    sum counts them all. What the callback raises is kept in ``error``, for `run_all` to end the rest.
    """

    def __init__(self, progress: ProgressCallback | None, totals: Sequence[int], rounds: int = 1) -> None:
        if progress is not None and not callable(progress):
            raise ConfigError("progress: it cannot be called", hint="give a function of (name, done, total)")
        self.error: BaseException | None = None
        self._progress = progress
        self._totals = totals
        self._rounds = rounds
        self._rounds_done = [0] * len(totals)
        self._last = [0] * len(totals)
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Bytes of all, every round counted."""
        return sum(self._totals) * self._rounds

    def of(self, number: int) -> ProgressCallback | None:
        """The callback for the work on target ``number``."""
        if self._progress is None:
            return None

        def report(name: str, done: int, total: int) -> None:
            with self._lock:
                if done < self._last[number] and self._rounds_done[number] < self._rounds - 1:
                    self._rounds_done[number] += 1
                self._last[number] = done
                self._tell(name)

        return report

    def finish(self, number: int) -> None:
        """Target ``number`` is through with all of its rounds."""
        if self._progress is not None:
            with self._lock:
                before = self._rounds_done[number], self._last[number]
                self._rounds_done[number], self._last[number] = self._rounds - 1, self._totals[number]
                if before != (self._rounds_done[number], self._last[number]):
                    self._tell("")

    def _tell(self, name: str) -> None:
        assert self._progress is not None
        done = sum(
            rounds * total + last
            for rounds, total, last in zip(self._rounds_done, self._totals, self._last, strict=True)
        )
        try:
            self._progress(name, done, self.total)
        except BaseException as error:
            self.error = self.error or error
            raise
