"""The streaming receive path: memory, hooks, and the cache."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.leaks import LeakCheck
from support.raw_client import RawClient

from weightwire.cache.quarantine import FOLDER
from weightwire.cache.store import TensorCache
from weightwire.hashing import fnv1a64
from weightwire.server import Destination, HostMemory, Server
from weightwire.server.staging import STAGING_BYTES
from weightwire.wire import CACHE_THRESHOLD, Command

BIG = CACHE_THRESHOLD + 1


class Recorder(Destination):
    """Keeps the bytes and every call. ``made`` lists them all."""

    made: list[Recorder]

    def __init__(self, nbytes: int, device: int = 0) -> None:
        super().__init__(nbytes)
        self.data = bytearray(nbytes)
        self.calls: list[tuple[int, int]] = []
        self.closed = 0
        self.made.append(self)

    def write(self, offset: int, view: memoryview) -> None:
        assert view.readonly
        assert view.contiguous
        assert view.format == "B"
        self.calls.append((offset, view.nbytes))
        self.data[offset : offset + view.nbytes] = view

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = self.data[offset : offset + view.nbytes]

    def close(self) -> None:
        self.closed += 1


class Watched(HostMemory):
    """Host memory whose write does something besides."""

    made: list[Watched]

    def __init__(self, nbytes: int, device: int = 0) -> None:
        super().__init__(nbytes)
        self.calls: list[tuple[int, int]] = []
        self.made.append(self)

    def write(self, offset: int, view: memoryview) -> None:
        self.calls.append((offset, view.nbytes))
        super().write(offset, view)


@pytest.fixture(autouse=True, params=["optimized", "plain"])
def _fresh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_RPC_LOAD_OPT", "0" if request.param == "plain" else "1")
    monkeypatch.setattr(Recorder, "made", [], raising=False)
    monkeypatch.setattr(Watched, "made", [], raising=False)


def expand(calls: list[tuple[int, int]]) -> list[int]:
    return [byte for offset, nbytes in calls for byte in range(offset, offset + nbytes)]


@pytest.mark.parametrize("make", [Recorder, Watched])
class TestHooks:
    """Every byte goes through the hook: in order, and exactly once."""

    @pytest.fixture
    def client(self, make: type[Recorder] | type[Watched], no_leaks: LeakCheck) -> Iterator[RawClient]:
        with Server(port=0, destination=make) as server, RawClient(server.port) as connected:
            yield connected

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_splits(self, make: type[Recorder], client: RawClient, data: st.DataObject) -> None:
        nbytes = data.draw(st.integers(1, 3000), "tensor bytes")
        writes = data.draw(
            st.lists(st.tuples(st.integers(0, nbytes), st.integers(0, nbytes)).map(sorted), max_size=6), "ranges"
        )
        cuts = data.draw(st.lists(st.integers(1, 4000), max_size=6), "pieces on the wire")
        buffer = client.allocate(nbytes)
        tensor = client.place("t", nbytes, buffer)
        model = bytearray(nbytes)
        sent = b""
        for start, end in writes:
            payload = random.Random(start * 7919 + end).randbytes(end - start)
            model[start:end] = payload
            head = client.dialect.encode_set_tensor(tensor, start, 0)
            sent += bytes((Command.SET_TENSOR,)) + (len(head) + len(payload)).to_bytes(8, "little") + head + payload
        at = 0
        for cut in cuts:
            client.socket.sendall(sent[at : at + cut])
            at += cut
        client.socket.sendall(sent[at:])
        assert client.get(tensor) == model
        hook = make.made[-1]
        assert expand(hook.calls) == [byte for start, end in writes for byte in range(start, end)]
        client.free(buffer[0])
        client.barrier()

    def test_larger_than_the_staging_buffer(self, make: type[Recorder], client: RawClient) -> None:
        nbytes = 3 * STAGING_BYTES + 17
        payload = random.Random(1).randbytes(nbytes)
        tensor = client.place("t", nbytes, client.allocate(nbytes + 5), 5)
        client.set(tensor, payload)
        assert client.get(tensor) == payload
        calls = make.made[0].calls
        assert [offset for offset, _ in calls] == [5 + index * STAGING_BYTES for index in range(4)]
        assert sum(length for _, length in calls) == nbytes

    def test_fill_and_copy_and_rows_too(self, make: type[Recorder], no_leaks: LeakCheck) -> None:
        with Server(port=0, protocol="8.0", destination=make) as server, RawClient(server.port, "8.0") as client:
            buffer = client.allocate(4096)
            source, target = client.place("a", 100, buffer), client.place("b", 100, buffer, 1000)
            client.tell(Command.MEMSET_TENSOR, client.dialect.encode_memset(source, 10, 50, 0xEE))
            head = client.dialect.encode_set_tensor_2d(source, 0, 3, 4, 20)
            client.tell(Command.SET_TENSOR_2D, head + b"abcdefghijkl")
            assert client.ask(Command.COPY_TENSOR, client.dialect.encode_copy_tensor(source, target)) == b"\1"
            model = bytearray(100)
            model[10:60] = b"\xee" * 50
            for row in range(4):
                model[row * 20 : row * 20 + 3] = b"abcdefghijkl"[row * 3 : row * 3 + 3]
            assert client.get(target) == model
            rows = client.ask(Command.GET_TENSOR_2D, client.dialect.encode_get_tensor_2d(target, 0, 3, 4, 20))
            assert rows == b"abcdefghijkl"
            calls = make.made[0].calls
        assert calls == [(10, 50), (0, 3), (20, 3), (40, 3), (60, 3), (1000, 100)]

    @pytest.mark.parametrize("value", [0, 0xEE])
    def test_clearing_a_buffer_too(self, make: type[Recorder], client: RawClient, value: int) -> None:
        """Zeros as well: of memory that nothing was written to yet, the hook may not know that it holds them."""
        nbytes = (2 << 20) + 7
        buffer = client.allocate(nbytes)
        client.tell(Command.BUFFER_CLEAR, client.dialect.encode_buffer_clear(buffer[0], value))
        assert client.get(client.place("t", nbytes, buffer)) == bytes((value,)) * nbytes
        assert expand(make.made[0].calls) == list(range(nbytes))

    def test_from_the_cache(self, make: type[Recorder], tmp_path: Path, no_leaks: LeakCheck) -> None:
        payload = random.Random(2).randbytes(2 * STAGING_BYTES + 3)
        with Server(port=0, cache=tmp_path, destination=make) as server, RawClient(server.port) as client:
            tensor = client.place("t", len(payload), client.allocate(len(payload)))
            client.set(tensor, payload, flag=1)
            again = client.place("t", len(payload), client.allocate(len(payload)))
            assert client.set_from_cache(again, fnv1a64(payload))
            assert client.get(again) == payload
            assert expand(make.made[1].calls) == list(range(len(payload)))
            assert (tmp_path / f"{fnv1a64(payload):016x}").read_bytes() == payload

    def test_a_bad_entry_is_not_shown_to_the_hook(
        self, make: type[Recorder], tmp_path: Path, no_leaks: LeakCheck
    ) -> None:
        (tmp_path / f"{5:016x}").write_bytes(b"x" * 100)
        with Server(port=0, cache=tmp_path, destination=make) as server, RawClient(server.port) as client:
            tensor = client.place("t", 100, client.allocate(100))
            assert not client.set_from_cache(tensor, 5)
            assert make.made[0].calls == []
        assert os.listdir(tmp_path) == [FOLDER]


@pytest.mark.parametrize("destination", [None, HostMemory, lambda nbytes, device: HostMemory(nbytes + 100)])
def test_only_plain_host_memory_is_written_directly(
    destination: Callable[[int, int], Destination] | None, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_this_way(self: HostMemory, offset: int, view: memoryview) -> None:
        raise AssertionError("copied instead of received in place")

    monkeypatch.setattr(HostMemory, "write", not_this_way)
    with Server(port=0, destination=destination) as server, RawClient(server.port) as client:
        tensor = client.place("t", 5000, client.allocate(5000))
        client.set(tensor, bytes(range(250)) * 20)
        assert client.get(tensor) == bytes(range(250)) * 20


def test_a_hook_that_fails_ends_its_client_with_one_line(no_leaks: LeakCheck, caplog: pytest.LogCaptureFixture) -> None:
    class Full(Recorder):
        def write(self, offset: int, view: memoryview) -> None:
            raise RuntimeError("device lost")

    with Server(port=0, destination=Full) as server:
        with RawClient(server.port) as client:
            client.set(client.place("t", 100, client.allocate(100)), bytes(100))
            assert client.closed()
        assert "t" not in server.tensors
        with RawClient(server.port) as client:
            client.barrier()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "SET_TENSOR of tensor 't'" in caplog.text
    (line,) = caplog.messages
    assert line.endswith("RuntimeError: device lost")
    assert caplog.records[0].exc_info is None  # a line, not a traceback
    assert [hook.closed for hook in Full.made] == [1]


def test_hooks_are_closed_once_when_freed_or_left(no_leaks: LeakCheck) -> None:
    with Server(port=0, destination=Recorder) as server, RawClient(server.port) as client:
        freed = client.allocate(10)
        client.allocate(10)
        client.free(freed[0])
        client.barrier()
        assert [hook.closed for hook in Recorder.made] == [1, 0]
    assert [hook.closed for hook in Recorder.made] == [1, 1]


def test_kept_tensors_keep_their_hook_open(no_leaks: LeakCheck) -> None:
    with Server(port=0, destination=Recorder, retain="process") as server:
        with RawClient(server.port) as client:
            client.set(client.place("t", 4, client.allocate(10)), b"kept")
            client.barrier()
        assert bytes(server.tensors["t"].view()) == b"kept"
        assert Recorder.made[0].closed == 0
        held = server.tensors["t"]
    assert Recorder.made[0].closed == 1
    with pytest.raises(ValueError, match="closed"):
        held.view()


class TestCache:
    """Saving, and filling from what was saved."""

    @pytest.fixture
    def directory(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
        caplog.set_level(logging.WARNING, "weightwire")
        return tmp_path

    @pytest.fixture
    def server(self, directory: Path, no_leaks: LeakCheck) -> Iterator[Server]:
        with Server(port=0, cache=directory) as running:
            yield running

    @pytest.fixture
    def client(self, server: Server) -> Iterator[RawClient]:
        with RawClient(server.port) as connected:
            yield connected

    payload = random.Random(3).randbytes(100_003)
    hash = fnv1a64(payload)

    def entry(self, directory: Path) -> Path:
        return directory / f"{self.hash:016x}"

    def test_saved_and_filled(self, server: Server, client: RawClient, directory: Path) -> None:
        tensor = client.place("t", len(self.payload), client.allocate(1 << 20), 64)
        assert not client.set_from_cache(tensor, self.hash)
        client.set(tensor, self.payload, flag=1)
        client.barrier()
        with RawClient(server.port) as other:
            again = other.place("again", len(self.payload), other.allocate(1 << 20))
            assert other.set_from_cache(again, self.hash)
            assert self.entry(directory).read_bytes() == self.payload
            assert other.get(again) == self.payload
            assert bytes(server.tensors["again"].view()) == self.payload

    def test_a_range_of_a_tensor_may_be_filled(self, client: RawClient, directory: Path) -> None:
        self.entry(directory).write_bytes(self.payload)
        tensor = client.place("t", len(self.payload) + 10, client.allocate(1 << 20))
        assert client.set_from_cache(tensor, self.hash, 10)
        assert client.get(tensor) == bytes(10) + self.payload
        assert self.entry(directory).exists()

    @pytest.mark.parametrize(
        ("protocol", "flag", "nbytes", "saved"),
        [
            ("2.0", 0, BIG, True),
            ("2.0", 0, BIG - 1, False),
            ("6.0", 0, BIG, True),
            ("7.0", 0, BIG, False),
            ("7.0", 1, 64, True),
            ("8.0", 255, 64, True),
            ("8.0", 0, 64, False),
        ],
    )
    def test_what_is_saved_depends_on_the_version(
        self, protocol: str, flag: int, nbytes: int, saved: bool, directory: Path, no_leaks: LeakCheck
    ) -> None:
        with Server(port=0, cache=directory, protocol=protocol) as server, RawClient(server.port, protocol) as client:
            client.set(client.place("t", nbytes, client.allocate(nbytes)), bytes(nbytes), flag=flag)
            client.barrier()
            server.close()
            assert os.listdir(directory) == ([f"{fnv1a64(bytes(nbytes)):016x}"] if saved else [])

    def test_without_a_cache_the_answer_is_no(self, no_leaks: LeakCheck) -> None:
        with Server(port=0) as server, RawClient(server.port) as client:
            tensor = client.place("t", 64, client.allocate(64))
            client.set(tensor, bytes(64), flag=1)
            assert not client.set_from_cache(tensor, fnv1a64(bytes(64)))

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda data: b"", "it is empty"),
            (lambda data: data[: len(data) // 2], "bytes, where the tensor has"),
            (lambda data: data[:-1], "bytes, where the tensor has"),
            (lambda data: data + b"\0", "bytes, where the tensor has"),
            (lambda data: data[:5] + bytes((data[5] ^ 1,)) + data[6:], "not what its name says"),
        ],
        ids=["empty", "half", "short", "long", "flipped"],
    )
    def test_a_bad_entry_is_not_answered_goes_to_quarantine_and_is_saved_anew(
        self,
        change: Callable[[bytes], bytes],
        said: str,
        server: Server,
        client: RawClient,
        directory: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        bad = change(self.payload)
        self.entry(directory).write_bytes(bad)
        tensor = client.place("t", len(self.payload), client.allocate(1 << 20))
        assert not client.set_from_cache(tensor, self.hash)
        assert "t" not in server.tensors
        assert len(caplog.records) == 1
        assert said in caplog.text
        assert not self.entry(directory).exists()
        assert (directory / FOLDER / f"{self.hash:016x}-0").read_bytes() == bad
        client.set(tensor, self.payload, flag=1)
        assert client.get(tensor) == self.payload
        server.close()
        assert self.entry(directory).read_bytes() == self.payload

    def test_a_tensor_that_a_bad_entry_overwrote_is_no_longer_served(
        self, server: Server, client: RawClient, directory: Path
    ) -> None:
        tensor = client.place("t", len(self.payload), client.allocate(1 << 20))
        client.set(tensor, self.payload)
        client.barrier()
        assert "t" in server.tensors
        self.entry(directory).write_bytes(bytes(len(self.payload)))
        assert not client.set_from_cache(tensor, self.hash)
        # The plain way looks at an entry before it copies it: nothing has been overwritten.
        assert ("t" in server.tensors) == (not server.optimized)

    def test_a_good_entry_of_another_size_is_left_alone(self, client: RawClient, directory: Path) -> None:
        self.entry(directory).write_bytes(self.payload)
        tensor = client.place("t", len(self.payload) + 1, client.allocate(1 << 20))
        assert not client.set_from_cache(tensor, self.hash)
        assert self.entry(directory).exists()

    def test_a_link_is_not_followed(
        self, server: Server, client: RawClient, directory: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        target = tmp_path_factory.mktemp("foreign") / "file"
        target.write_bytes(self.payload)
        self.entry(directory).symlink_to(target)
        tensor = client.place("t", len(self.payload), client.allocate(1 << 20))
        assert not client.set_from_cache(tensor, self.hash)
        assert (directory / FOLDER / f"{self.hash:016x}-0").is_symlink()
        client.set(tensor, self.payload, flag=1)
        client.barrier()
        server.close()
        assert target.read_bytes() == self.payload
        assert not self.entry(directory).is_symlink()
        assert self.entry(directory).read_bytes() == self.payload

    def test_a_directory_is_left_alone(
        self, server: Server, client: RawClient, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.entry(directory).mkdir()
        tensor = client.place("t", len(self.payload), client.allocate(1 << 20))
        for _ in range(3):
            assert not client.set_from_cache(tensor, self.hash)
        assert len(caplog.records) == 1
        assert "it cannot be moved away: it is a directory" in caplog.text
        client.set(tensor, self.payload, flag=1)
        assert client.get(tensor) == self.payload
        server.close()
        assert os.listdir(directory) == [self.entry(directory).name]
        assert "Is a directory" in caplog.messages[-1]

    def test_a_cache_that_cannot_be_written_loses_only_the_entries(
        self, server: Server, client: RawClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def read_only(*args: object, **kwargs: object) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr("weightwire.cache.writing.tempfile.mkstemp", read_only)
        buffer = client.allocate(1 << 20)
        for index in range(3):
            tensor = client.place(f"t{index}", len(self.payload), buffer, index * 200_000)
            client.set(tensor, self.payload, flag=1)
            assert client.get(tensor) == self.payload
        server.close()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "Read-only file system" in caplog.text

    @pytest.mark.parametrize("make", [None, Recorder])
    def test_an_entry_that_is_there_already_is_not_written_again(
        self, directory: Path, no_leaks: LeakCheck, make: type[Recorder] | None
    ) -> None:
        def push() -> int:
            with Server(port=0, cache=directory, destination=make) as server, RawClient(server.port) as client:
                tensor = client.place("t", len(self.payload), client.allocate(1 << 20))
                client.set(tensor, self.payload, flag=1)
                client.barrier()
            assert self.entry(directory).read_bytes() == self.payload
            return self.entry(directory).stat().st_ino

        first = push()
        assert push() == first
        # One that is wrong is, though nobody has asked for it.
        self.entry(directory).write_bytes(bytes(len(self.payload)))
        assert push() != first

    def test_a_client_that_dies_leaves_no_entry(
        self, server: Server, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for make in (None, Recorder):
            with Server(port=0, cache=directory, destination=make) as other, RawClient(other.port) as client:
                tensor = client.place("t", len(self.payload), client.allocate(1 << 20))
                head = client.dialect.encode_set_tensor(tensor, 0, 1)
                client.send(Command.SET_TENSOR, head + self.payload[:-1], size=len(head) + len(self.payload))
                client.finish_sending()
                assert client.closed()
            assert os.listdir(directory) == []

    def test_nothing_is_saved_of_no_bytes(self, client: RawClient, directory: Path) -> None:
        client.set(client.place("t", 10, client.allocate(10)), b"", flag=1)
        client.barrier()
        assert os.listdir(directory) == []

    def test_a_cache_object_may_be_given(self, directory: Path, no_leaks: LeakCheck) -> None:
        cache = TensorCache(directory)
        cache.path_for(self.hash).write_bytes(self.payload)
        with Server(port=0, cache=cache) as server, RawClient(server.port) as client:
            tensor = client.place("t", len(self.payload), client.allocate(1 << 20))
            assert client.set_from_cache(tensor, self.hash)
