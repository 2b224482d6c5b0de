"""A connection to a ggml RPC server."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from weightwire.client import device as devices
from weightwire.client.channel import Channel
from weightwire.client.device import DeviceMemory
from weightwire.client.options import ProgressCallback, PushOptions
from weightwire.client.push import ModelSource, push
from weightwire.client.registered import RegisteredMemory, register
from weightwire.client.remote import RemoteBuffer
from weightwire.client.result import PushResult
from weightwire.config import PathConfig, profile_wanted
from weightwire.index import IndexChoice
from weightwire.transport.address import format_sockaddr
from weightwire.transport.negotiate import check_arguments, open_connection
from weightwire.transport.profiling import LoadRecorder, print_profile

if TYPE_CHECKING:
    from weightwire.client.remote import Data
    from weightwire.profile import LoadProfile
    from weightwire.transport.base import ByteStream
    from weightwire.transport.upgrade import Carrier
    from weightwire.wire.dialect import Dialect
    from weightwire.wire.hello import Greeting

__all__ = ["Connection", "Reach", "connect", "connect_measured"]


def connect(
    endpoint: str,
    *,
    timeout: float = 30.0,
    protocol: str | None = None,
    transport: str = "auto",
    profile: bool | None = None,
    optimized: bool | None = None,
) -> Connection:
    """Connect to a ggml RPC server at ``endpoint`` (``"host:port"``, ``"[::1]:50052"``; port 50052 if none is given).

    ``timeout`` (seconds) bounds connecting and HELLO together, and later each wait without progress. A server that
    hashes a cached tensor, or writes one to its cache's disk, is silent for as long as that takes: at 0.7 GiB/s the
    default is enough for a tensor of 21 GiB; larger ones and slow disks need a longer one. ``protocol``,
    such as ``"7.0.0"``, says which version the server speaks, whatever it announces; without it HELLO finds out.
    ``transport`` is ``"auto"`` (RDMA where both ends can, TCP otherwise; `Connection.transport` says which, and why),
    ``"tcp"``, or ``"rdma"`` (nothing else will do). Where RDMA was agreed on and does not work, which takes 5 seconds
    at most to find out, the connection is made again on TCP. ``optimized=False`` (None: GGML_RPC_LOAD_OPT, else True)
    has `push` send the same bytes as a plain client would, one message and one RDMA chunk at a time, to be measured
    against (docs/performance.md).

    `Connection.profile` says what the connection spends its time on. With ``profile`` True that is also printed to
    stderr when it is closed, if anything was loaded over it; with False nothing is measured. None leaves it to
    GGML_RPC_LOADPROF (1: as True, 0: as False), and without that measures and prints nothing.

    Raises ConfigError for a bad argument, VersionError for a server older than 1.0 or of a major nobody described
    (nothing is sent to it after HELLO), ServerBusy when it took the connection and does not answer, ProtocolError for
    an answer that is none, RdmaUnavailable where RDMA was required, TransferTimeout, PeerClosed and TransportError for
    the rest. Source: docs/protocol.md, sections 6 and 8.
    """
    reach = Reach(timeout=timeout, protocol=protocol, transport=transport, profile=profile, optimized=optimized)
    return reach(endpoint)


class Reach:
    """How one or several servers are connected to: the arguments of `connect`, checked before any is.

    ConfigError for one that cannot be used.
    """

    def __init__(
        self, *, timeout: float, protocol: str | None, transport: str, profile: bool | None, optimized: bool | None
    ) -> None:
        self._profile = profile_wanted(profile)
        self.optimized = PathConfig.resolve(optimized=optimized).optimized
        check_arguments(timeout, protocol, transport)
        self._asked = (timeout, protocol, transport)

    def __call__(self, endpoint: str, connected: Callable[[ByteStream, float], object] | None = None) -> Connection:
        """As `connect`; ``connected`` is that of `open_connection`."""
        opened = open_connection(endpoint, *self._asked, optimized=self.optimized, connected=connected)
        return Connection(*opened, profile=self._profile, optimized=self.optimized)


def connect_measured(
    endpoint: str, *, timeout: float, protocol: str | None, transport: str, optimized: bool
) -> Connection:
    """As `connect`, for whoever reports the times himself: measured and not printed, whatever the environment says."""
    opened = open_connection(endpoint, timeout, protocol, transport, optimized=optimized)
    return Connection(*opened, optimized=optimized)


class Connection:
    """An open connection, from `connect`; a context manager that closes it.

    It may be used from several threads, one call after the other. After any PeerClosed, TransferTimeout,
    TransportError or ProtocolError it is closed, and so it is when a push is interrupted or its callback raises;
    later calls say so.
    """

    def __init__(
        self,
        stream: ByteStream,
        greeting: Greeting,
        dialect: Dialect,
        carrier: Carrier,
        *,
        profile: bool | None = None,
        optimized: bool = True,
    ) -> None:
        self._optimized = optimized
        self._channel = Channel(stream, dialect, LoadRecorder(on=profile is not False))
        self._to_print = profile is True
        self._greeting = greeting
        self._stream = stream
        self._transport = MappingProxyType({**carrier.as_dict(), **_addresses(stream)})
        self._device_count: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<weightwire.Connection to {self.endpoint}, protocol {self.protocol}{state}>"

    @property
    def endpoint(self) -> str:
        """The server, as ``host:port``."""
        return self._channel.endpoint

    @property
    def protocol(self) -> str:
        """The version the server announced, such as ``"7.0.0"``."""
        return self._greeting.text

    @property
    def dialect(self) -> Dialect:
        """The version that is spoken to it."""
        return self._channel.dialect

    @property
    def server_has_cache(self) -> bool:
        """Whether the server said in HELLO that it keeps a tensor cache; a stock server cannot say so."""
        return self._greeting.has_cache

    @property
    def transport(self) -> Mapping[str, object]:
        """What carries the bytes and why.

        ``kind`` (``"tcp"`` or ``"rdma"``), ``reason`` in words, ``device``, ``gid`` and ``send_depth`` (SENDs of 256
        KiB in flight; all three None on TCP), ``registration`` (what was tried to get memory for them, a list of
        mappings), ``local`` and ``peer`` addresses; on RDMA also ``port``, ``gid_index``, ``gid_type``, ``mtu`` and
        ``inline`` (bytes) and ``pair``, the queue pair's number. docs/rdma.md has more.
        """
        return self._transport

    @property
    def profile(self) -> LoadProfile:
        """What the connection has spent its time on so far: all its pushes, without the time between them.

        During a push, up to the last tensor that was reported. Also when the connection is closed.
        """
        recorder = self._channel.recorder
        recorder.sample()
        return recorder.profile()

    @property
    def optimized(self) -> bool:
        """Whether this side loads the optimized way, or the plain one (see `connect`)."""
        return self._optimized

    @property
    def closed(self) -> bool:
        """Whether the connection was closed, by `close` or by a failure."""
        return self._channel.closed

    def close(self) -> None:
        """Close the connection; the server frees what it had allocated.

        Idempotent, from any thread, never blocks, never raises. A call that waits in another thread raises
        TransportError.
        """
        self._channel.close()
        if self._to_print:
            self._to_print = False
            print_profile(self.profile)

    def device_count(self) -> int:
        """How many devices the server has."""
        with self._channel.exclusive("device_count"):
            return self._count()

    def device_memory(self, device: int = 0) -> tuple[int, int]:
        """Free and total memory of ``device``, bytes. ConfigError if there is no such device."""
        with self._channel.exclusive("device_memory"):
            devices.check_device(self._channel, device, self._count())
            return devices.memory(self._channel, device)

    def devices(self) -> list[DeviceMemory]:
        """Every device with its free and total memory, bytes."""
        with self._channel.exclusive("devices"):
            return [DeviceMemory(device, *devices.memory(self._channel, device)) for device in range(self._count())]

    def alignment(self, device: int = 0) -> int:
        """What a tensor's offset in a buffer of ``device`` must be a multiple of, bytes. ConfigError if there is no
        such device.
        """
        with self._channel.exclusive("alignment"):
            devices.check_device(self._channel, device, self._count())
            return devices.alignment(self._channel, device)

    def max_size(self, device: int = 0) -> int:
        """The largest buffer ``device`` gives, bytes (2^64-1: it knows no limit). ConfigError if there is no such
        device.
        """
        with self._channel.exclusive("max_size"):
            devices.check_device(self._channel, device, self._count())
            return devices.max_size(self._channel, device)

    def allocate(self, nbytes: int, device: int = 0) -> RemoteBuffer:
        """Allocate ``nbytes`` bytes on ``device``.

        Raises ConfigError for a size or device that cannot be, AllocationError if the server does not have the memory.
        """
        with self._channel.exclusive("allocate"):
            devices.check_device(self._channel, device, self._count())
            return devices.allocate(self._channel, nbytes, device)

    def barrier(self) -> None:
        """Wait until the server has done everything that was sent before."""
        with self._channel.exclusive("barrier"):
            devices.barrier(self._channel)

    def push(
        self,
        model: ModelSource,
        *,
        cache: str = "auto",
        verify: bool = False,
        include: str | None = None,
        layers: str | None = None,
        progress: ProgressCallback | None = None,
        device: int = 0,
        threads: int | None = None,
        in_flight: int | None = None,
        index: IndexChoice = None,
        probe: bool | None = None,
        drop_behind: bool = False,
        read: str = "auto",
    ) -> PushResult:
        """Send a model's tensors to ``device`` and return them by name, once the server has them all.

        ``model`` is a path, a mapping of arrays, or what `open_model` gave. ``include`` is a regular expression
        searched for in the names; ``layers`` (``"20-39"``, ``"7"``, ``"other"``, several with commas) chooses by the
        number of the layer in the name. ``progress(name, done, total)``, in bytes of the whole push, is called after
        each tensor and every 64 MiB within one, and with ``verify`` once more from zero while the tensors come back; it
        must not use this connection, except to close it. ``drop_behind`` drops a file's pages from the page cache,
        tensor by tensor, when they have been sent (and verified). ``read`` says how files are read: ``"mmap"`` leaves
        it to the kernel, which sends out of its page cache, ``"read"`` reads large blocks into memory first, and
        ``"auto"`` is ``"mmap"``, with 32 MiB asked for ahead where the file lies beyond a network.

        ``cache`` says whether the server's tensor cache is asked for tensors over 10 MiB, and told to keep them:
        ``"auto"`` if the server said that it has one, ``"always"`` (for stock servers, which cannot say), ``"never"``.
        Their hashes come out of ``index`` (a path or `HashIndex`; None: the user's own; False: none), which learns
        those it lacks once the push has succeeded; with it a tensor that the server has is not read. What is not known
        is hashed by ``threads`` threads (None: GGML_RPC_LOAD_THREADS, else as many as there are CPUs for this process,
        at most 8; 0: the thread that sends), at most ``in_flight`` bytes ahead (None: WEIGHTWIRE_IN_FLIGHT, else 256
        MiB; a larger tensor by itself). ``probe`` makes the ends of a tensor wrong before the cache is asked, and
        looks at them after a hit, so that a file cut short is noticed (None: with ``"always"``). ``verify`` reads
        every tensor back and compares. What the cache has filled wrongly, as either finds, is sent and counted.

        Everything that can be checked is checked before the first tensor goes: ConfigError for a bad argument,
        ModelError for a model that cannot be read, AllocationError where the server cannot hold it. Then ModelError
        if a file changed, PeerClosed and TransferTimeout (both with ``.tensor`` and ``.bytes_done`` of it),
        TransportError, ProtocolError, and IntegrityError from ``verify``. After a failure the tensors are not kept.
        """
        return push(
            self._channel,
            self.server_has_cache,
            model,
            PushOptions(
                cache=cache,
                verify=verify,
                include=include,
                layers=layers,
                progress=progress,
                device=device,
                threads=threads,
                in_flight=in_flight,
                index=index,
                probe=probe,
                drop_behind=drop_behind,
                read=read,
                optimized=self._optimized,
            ),
        )

    def register(self, buffer: Data) -> RegisteredMemory:
        """Pin a buffer's memory, so that what is pushed or written out of it goes over RDMA without a copy.

        For arrays (or any contiguous buffer) that are sent more than once, or are large. What cannot be pinned (over
        TCP, over the limit of locked memory) or would not be sent from where it is (a mapped file, which is read by
        position; big-endian numbers, which a push converts) is sent as always: the result says so. Let go of it with
        ``close`` or a ``with`` block; the buffer stays alive until then, or until the connection is closed.
        `LoadProfile` counts what was sent either way.

        ConfigError for what is no contiguous buffer of at least one byte, TransportError if the connection is closed.
        """
        self._channel.check_open("register")
        return register(self._stream, buffer)

    def _count(self) -> int:
        if self._device_count is None:
            self._device_count = devices.device_count(self._channel)
        return self._device_count


def _addresses(stream: ByteStream) -> dict[str, str]:
    """This end's and the peer's address, as the system has them; empty text where it has none."""
    found = {"local": "", "peer": ""}
    try:
        with socket.socket(fileno=os.dup(stream.fileno())) as twin:
            for key, name in (("local", twin.getsockname()), ("peer", twin.getpeername())):
                found[key] = format_sockaddr(name)
    except OSError:
        pass
    return found
