"""The push pipeline: hash, ask, send, confirm, in the model's order."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Final

from weightwire.client.asking import Questions
from weightwire.client.channel import Channel
from weightwire.client.device import barrier, release_all
from weightwire.client.dropping import Claim, claims_for, dropping
from weightwire.client.hashes import TensorHashes, is_cached
from weightwire.client.hashpool import HashFeed
from weightwire.client.layers import parse_layers
from weightwire.client.options import ProgressCallback, PushOptions
from weightwire.client.plain import PlainSender
from weightwire.client.plan import place, select
from weightwire.client.remote import RemoteBuffer, RemoteTensor
from weightwire.client.result import PushResult, PushSummary
from weightwire.client.sender import Sender
from weightwire.client.sources import Sources
from weightwire.client.verify import verify_tensors
from weightwire.errors import IntegrityError, WeightwireError
from weightwire.model import Model, ModelTensor
from weightwire.model.choosing import compile_include
from weightwire.model.opening import opened_model
from weightwire.profile import Stage
from weightwire.ranges import FileRange

__all__ = ["ModelSource", "ProgressCallback", "push", "push_selected"]

_BLAME: Final = "the server or the way to it changes bytes; push again, and suspect its memory if it stays so"

ModelSource = str | os.PathLike[str] | Mapping[str, object] | Model


def push(channel: Channel, server_has_cache: bool, source: ModelSource, options: PushOptions) -> PushResult:
    """See `Connection.push`."""
    started = time.perf_counter()
    pattern, layers = compile_include(options.include), parse_layers(options.layers)
    channel.check_open("push")
    asks = options.uses_cache(server_has_cache)
    with options.opened_index() if asks else nullcontext() as index, opened_model(source) as model:
        tensors = select(model, pattern, layers)
        model.check_unchanged()
        with channel.exclusive("push"), dropping(options.drop_behind) as drop:
            (claim,) = claims_for(drop, [tensors])
            if not asks:
                return push_selected(channel, model, tensors, options, claim=claim, started=started)
            hashes = TensorHashes.of(tensors, options, index)
            feed = hashes.feed(tensors)
            try:
                hashes.start()
                return push_selected(
                    channel, model, tensors, options, hashes, feed, claim=claim, record=True, started=started
                )
            finally:
                hashes.close()


def push_selected(
    channel: Channel,
    model: Model,
    tensors: Sequence[ModelTensor],
    options: PushOptions,
    hashes: TensorHashes | None = None,
    feed: HashFeed | None = None,
    *,
    claim: Claim | None = None,
    record: bool = False,
    started: float | None = None,
) -> PushResult:
    """Push ``tensors`` of ``model``, for a caller inside `Channel.exclusive`; buffers are given back if it fails.

    The server's cache is asked if there is a ``feed`` of ``hashes`` for these tensors; the caller has started them and
    closes them. ``claim`` hears what this push does not read any more. With ``record`` what they found out goes into
    their index, within the time this push accounts for; without, `TensorHashes.record` is the caller's to call once all
    his pushes have succeeded. That time begins at ``started`` (`time.perf_counter`), or now.
    """
    owned: list[RemoteBuffer] = []
    started = time.perf_counter() if started is None else started
    try:
        return _push(channel, model, tensors, options, hashes, feed, claim, owned, record, started)
    except BaseException as error:
        if channel.survives(error):
            release_all(owned)
        if hashes is not None and isinstance(error, IntegrityError):
            hashes.recheck()
        raise
    finally:
        channel.recorder.switch(Stage.GAP)  # wherever it was interrupted
        if claim is not None:
            claim.close()


def _push(
    channel: Channel,
    model: Model,
    tensors: Sequence[ModelTensor],
    options: PushOptions,
    hashes: TensorHashes | None,
    feed: HashFeed | None,
    claim: Claim | None,
    owned: list[RemoteBuffer],
    record: bool,
    started: float,
) -> PushResult:
    recorder, device = channel.recorder, options.device
    recorder.sample()
    before = recorder.profile()
    hashed_before = 0 if feed is None else feed.spent_before()
    recorder.switch(Stage.ALLOC)
    placed = place(channel, tensors, device, owned)
    recorder.switch(Stage.GAP)
    payloads = [tensor.payload for tensor in tensors]
    questions: Questions | None = None
    cached: list[int] = []
    if hashes is not None and feed is not None:
        cached = [number for number, tensor in enumerate(tensors) if is_cached(tensor)]
        questions = Questions(channel, placed, payloads, cached, feed, options.probes, hashes.doubt)
    # What is to be verified will be read once more.
    sources = Sources(payloads, cached=set(cached), read=options.read, claim=None if options.verify else claim)
    kind = Sender if options.optimized else PlainSender
    sender = kind(channel, placed, payloads, questions, options.progress, sources)
    recorder.begin()
    sender.run()
    _confirm(channel, device)
    model.check_unchanged()
    verifying = time.perf_counter()
    if options.verify:
        recorder.switch(Stage.VERIFY)
        _verify(channel, model, placed, payloads, sender, questions, options, claim)
        recorder.switch(Stage.GAP)
    verifying = time.perf_counter() - verifying
    if hashes is not None:
        if record:
            recorder.switch(Stage.INDEX)
            hashes.record(model)
            recorder.switch(Stage.GAP)
        recorder.hash_thread_ns += hashes.pool.spent_ns - hashed_before
    recorder.sample()
    profile = recorder.profile().since(before)
    nbytes = sum(tensor.nbytes for tensor in placed)
    summary = PushSummary(
        tensors=len(placed),
        bytes=nbytes,
        sent=nbytes - profile.bytes_saved,
        hits=profile.hits,
        misses=profile.misses,
        corrupt_hits=profile.corrupt_hits,
        hashes_known=feed.known if feed is not None else 0,
        threads=hashes.pool.threads if hashes is not None else 0,
        verified=options.verify,
        seconds=time.perf_counter() - started,
        verify_seconds=verifying if options.verify else 0.0,
        profile=profile,
    )
    return PushResult({tensor.name: tensor for tensor in placed}, summary)


def _confirm(channel: Channel, device: int) -> None:
    """The barrier, with which the span of what was sent ends."""
    previous = channel.recorder.switch(Stage.WAIT)
    barrier(channel, device)
    channel.recorder.switch(previous)
    channel.recorder.mark()


def _verify(
    channel: Channel,
    model: Model,
    placed: Sequence[RemoteTensor],
    payloads: Sequence[FileRange | memoryview],
    sender: Sender,
    questions: Questions | None,
    options: PushOptions,
    claim: Claim | None,
) -> None:
    """Read everything back. What the cache has filled wrongly is sent and read back once more."""
    filled = questions.filled if questions is not None else frozenset()
    tell = sender.tell if options.progress is not None else None
    try:
        wrong = verify_tensors(channel, placed, payloads, hint=_BLAME, tell=tell, spared=filled, claim=claim)
        if wrong and questions is not None:
            model.check_unchanged()
            for number in wrong:
                questions.reject(number)
            sender.again(wrong)
            _confirm(channel, options.device)
            verify_tensors(
                channel, [placed[number] for number in wrong], [payloads[number] for number in wrong], hint=_BLAME
            )
    except WeightwireError:
        # A source that changed meanwhile explains the difference better than the difference does.
        if not channel.closed:
            model.check_unchanged()
        raise
    model.check_unchanged()
