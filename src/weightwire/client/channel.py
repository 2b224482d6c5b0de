"""One connection's stream in step: requests out, answers in, in order, by one thread at a time.

An answer belongs to the oldest request without one (docs/protocol.md, section 1), so what is expected is a queue.
Once a message was cut or an answer did not fit, nothing later could be trusted; the stream is closed and says so from
then on.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from weightwire.errors import (
    CompletionError,
    PeerClosed,
    ProtocolError,
    TransferTimeout,
    TransportError,
    WeightwireError,
)
from weightwire.ranges import FileRange
from weightwire.transport.profiling import LoadRecorder
from weightwire.wire.commands import Command
from weightwire.wire.framing import RESPONSE_HEADER_BYTES, parse_u64, request_header

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from weightwire.transport.base import ByteStream
    from weightwire.wire.dialect import Dialect

__all__ = ["MAX_OUTSTANDING", "Channel", "Request"]

_log = logging.getLogger(__name__)

MAX_OUTSTANDING: Final = 32
"""Most answers left unread, so that neither side ever waits for the other to empty a full socket."""

_REFUSED = "a ggml server closes the connection when it refuses a request, and its log says why"
_STALLED = "the server or the network stalled; if it is only slow, allow a longer timeout"


class _Expected(NamedTuple):
    command: Command
    nbytes: int
    tensor: str | None
    into: memoryview | None
    then: Callable[[bytes], None] | None
    since: int


class Request(NamedTuple):
    """A request without its 9-byte head; ``nbytes`` of its answer's payload if the dialect does not say, and ``then``
    gets the payload.
    """

    command: Command
    payload: bytes
    nbytes: int | None = None
    then: Callable[[bytes], None] | None = None


class Channel:
    """The stream of one connection and what is still expected on it. Everything but `close` needs `exclusive`.

    ``recorder`` has the connection's profile; one that is given counts from here on.
    """

    def __init__(self, stream: ByteStream, dialect: Dialect, recorder: LoadRecorder | None = None) -> None:
        self.dialect = dialect
        self.endpoint = stream.endpoint
        self.recorder = LoadRecorder() if recorder is None else recorder
        self.recorder.watch(stream)
        self._stream = stream
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._owner: int | None = None
        self._pending: deque[_Expected] = deque()
        self._cut = False
        self._closed = False
        self._failure = ""

    @property
    def closed(self) -> bool:
        """Whether the connection was closed, by the caller or after a failure."""
        return self._closed

    @property
    def outstanding(self) -> int:
        """How many answers are still to come."""
        return len(self._pending)

    @contextmanager
    def exclusive(self, operation: str) -> Iterator[None]:
        """Hold the stream for ``operation``; an error that leaves it out of step closes it.

        TransportError if the connection is closed, if this thread is already inside an operation (a progress
        callback), or in a process that was forked after it was made.
        """
        # First: the lock of a thread that is not in this process is never released.
        self.check_open(operation)
        if self._owner == threading.get_ident():
            raise TransportError(
                f"{operation} was called on the connection to {self.endpoint} from inside another call on it",
                endpoint=self.endpoint,
                operation=operation,
                hint="a progress callback must use another connection",
            )
        with self._lock:
            try:
                self.check_open(operation)
                self._owner = threading.get_ident()
                yield
            except BaseException as error:
                if not self.survives(error):
                    self.abandon(error)
                raise
            finally:
                self._owner = None

    def survives(self, error: BaseException) -> bool:
        """Whether the stream can still be used after ``error``.

        Only after one that was raised on purpose, between messages, and not because of the server: an interrupt may
        have come between a request and the note that its answer is due.
        """
        mistrusted = (ProtocolError, TransportError, TransferTimeout)
        in_step = not (self._closed or self._cut or self._pending)
        return in_step and isinstance(error, WeightwireError) and not isinstance(error, mistrusted)

    def check_open(self, operation: str) -> None:
        """TransportError if the connection is closed, or another process's."""
        if self._process != os.getpid():
            raise TransportError(
                f"the connection to {self.endpoint} belongs to the process that was forked",
                endpoint=self.endpoint,
                operation=operation,
                errno=errno.EBADF,
                hint="connect again in this process",
            )
        if not self._closed:
            return
        why = f"was given up after: {self._failure}" if self._failure else "is closed"
        raise TransportError(
            f"the connection to {self.endpoint} {why}",
            endpoint=self.endpoint,
            operation=operation,
            hint="connect again; the server has freed what this connection had allocated",
        )

    def abandon(self, error: BaseException) -> None:
        """Close the stream because of ``error``, which later calls will name."""
        if not self._closed:
            # Its text and not the error itself, whose traceback would keep the caller's arrays alive.
            self._failure = getattr(error, "detail", "") or str(error) or type(error).__name__
        self.recorder.sample()
        self._closed = True
        self._stream.close()

    def close(self) -> None:
        """Close the connection. Idempotent, from any thread, never blocks, never raises.

        A thread that waits inside a call is woken and gets TransportError.
        """
        self.recorder.sample()
        self._closed = True
        # The stream gives its descriptor back only once no call is inside it.
        self._stream.close()

    # Requests.

    def send(self, *parts: Buffer) -> None:
        """Send whole messages, in one go."""
        self._cut = True
        self._stream.send(*parts)
        self._cut = False

    def begin(self, head: Buffer, payload: Buffer | FileRange) -> None:
        """Send ``head`` and the first slice of a payload that `more` and then `end` complete."""
        self._cut = True
        self._put((head,), payload)

    def more(self, payload: Buffer | FileRange) -> None:
        """Send the next slice of the payload that `begin` started."""
        self._put((), payload)

    def end(self) -> None:
        """The message that `begin` started is complete."""
        self._cut = False

    def sent_tensors(self, names: Sequence[str], nbytes: int, since: int) -> None:
        """SET_TENSOR of the tensors called ``names`` has been sent since then, with ``nbytes`` bytes of data in all.

        Counts that, and queues the answers if there are any.
        """
        recorder = self.recorder
        recorder.set_tensor_bytes += nbytes
        if not self.dialect.answered(Command.SET_TENSOR):
            recorder.command(Command.SET_TENSOR, since, len(names))
            return
        for name in names:
            self.expect(Command.SET_TENSOR, 0, tensor=name, since=since)

    def _put(self, head: Sequence[Buffer], payload: Buffer | FileRange) -> None:
        if isinstance(payload, FileRange):
            self._stream.send_range(head, payload)
        else:
            self._stream.send(*head, payload)

    def post(
        self,
        command: Command,
        payload: bytes,
        *,
        tensor: str | None = None,
        then: Callable[[bytes], None] | None = None,
    ) -> None:
        """Send a fixed-size request; queue its answer if it has one (``then`` gets the payload once it is read)."""
        since = self.recorder.now()
        try:
            self.send(request_header(command, len(payload)) + payload)
        except WeightwireError as error:
            raise self.explain(error, command.name, tensor=tensor, position="before", bytes_done=0) from error.__cause__
        if self.dialect.answered(command):
            self.expect(command, self.dialect.answer_bytes(command) or 0, tensor=tensor, then=then, since=since)
        else:
            self.recorder.command(command, since)

    def post_all(self, requests: Sequence[Request], *, tensor: str) -> None:
        """Send small requests about one tensor in one go; queue the answers of those that have one."""
        parts = [request_header(each.command, len(each.payload)) + each.payload for each in requests]
        since = self.recorder.now()
        try:
            self.send(b"".join(parts))
        except WeightwireError as error:
            name = requests[-1].command.name if len(requests) == 1 else Command.SET_TENSOR_HASH.name
            raise self.explain(error, name, tensor=tensor, position="before", bytes_done=0) from error.__cause__
        for each in requests:
            if each.command == Command.SET_TENSOR:
                self.recorder.set_tensor_bytes += len(each.payload) - self.dialect.set_tensor_header_bytes
            if self.dialect.answered(each.command):
                nbytes = self.dialect.answer_bytes(each.command) if each.nbytes is None else each.nbytes
                self.expect(each.command, nbytes or 0, tensor=tensor, then=each.then, since=since)
            else:
                self.recorder.command(each.command, since)

    def post_read(self, payload: bytes, into: memoryview, *, tensor: str) -> None:
        """Send GET_TENSOR, whose answer fills ``into`` when its turn comes."""
        since = self.recorder.now()
        try:
            self.send(request_header(Command.GET_TENSOR, len(payload)) + payload)
        except WeightwireError as error:
            raise self.explain(error, "GET_TENSOR", tensor=tensor, position="before", bytes_done=0) from error.__cause__
        self.expect(Command.GET_TENSOR, into.nbytes, tensor=tensor, into=into, since=since)

    # Answers.

    def expect(
        self,
        command: Command,
        nbytes: int,
        *,
        tensor: str | None = None,
        into: memoryview | None = None,
        then: Callable[[bytes], None] | None = None,
        since: int | None = None,
    ) -> None:
        """Queue an answer of ``nbytes`` payload bytes to a request that was sent at ``since`` (`LoadRecorder.now`)."""
        since = self.recorder.now() if since is None else since
        self._pending.append(_Expected(command, nbytes, tensor, into, then, since))

    def settle(self, limit: int = 0) -> None:
        """Read answers until at most ``limit`` are left."""
        while len(self._pending) > limit:
            self.read_answer()

    def read_answer(self) -> bytes:
        """Read the oldest answer; returns its payload (empty if it went into a view).

        ProtocolError if its size is not the one expected.
        """
        expected = self._pending[0]
        command, nbytes, tensor, into, then, since = expected
        self._cut = True
        payload = b""
        try:
            size = parse_u64(self._stream.recv(RESPONSE_HEADER_BYTES))
            if size != nbytes:
                raise ProtocolError(
                    f"{self.endpoint} answered {command.name} with {size} bytes where {nbytes} were expected",
                    hint=f"the server may not really speak protocol {self.dialect.text}",
                )
            if into is not None:
                self._stream.recv_into(into)
            elif nbytes:
                payload = self._stream.recv(nbytes)
        except (PeerClosed, TransferTimeout) as error:
            raise self.explain(
                error, f"the answer to {command.name}", tensor=tensor, position="after", bytes_done=error.bytes_done
            ) from error.__cause__
        except TransportError as error:
            raise self.explain(error, f"the answer to {command.name}", tensor=tensor) from error.__cause__
        self._pending.popleft()
        self._cut = False
        self.recorder.command(command, since)
        if then is not None:
            then(payload)
        return payload

    @contextmanager
    def watched(self, watcher: Callable[[], object]) -> Iterator[None]:
        """Inside, ``watcher`` is called some ten times a second while the server is waited for; what it raises ends the
        wait, and with it the connection.
        """
        self._stream.watcher = watcher
        try:
            yield
        finally:
            self._stream.watcher = None

    def call(self, command: Command, payload: bytes) -> bytes:
        """Send one request that is answered and read its answer. Nothing else may be outstanding."""
        self.post(command, payload)
        return self.read_answer()

    # Failures.

    def check_peer(self, during: str, *, tensor: str) -> None:
        """PeerClosed if the server has closed or lost the connection, TransportError if this side did.

        For one who neither sends nor reads for long: a server that goes meanwhile says so only to those who ask.
        """
        if self._stream.peer_gone():
            gone = PeerClosed("", endpoint=self.endpoint, operation="poll")
            raise self.explain(gone, during, tensor=tensor, position="after" if self._pending else "before")

    def explain(
        self,
        error: WeightwireError,
        during: str,
        *,
        tensor: str | None = None,
        position: str = "",
        bytes_done: int | None = None,
        nbytes: int | None = None,
    ) -> WeightwireError:
        """Give a stream's error what only the client knows: what was in flight and how far it had come.

        Returns ``error`` itself, changed, or another in its place when the caller's own `close` was the cause.
        """
        if self._closed and not self._failure:
            return TransportError(
                f"the connection to {self.endpoint} was closed by close() during {during}",
                endpoint=self.endpoint,
                operation=during,
            )
        where = f"during {during}"
        if tensor is not None:
            where += f" of tensor {tensor!r}"
        if isinstance(error, (PeerClosed, TransferTimeout)):
            # Told anew: what the stream says counts the bytes of one call, which may be a slice or many messages.
            error.tensor = tensor
            if bytes_done is not None:
                error.bytes_done = bytes_done
                if bytes_done or nbytes is not None:
                    where += f", {bytes_done}" + (f" of {nbytes}" if nbytes is not None else "") + " bytes done"
            if isinstance(error, PeerClosed):
                error.position = position or error.position
                how = "reset" if error.errno == errno.ECONNRESET else "closed"
                error.detail = f"{self.endpoint} {how} the connection {where}"
                error.hint = error.hint or _REFUSED
            else:
                error.detail = f"{self.endpoint}: nothing moved for {error.elapsed:.1f} s {where}"
                error.hint = error.hint or _STALLED
            error.args = (error.detail,)
        elif isinstance(error, TransportError):
            if isinstance(error, CompletionError):
                error.tensor = tensor
                error.bytes_done = error.bytes_done if bytes_done is None else bytes_done
            error.detail = f"{error.detail}; {where}"
            error.args = (error.detail,)
        _log.debug("%s: %s", self.endpoint, error)
        return error
