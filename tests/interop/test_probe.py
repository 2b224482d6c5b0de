"""Stock servers take whatever file has the right name for the tensor; what our client makes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from interop.proxy import RecordingProxy
from support.awkward import awkward_tensors
from support.leaks import LeakCheck

import weightwire
from weightwire import fnv1a64
from weightwire.wire import CACHE_THRESHOLD, Command

pytestmark = [pytest.mark.interop]

CONTENT = {tensor.name: tensor.data for tensor in awkward_tensors()}
LARGE = [name for name, data in CONTENT.items() if len(data) > CACHE_THRESHOLD]
EVERYTHING = sum(map(len, CONTENT.values()))
SPOILT = LARGE[1]


@pytest.fixture
def server(stock_protocol, stock_server, tmp_path):
    """A stock server of each protocol whose cache has every large tensor."""
    folder = tmp_path / "entries"
    folder.mkdir()
    for name in LARGE:
        entry_of(folder, name).write_bytes(CONTENT[name])
    return stock_server(stock_protocol, folder)


def entry_of(folder: Path, name: str) -> Path:
    return folder / f"{fnv1a64(CONTENT[name]):016x}"


def spoil(entry: Path, how: str) -> None:
    """Make an entry one that is no longer what its name says, and still never longer than the tensor."""
    size = entry.stat().st_size
    if how == "empty":
        os.truncate(entry, 0)
    elif how == "half":
        os.truncate(entry, size // 2)
    elif how == "a byte short":
        os.truncate(entry, size - 1)
    elif how == "a link to another tensor":
        other = entry.with_name("other")
        other.write_bytes(bytes(value ^ 1 for value in entry.read_bytes()[:4096]) * (size // 4096))
        entry.unlink()
        entry.symlink_to(other)
    else:
        data = bytearray(entry.read_bytes())
        data[size // 2] ^= 1
        entry.write_bytes(data)


def check_all(pushed: weightwire.PushResult) -> None:
    for name, data in CONTENT.items():
        assert pushed[name].read().tobytes() == data, name


@pytest.mark.parametrize("how", ["empty", "half", "a byte short", "a link to another tensor"])
def test_an_entry_that_does_not_fill_the_tensor_is_seen(server, how, awkward_gguf, caplog, no_leaks: LeakCheck):
    entry = entry_of(server.cache, SPOILT)
    spoil(entry, how)
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        pushed = connection.push(awkward_gguf, cache="always")
        check_all(pushed)
        summary = pushed.summary
        assert (summary.hits, summary.misses, summary.corrupt_hits) == (len(LARGE) - 1, 0, 1)
        assert summary.sent == EVERYTHING - sum(len(CONTENT[name]) for name in LARGE if name != SPOILT)
    assert entry.name in caplog.text
    assert repr(SPOILT) in caplog.text
    assert server.alive
    assert entry.read_bytes() == CONTENT[SPOILT], "sending it mends the entry"
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        summary = connection.push(awkward_gguf, cache="always").summary
        assert (summary.hits, summary.corrupt_hits) == (len(LARGE), 0)


@pytest.mark.parametrize("how", ["empty", "half"])
def test_without_the_probe_it_is_not(server, how, awkward_gguf):
    """Or the test above would prove nothing."""
    spoil(entry_of(server.cache, SPOILT), how)
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        pushed = connection.push(awkward_gguf, cache="always", probe=False)
        assert (pushed.summary.hits, pushed.summary.corrupt_hits) == (len(LARGE), 0)
        assert pushed[SPOILT].read().tobytes() != CONTENT[SPOILT]


@pytest.mark.parametrize("how", ["empty", "half", "a byte flipped"])
@pytest.mark.parametrize("probe", [None, False])
def test_verify_finds_everything_and_sends_it_again(server, how, probe, awkward_gguf):
    spoil(entry_of(server.cache, SPOILT), how)
    with weightwire.connect(server.endpoint, timeout=60) as connection:
        pushed = connection.push(awkward_gguf, cache="always", probe=probe, verify=True)
        check_all(pushed)
        assert (pushed.summary.hits, pushed.summary.corrupt_hits) == (len(LARGE) - 1, 1)
        assert pushed.summary.verified


def test_traffic_is_the_same_for_any_number_of_threads(server, awkward_gguf):
    """As a proxy saw it: once with everything in the cache, once with an entry missing and one cut short."""
    for state in ("all there", "some"):
        seen = []
        for threads in (0, 1, 2, 32):
            if state == "some":
                entry_of(server.cache, LARGE[0]).unlink(missing_ok=True)
                spoil(entry_of(server.cache, SPOILT), "half")
            with RecordingProxy(server.endpoint) as proxy, weightwire.connect(proxy.endpoint, timeout=60) as connection:
                check_all(connection.push(awkward_gguf, cache="always", threads=threads))
                reads = len(CONTENT)
            seen.append([(request.command, request.size) for request in proxy.requests][:-reads])
            names = [request.tensor.name for request in proxy.requests if request.tensor is not None]
            seen[-1].append(names[:-reads])
        assert seen[1:] == seen[:1] * 3
        assert any(command == Command.SET_TENSOR_HASH for command, _ in seen[0][:-1])
