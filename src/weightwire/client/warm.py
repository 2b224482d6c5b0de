"""Fill servers' tensor caches over the wire, and leave nothing else behind on them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightwire.client import device as devices
from weightwire.client.asking import Questions
from weightwire.client.channel import Channel
from weightwire.client.connection import Connection, Reach
from weightwire.client.crew import SummedProgress, Target, as_targets
from weightwire.client.dropping import Claim
from weightwire.client.fanout import chosen_for
from weightwire.client.hashes import TensorHashes, is_cached
from weightwire.client.hashpool import HashFeed
from weightwire.client.options import ProgressCallback, PushOptions
from weightwire.client.plain import PlainSender
from weightwire.client.push import ModelSource
from weightwire.client.remote import RemoteBuffer, RemoteTensor
from weightwire.client.sender import Sender
from weightwire.client.shared import SharedHashes, visit_all
from weightwire.client.sources import Sources
from weightwire.errors import AllocationError, CacheUnavailable
from weightwire.index import IndexChoice
from weightwire.model import Model, ModelTensor
from weightwire.model.opening import opened_model
from weightwire.profile import LoadProfile, Stage
from weightwire.ranges import FileRange

__all__ = ["WarmSummary", "Warmed", "warm"]

_NO_CACHE = "start llama.cpp's rpc-server with -c, or 'weightwire serve' with --cache DIR"
_NO_ROOM = (
    "the disk of its cache may be full, or its directory gone or not writable, or something else has the entry's name; "
    "its log may say more"
)


@dataclass(frozen=True, slots=True)
class WarmSummary:
    """What `warm` did with one server. ``tensors`` and ``bytes`` are those over 10 MiB, which caches hold: ``hits`` it
    had already, ``misses`` and ``corrupt_hits`` (kept wrongly) were sent, ``sent`` bytes of them. ``too_large`` names
    tensors that are longer than the server's largest buffer: they cannot be brought there, by a cache or without.
    ``hashes_known`` counts those of the others whose hash the index knew; ``threads`` could hash what it did not know.
    """

    tensors: int
    bytes: int
    sent: int
    hits: int
    misses: int
    corrupt_hits: int
    too_large: tuple[str, ...]
    hashes_known: int
    threads: int
    seconds: float
    profile: LoadProfile


@dataclass(frozen=True, slots=True)
class Warmed:
    """What became of one target of `warm`: a ``summary`` or an ``error``. The connection is closed either way.

    ``endpoint``, ``protocol``, ``transport`` and ``optimized`` are those of `Connection`, ``spoken`` is the text of its
    ``dialect``; ``protocol``, ``transport`` and ``spoken`` are None where there was none.
    """

    target: Target
    endpoint: str
    protocol: str | None
    transport: Mapping[str, object] | None
    summary: WarmSummary | None
    error: Exception | None
    optimized: bool = True
    spoken: str | None = None


def warm(
    model: ModelSource,
    targets: str | Target | Iterable[str | Target],
    *,
    progress: ProgressCallback | None = None,
    threads: int | None = None,
    in_flight: int | None = None,
    index: IndexChoice = None,
    drop_behind: bool = False,
    read: str = "auto",
    timeout: float = 30.0,
    protocol: str | None = None,
    transport: str = "auto",
    profile: bool | None = None,
    optimized: bool | None = None,
) -> list[Warmed]:
    """Fill the tensor caches of servers, stock ones started with ``-c`` included, with a model's tensors over 10 MiB.

    The next load of the model there, by whichever client, comes from the server's disk. The arguments are those of
    `push_all`. On a server there is one buffer for the largest tensor meanwhile; when the last tensor has arrived, the
    connection is closed and the server is free for others. A tensor whose hash the server knows is not sent, unless
    its ends, made wrong before, show that the cache does not hold all of it.

    One that fails does not stop the others: its error is in the list, in the order of ``targets``. It is
    CacheUnavailable if the server does not keep what it is sent, which is found out after the first tensor (and the
    second, if it has a cache but lacks the first) and again after the last, AllocationError where no tensor fits its
    largest buffer or it lacks the memory for the buffer, and otherwise as with `Connection.push`. It is not asked about
    those between: to say yes a server reads the whole entry and fills the tensor from it, so that asking about all
    would have it read the model once more, from the disk where memory is short, before it is free. Raised are only
    ConfigError for an argument or one server under two names, ModelError for a model that cannot be opened, and
    whatever interrupts the call (Ctrl-C), after which every connection is closed.
    Source: docs/protocol.md, section 9.
    """
    aims = as_targets(targets)
    reach = Reach(timeout=timeout, protocol=protocol, transport=transport, profile=profile, optimized=optimized)
    options = PushOptions(
        cache="always",
        threads=threads,
        in_flight=in_flight,
        index=index,
        drop_behind=drop_behind,
        read=read,
        optimized=reach.optimized,
    )
    with opened_model(model) as opened:
        chosen = [[tensor for tensor in chosen_for(opened, target) if is_cached(tensor)] for target in aims]
        summed = SummedProgress(progress, [sum(tensor.nbytes for tensor in tensors) for tensors in chosen])
        opened.check_unchanged()

        def work(number: int, connection: Connection, shared: SharedHashes | None, claim: Claim | None) -> WarmSummary:
            assert shared is not None  # cache="always"
            hashes, feed = shared.take(number)
            with connection, connection._channel.exclusive("warm"):
                return _warm(
                    connection._channel, connection.server_has_cache, opened, chosen[number],
                    aims[number].device, hashes, feed, claim, options, summed.of(number),
                )  # fmt: skip

        members = visit_all(opened, aims, chosen, options, summed, reach, work)
    return [
        Warmed(
            member.target,
            member.target.endpoint if member.connection is None else member.connection.endpoint,
            None if member.connection is None else member.connection.protocol,
            None if member.connection is None else member.connection.transport,
            member.result,
            member.error,
            reach.optimized,
            None if member.connection is None else member.connection.dialect.text,
        )
        for member in members
    ]


def _warm(
    channel: Channel,
    announced: bool,
    model: Model,
    tensors: Sequence[ModelTensor],
    device: int,
    hashes: TensorHashes,
    feed: HashFeed,
    claim: Claim | None,
    options: PushOptions,
    progress: ProgressCallback | None,
) -> WarmSummary:
    started = time.perf_counter()
    recorder = channel.recorder
    recorder.sample()
    before, hashed_before = recorder.profile(), feed.spent_before()
    recorder.switch(Stage.ALLOC)
    devices.check_device(channel, device, devices.device_count(channel))
    limit = min(devices.max_size(channel, device), devices.MAX_BUFFER)
    fits = [tensor for tensor in tensors if tensor.nbytes <= limit]
    too_large = [number for number, tensor in enumerate(tensors) if tensor.nbytes > limit]
    if too_large and not fits:
        raise AllocationError(
            f"{channel.endpoint}: its largest buffer is {limit} bytes, and each of the {len(tensors)} tensors over "
            f"10 MiB is longer",
            nbytes=min(tensor.nbytes for tensor in tensors),
            hint="no client could load the model there; use another device",
        )
    feed.leave_out(too_large)
    if fits:
        scratch = devices.allocate(channel, max(tensor.nbytes for tensor in fits), device)
        recorder.switch(Stage.GAP)
        recorder.begin()
        if claim is not None:
            claim.keep([number for number, tensor in enumerate(tensors) if tensor.nbytes <= limit])
        sources = Sources([tensor.payload for tensor in fits], cached=range(len(fits)), read=options.read, claim=claim)
        warmer = _Warmer if options.optimized else _PlainWarmer
        try:
            _fill(warmer, channel, announced, fits, scratch, hashes, feed, sources, progress)
        except CacheUnavailable:
            model.check_unchanged()  # a server keeps what it was sent, not what was there when it was hashed
            raise
        recorder.switch(Stage.WAIT)
        devices.barrier(channel, device)
        recorder.mark()
    recorder.switch(Stage.GAP)
    model.check_unchanged()
    recorder.hash_thread_ns += hashes.pool.spent_ns - hashed_before
    recorder.sample()
    profile = recorder.profile().since(before)
    return WarmSummary(
        tensors=len(tensors),
        bytes=sum(tensor.nbytes for tensor in tensors),
        sent=sum(tensor.nbytes for tensor in fits) - profile.bytes_saved,
        hits=profile.hits,
        misses=profile.misses,
        corrupt_hits=profile.corrupt_hits,
        too_large=tuple(tensors[number].name for number in too_large),
        hashes_known=feed.known,
        threads=hashes.pool.threads,
        seconds=time.perf_counter() - started,
        profile=profile,
    )


def _fill(
    warmer: type[_Warmer],
    channel: Channel,
    announced: bool,
    tensors: Sequence[ModelTensor],
    scratch: RemoteBuffer,
    hashes: TensorHashes,
    feed: HashFeed,
    sources: Sources,
    progress: ProgressCallback | None,
) -> None:
    # As plain bytes: what a cache keeps are the bytes of one SET_TENSOR, whatever type it names, and for those nothing
    # has to be padded or announced (docs/protocol.md, sections 9 and 11).
    placed = [RemoteTensor(tensor.name, None, (tensor.nbytes,), tensor.nbytes, scratch, 0) for tensor in tensors]
    payloads = [tensor.payload for tensor in tensors]
    questions = Questions(channel, placed, payloads, range(len(tensors)), feed, True, hashes.doubt)
    warmer(channel, placed, payloads, questions, progress, sources, announced).run()


class _Warmer(Sender):
    """Sends what the cache lacks into one buffer, and sees that the first and the last of it were kept.

    A server that is known to have a cache, since it ``announced`` one or had a tensor, may lack the first for a reason
    of that one entry's. It is sent the rest unless it does not keep the second either, and the error comes at the end.
    """

    def __init__(
        self,
        channel: Channel,
        placed: Sequence[RemoteTensor],
        payloads: Sequence[FileRange | memoryview],
        questions: Questions,
        progress: ProgressCallback | None,
        sources: Sources,
        announced: bool,
    ) -> None:
        super().__init__(channel, placed, payloads, questions, progress, sources)
        self._asked = questions
        self._announced = announced
        self._sent: list[int] = []
        self._first_lost: CacheUnavailable | None = None

    def run(self) -> None:
        """Send everything that is not there; CacheUnavailable if the server does not keep it."""
        super().run()
        if len(self._sent) > (1 if self._first_lost is None else 2):
            self._check_kept(self._sent[-1])
        if self._first_lost is not None:
            raise self._first_lost

    def _send_large(self, index: int, tensor: RemoteTensor) -> None:
        super()._send_large(index, tensor)
        self._sent.append(index)
        # Before gigabytes are sent to a server that does not keep them.
        if len(self._sent) == 1:
            self._first_lost = self._lost(index)
            if self._first_lost is not None and not (self._announced or self._asked.filled):
                raise self._first_lost
        elif len(self._sent) == 2 and self._first_lost is not None:
            self._check_kept(index)

    def _check_kept(self, index: int) -> None:
        lost = self._lost(index)
        if lost is not None:
            raise lost

    def _lost(self, index: int) -> CacheUnavailable | None:
        """The error if the server does not have tensor ``index`` now; raised where it has a part, as of a full disk."""
        previous = self._recorder.switch(Stage.ASK)
        self._channel.settle()
        hit, intact = self._asked.ask_again(index)
        self._recorder.switch(previous)
        if hit and intact:
            return None
        endpoint, name = self._channel.endpoint, self._placed[index].name
        if hit:
            raise CacheUnavailable(
                f"{endpoint} has kept only a part of tensor {name!r} in its cache", endpoint=endpoint, hint=_NO_ROOM
            )
        if len(self._sent) > 1 or self._asked.filled or self._announced:
            return CacheUnavailable(
                f"{endpoint} has not kept tensor {name!r} in its cache", endpoint=endpoint, hint=_NO_ROOM
            )
        return CacheUnavailable(
            f"{endpoint} keeps no tensor cache: it was sent tensor {name!r} and does not have it",
            endpoint=endpoint,
            hint=_NO_CACHE,
        )


class _PlainWarmer(_Warmer, PlainSender):
    """The same, the plain way."""
