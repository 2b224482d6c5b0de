"""One client, from HELLO to its end: reads requests, has them served, and says why it stopped."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from weightwire.cache.saving import Saver
from weightwire.cache.store import TensorCache
from weightwire.cache.workers import Workers
from weightwire.errors import PeerClosed, ProtocolError, RdmaUnavailable, TransferTimeout, TransportError, VerbsError
from weightwire.profile import LoadProfile, Stage
from weightwire.server.buffers import BufferTable
from weightwire.server.capacity import Capacity, Tally
from weightwire.server.commands import Commands
from weightwire.server.destinations import Destination
from weightwire.server.errors import BadMessage, BadRequest, log_failure
from weightwire.server.filling import Filler
from weightwire.server.plain import PlainFiller, PlainReceiver
from weightwire.server.populate import Populator
from weightwire.server.receive import Receiver
from weightwire.server.served import Registry
from weightwire.server.staging import Staging
from weightwire.server.stats import Counts
from weightwire.transport.base import ByteStream
from weightwire.transport.profiling import LoadRecorder, print_profile
from weightwire.transport.rdma import RING_BYTES, RdmaStream
from weightwire.transport.tcp import TcpStream
from weightwire.transport.upgrade import ASKED_FOR_TCP, Carrier, accept, on_tcp, refused
from weightwire.wire import COMPUTE_COMMANDS, EMPTY_RESPONSE, Command, Dialect, Greeting, parse_u64, response_header
from weightwire.wire.answers import encode_u8_answer
from weightwire.wire.framing import REQUEST_HEADER_BYTES, request_header
from weightwire.wire.hello import NO_CAPS

__all__ = ["Services", "Session"]

_STAGES: Final[Mapping[int, Stage]] = {
    Command.SET_TENSOR: Stage.STAGING,
    Command.SET_TENSOR_2D: Stage.STAGING,
    Command.SET_TENSOR_HASH: Stage.ASK,
    Command.GET_TENSOR: Stage.VERIFY,
    Command.GET_TENSOR_2D: Stage.VERIFY,
}
"""What serving a request is, beside receiving; all others are laying out."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    """What all sessions of a server share. Times in seconds. ``saver`` is there where there is a ``cache``.

    ``on_profile`` is given what a connection spent its time on when it has ended, ``print_profile`` has it printed.
    """

    dialect: Dialect
    greeting: Greeting
    cache: TensorCache | None
    saver: Saver | None
    workers: Workers
    capacity: Capacity
    registry: Registry
    populator: Populator
    destination: Callable[[int, int], Destination]
    hello_timeout: float
    stall_timeout: float
    transport: str
    pinned: Tally
    turned_away: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=64))
    """Hosts without RDMA where it is required, and when."""
    on_profile: Callable[[LoadProfile], object] | None = None
    print_profile: bool = False
    optimized: bool = True


class Session:
    """Serves one client on the thread that calls `run`; `stop` may be called from any other."""

    def __init__(self, stream: TcpStream, services: Services) -> None:
        self.client = stream.endpoint
        self._process = os.getpid()
        self._tcp = stream
        self._stream: ByteStream = stream
        self._services = services
        self._dialect = services.dialect
        self._stopping = False
        self._doing: int = Command.HELLO
        self._inside = False
        self._untried = False
        """Whether the client has been offered RDMA and not been heard there yet."""
        self._pinned = 0
        self._connected_at: float | None = None
        self._rdma: RdmaStream | None = None
        self._carrier: str | None = None
        """What carries the connection, once the client has been heard there."""
        self._failed = self._bad_requests = self._protocol_errors = 0
        self._set_answered = services.dialect.answered(Command.SET_TENSOR)
        self._buffers = BufferTable(
            capacity=services.capacity,
            registry=services.registry,
            populator=services.populator,
            destination=services.destination,
            saver=services.saver,
        )
        self._staging = Staging()
        self._recorder = LoadRecorder("server", on=services.on_profile is not None or services.print_profile)
        self._recorder.watch(stream)
        make_receiver, make_filler = (Receiver, Filler) if services.optimized else (PlainReceiver, PlainFiller)
        self._receiver = make_receiver(
            stream, self._dialect, self._buffers, self._staging, services.cache, services.saver, self._recorder
        )
        self._filler = make_filler(
            self._dialect,
            self._buffers,
            self._staging,
            services.cache,
            services.workers,
            services.saver,
            self._recorder,
        )
        self._commands = Commands(stream, self._dialect, self._buffers, self._staging, services.capacity)

    def stop(self) -> None:
        """End the session: whatever it waits for comes back at once."""
        self._stopping = True
        self._filler.stop()
        self._stream.shutdown()

    def inherited(self) -> int:
        """The descriptor of the connection, for a process that was forked meanwhile; -1 if it is closed."""
        return self._stream.fileno()

    def counts(self) -> Counts:
        """What it has done up to now. From any thread."""
        rdma, filler = self._rdma, self._filler
        return Counts(
            tcp=int(self._carrier == "tcp"),
            rdma=int(self._carrier == "rdma"),
            tcp_received=self._tcp.bytes_received,
            tcp_sent=self._tcp.bytes_sent,
            rdma_received=rdma.bytes_received if rdma is not None else 0,
            rdma_sent=rdma.bytes_sent if rdma is not None else 0,
            failed=self._failed,
            bad_requests=self._bad_requests,
            protocol_errors=self._protocol_errors,
            completed=self._buffers.completed,
            hits=filler.hits,
            misses=filler.misses,
            filled=filler.filled_bytes,
            pinned=rdma.ring_bytes if rdma is not None and not rdma.closed else 0,
        )

    def run(self) -> None:
        """Serve until the client leaves, breaks a rule or is stopped. Never raises: it has its thread to itself."""
        try:
            if self._hello():
                self._connected_at = time.monotonic()
                self._carrier = None if self._untried else "tcp"
                logger.info("%s: connected", self.client)
                while self._first() if self._untried else self._request():
                    pass
        except (BadRequest, ProtocolError) as error:
            if not self._stopping:
                self._protocol_errors = int(isinstance(error, (BadMessage, ProtocolError)))
                self._bad_requests = 1 - self._protocol_errors
            self._complain(str(error))
        except TransferTimeout as error:
            self._complain(f"nothing came for {error.elapsed:.1f} s" if error.phase == "receive" else str(error))
        except PeerClosed as error:
            self._gone(f"the client closed the connection inside it, after {error.bytes_done} bytes")
        except VerbsError as error:
            # A client that leaves is a PeerClosed; this is a queue pair that broke, or a client that broke its rules.
            self._complain(str(error), self._what() if self._inside else "between requests")
        except TransportError as error:
            self._gone(str(error))
        except BaseException as error:
            # A hook of the embedder's may raise anything, SystemExit too.
            if not self._stopping:
                self._failed = 1
                log_failure(logger, error, "%s: connection closed: %s failed", self.client, self._what())
        finally:
            self._end()

    def _end(self) -> None:
        self._stream.close()
        self._unpin()
        if self._process != os.getpid():
            return  # a hook has forked, and this is the child: the rest is the parent's
        self._filler.close()
        self._staging.release()
        self._buffers.free_all()
        if self._connected_at is None:
            logger.debug("%s: left before it had said HELLO", self.client)
            return
        logger.info(
            "%s: left after %.1f s; tensors completed: %d, bytes received: %d, bytes sent: %d",
            self.client, time.monotonic() - self._connected_at, self._buffers.completed,
            self._stream.bytes_received, self._stream.bytes_sent,
        )  # fmt: skip
        self._hand_over(self._recorder.profile())

    def _hand_over(self, profile: LoadProfile) -> None:
        if self._services.print_profile:
            print_profile(profile)
        if self._services.on_profile is not None:
            try:
                self._services.on_profile(profile)
            except BaseException as error:
                log_failure(logger, error, "%s: on_profile failed", self.client)

    def _unpin(self) -> None:
        nbytes, self._pinned = self._pinned, 0
        if nbytes:
            self._services.pinned.give_back(nbytes)

    def _complain(self, text: str, what: str = "") -> None:
        if not self._stopping:
            self._failed = 1
            logger.warning("%s: %s: %s; connection closed", self.client, what or self._what(), text)

    def _gone(self, text: str) -> None:
        # Between requests a client may leave as it likes.
        if self._inside:
            self._complain(text)
        else:
            logger.debug("%s: %s", self.client, text)

    def _what(self) -> str:
        named = (self._receiver.tensor, self._commands.tensor, self._filler.tensor)
        tensor = next((tensor for tensor in named if tensor is not None), None)
        name = self._dialect.name_of(self._doing)
        return name if tensor is None else f"{name} of tensor {tensor!r}"

    # HELLO.

    def _hello(self) -> bool:
        """The first request. False if the client closed without a word."""
        deadline = time.monotonic() + self._services.hello_timeout
        self._stream.timeout = self._services.hello_timeout
        try:
            first = self._stream.recv_or_eof(1)
            if first is None:
                return False
            self._inside = True
            if first[0] != Command.HELLO:
                self._doing = first[0]
                raise BadMessage("the first request must be HELLO")
            size = parse_u64(self._trickle(8, deadline))
            expected = self._dialect.hello_request_bytes
            if size == 0 and self._was_turned_away():
                logger.debug("%s: the same client, asking in the form of protocol 3 and older", self.client)
                return False
            if size != expected:
                raise BadMessage(f"{size} bytes declared, and protocol {self._dialect.text} has {expected}")
            caps = self._trickle(expected, deadline)
        except TransferTimeout:
            raise BadMessage(f"it did not come within {self._services.hello_timeout:g} s") from None
        self._tcp.timeout = self._services.stall_timeout
        greeting = self._services.greeting
        if expected:
            greeting = replace(greeting, caps=self._carry(caps))
        answer = greeting.encode()
        self._tcp.send(response_header(len(answer)), answer)
        self._inside = False
        return True

    def _carry(self, caps: bytes) -> bytes:
        """Move to RDMA if the client offers it and we can; our capabilities, for the answer."""
        if self._services.transport == "tcp":
            self._stay(on_tcp(ASKED_FOR_TCP))
            return NO_CAPS
        if any(caps):
            if not self._services.pinned.take(RING_BYTES):
                most = self._services.pinned.total // RING_BYTES
                self._stay(replace(on_tcp(f"{most} clients are on RDMA already, which is the most"), serious=True))
                return NO_CAPS
            self._pinned = RING_BYTES
        accepted = accept(self._tcp, caps, optimized=self._services.optimized)
        if isinstance(accepted, Carrier):
            self._unpin()
            self._stay(accepted)
            return NO_CAPS
        stream, ours = accepted
        self._rdma = stream
        self._use(stream)
        self._untried = True
        return ours

    def _stay(self, carrier: Carrier) -> None:
        """The connection stays on TCP. BadRequest if that will not do."""
        if self._services.transport == "rdma":
            self._services.turned_away.append((self._host, time.monotonic()))
            raise BadRequest(f"RDMA is required here: {carrier.reason}")
        carrier.log(self.client)

    @property
    def _host(self) -> str:
        return self.client.rpartition(":")[0]

    def _was_turned_away(self) -> bool:
        """Whether a client from there has just been told, by closing its connection, that RDMA is required."""
        since = time.monotonic() - self._services.hello_timeout
        return any(host == self._host and when > since for host, when in list(self._services.turned_away))

    def _use(self, stream: ByteStream) -> None:
        self._stream = self._receiver.stream = self._commands.stream = stream
        self._recorder.watch(stream)
        if self._stopping:
            # `stop` may have met the one before.
            stream.shutdown()

    def _first(self) -> bool:
        """The first request over RDMA: it comes soon, or over TCP after all. False if the client has closed instead.

        Neither side of a stock connection hears whether the other got as far as RDMA (docs/protocol.md, section 8).
        """
        stream = self._stream
        assert isinstance(stream, RdmaStream)
        self._untried = served = False
        try:
            served = self._request(self._services.stall_timeout)
            return served
        except RdmaUnavailable as error:
            if self._inside:
                raise  # an embedder's, about something else
            self._use(stream.detach())
            self._unpin()
            self._stay(replace(refused(error), serious=True))
            self._carrier = "tcp"
            return True
        except TransferTimeout as error:
            if self._inside:
                raise
            raise BadRequest(f"the client agreed on RDMA, and sent nothing for {error.elapsed:.1f} s") from None
        finally:
            if served or self._inside:  # it was heard there, even if its request could not be served
                self._carrier = "rdma"

    def _trickle(self, nbytes: int, deadline: float) -> bytes:
        """Read ``nbytes`` bytes by the deadline, however slowly they come: each byte alone counts as progress to the
        stream.
        """
        return b"".join(self._stream.recv(1, timeout=max(0.001, deadline - time.monotonic())) for _ in range(nbytes))

    # Everything after it.

    def _request(self, patience: float | None = None) -> bool:
        """Serve one request, if it comes within ``patience`` seconds. False if the client has closed instead of sending
        one.
        """
        stream = self._stream
        self._receiver.tensor = self._commands.tensor = self._filler.tensor = None
        # Between requests a client may be silent for as long as it likes.
        first = stream.recv_or_eof(1, timeout=patience)
        if first is None:
            return False
        number = self._doing = first[0]
        self._inside = True
        recorder = self._recorder
        since = recorder.now()
        size = parse_u64(stream.recv(8))
        stage = _STAGES.get(number, Stage.ALLOC)
        if stage < Stage.ALLOC:
            recorder.begin_once()
        recorder.switch(stage)
        if number == Command.SET_TENSOR:
            self._receiver.set_tensor(size)
            if self._set_answered:
                stream.send(EMPTY_RESPONSE)
        elif number == Command.SET_TENSOR_HASH:
            self._fill(size, since)
            since = 0
        else:
            self._other(number, size)
        recorder.switch(Stage.GAP)
        if stage < Stage.ALLOC:
            recorder.mark()
        if since:
            recorder.command(number, since)
        self._inside = False
        return True

    def _other(self, number: int, size: int) -> None:
        stream, dialect = self._stream, self._dialect
        if number not in dialect.commands:
            raise BadMessage(f"protocol {dialect.text} has no such command")
        if number in COMPUTE_COMMANDS:
            raise BadRequest("this server stores weights and does not compute")
        if number == Command.HELLO:
            raise BadMessage("it has been said already")
        if number == Command.SET_TENSOR_2D:
            self._receiver.set_tensor_2d(size)
            answer: bytes | None = b""
        else:
            answer = self._commands.handlers[Command(number)](self._body(number, size))
        if answer is not None and dialect.answered(number):
            stream.send(response_header(len(answer)), answer)

    def _body(self, number: int, size: int) -> bytes:
        """The payload of a request that always has the same size."""
        expected = self._dialect.request_bytes(number)
        if size != expected:
            raise BadMessage(f"{size} bytes declared, and protocol {self._dialect.text} has {expected}")
        return self._stream.recv(size) if size else b""

    def _fill(self, size: int, since: int) -> None:
        """Answer a question to the cache that came at ``since``, and the further ones that are seen to have come behind
        it.
        """
        if Command.SET_TENSOR_HASH not in self._dialect.commands:
            raise BadMessage(f"protocol {self._dialect.text} has no such command")
        body = self._body(Command.SET_TENSOR_HASH, size)
        filler = self._filler
        filler.ask(body)
        while filler:
            self._look_ahead(len(body))
            answer = encode_u8_answer(filler.answer())
            self._stream.send(response_header(len(answer)), answer)
            self._recorder.command(Command.SET_TENSOR_HASH, since)
            since = self._recorder.now()

    def _look_ahead(self, nbytes: int) -> None:
        """Take questions out of the stream that are there, whole, and can be worked on beside those taken before.

        What can not stays where it is, for its turn: a request that is none of them, too, ends the row.
        """
        head, size = request_header(Command.SET_TENSOR_HASH, nbytes), REQUEST_HEADER_BYTES + nbytes
        seen = self._stream.peek(self._filler.room * size)
        taken = 0
        while (
            len(seen) >= taken + size
            and seen.startswith(head, taken)
            and self._filler.ask_ahead(seen[taken + len(head) : taken + size])
        ):
            taken += size
        if taken:
            self._stream.recv(taken)
