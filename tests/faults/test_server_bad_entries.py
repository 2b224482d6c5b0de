"""Every kind of bad entry in a server's cache: not used, set aside or said once, and the client goes on."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.leaks import LeakCheck
from support.raw_client import RawClient
from support.reads import before_reads

from weightwire.cache.directory import entry_name
from weightwire.cache.quarantine import FOLDER, list_quarantine
from weightwire.cache.reading import PIECE
from weightwire.hashing import fnv1a64
from weightwire.server import Destination, Server

SIZE = 2 * PIECE + 4097
PAYLOAD = random.Random(1).randbytes(SIZE)
HASH = fnv1a64(PAYLOAD)
NAME = entry_name(HASH)


class Elsewhere(Destination):
    """Memory behind a hook."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        super().__init__(nbytes, device)
        self.data = bytearray(nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        self.data[offset : offset + view.nbytes] = view

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = self.data[offset : offset + view.nbytes]


def content(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(PAYLOAD))


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            sock.bind(path.name)
        finally:
            os.chdir(here)


MOVED = {
    "truncated": content(lambda data: data[:-1]),
    "half": content(lambda data: data[: SIZE // 2]),
    "empty": content(lambda data: b""),
    "oversized": content(lambda data: data + b"x"),
    "first byte flipped": content(lambda data: bytes((data[0] ^ 1,)) + data[1:]),
    "last byte flipped": content(lambda data: data[:-1] + bytes((data[-1] ^ 128,))),
    "zeros": content(lambda data: bytes(len(data))),
    "link to a good file": lambda path: ((path.parent / "x").write_bytes(PAYLOAD), path.symlink_to("x")),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "fifo": os.mkfifo,
    "socket": a_socket,
}


def check_goes_on(client: RawClient, directory: Path) -> None:
    """What was asked for is pushed, kept and found."""
    tensor = client.place("t", SIZE, client.allocate(SIZE))
    client.set(tensor, PAYLOAD, flag=1)
    again = client.place("again", SIZE, client.allocate(SIZE))
    assert client.set_from_cache(again, HASH)
    assert client.get(again) == PAYLOAD
    assert (directory / NAME).read_bytes() == PAYLOAD


@pytest.fixture(params=[None, Elsewhere], ids=["memory", "hook"])
def server(request: pytest.FixtureRequest, tmp_path: Path, no_leaks: LeakCheck) -> Iterator[Server]:
    with Server(port=0, cache=tmp_path, destination=request.param) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[RawClient]:
    with RawClient(server.port) as connected:
        yield connected


def ask(client: RawClient) -> bool:
    return client.set_from_cache(client.place("asked", SIZE, client.allocate(SIZE)), HASH)


@pytest.mark.parametrize("kind", MOVED)
def test_moved_away(
    server: Server, client: RawClient, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    MOVED[kind](tmp_path / NAME)
    assert not ask(client)
    assert "asked" not in server.tensors
    assert not os.path.lexists(tmp_path / NAME)
    assert [entry.content_hash for entry in list_quarantine(tmp_path)] == [HASH]
    (line,) = (record.getMessage() for record in caplog.records)
    assert NAME in line
    assert FOLDER in line
    assert not ask(client)
    assert len(caplog.records) == 1
    check_goes_on(client, tmp_path)


def test_a_directory_stays_and_is_said_once(
    server: Server, client: RawClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).mkdir()
    for _ in range(3):
        assert not ask(client)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.endswith("it cannot be moved away: it is a directory")
    assert (tmp_path / NAME).is_dir()
    client.barrier()


def broken(code: int) -> Callable[[int], None]:
    def call(offset: int) -> None:
        raise OSError(code, os.strerror(code))

    return call


def test_a_disk_that_cannot_read_it(
    server: Server, client: RawClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).write_bytes(PAYLOAD)
    with monkeypatch.context() as patch:
        before_reads(patch, broken(errno.EIO))
        assert not ask(client)
    assert "Input/output error" in caplog.text
    assert len(list_quarantine(tmp_path)) == 1
    check_goes_on(client, tmp_path)


def test_a_trouble_that_passes_costs_no_entry(
    server: Server, client: RawClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).write_bytes(PAYLOAD)
    with monkeypatch.context() as patch:
        before_reads(patch, broken(errno.ENOMEM))
        assert not ask(client)
    real = os.open

    def none_left(path: str, *arguments: int, **named: object) -> int:
        if str(path).endswith(NAME):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr("weightwire.cache.store.os.open", none_left)
        assert not ask(client)
    assert ask(client)
    assert list_quarantine(tmp_path) == []


@pytest.mark.parametrize("how", ["cut short", "emptied", "replaced", "overwritten", "grown"])
def test_changed_while_it_is_read(
    tmp_path: Path, no_leaks: LeakCheck, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = tmp_path / NAME
    path.write_bytes(PAYLOAD)
    os.utime(path, ns=(1, 1))
    done: list[bool] = []

    def change() -> None:
        if how == "cut short":
            os.truncate(path, PIECE + 5)
        elif how == "emptied":
            os.truncate(path, 0)
        elif how == "overwritten":
            path.write_bytes(bytes(SIZE))
        elif how == "grown":
            with open(path, "ab") as file:
                file.write(b"more")
        else:
            (tmp_path / "other").write_bytes(bytes(SIZE))
            os.replace(tmp_path / "other", path)

    def once(offset: int) -> None:
        if not done:
            done.append(True)
            change()

    before_reads(monkeypatch, once)
    with Server(port=0, cache=tmp_path) as server, RawClient(server.port) as client:
        tensor = client.place("t", SIZE, client.allocate(SIZE))
        if how == "replaced":
            # What was opened is whole and is what its name says: it is as good as ever.
            assert client.set_from_cache(tensor, HASH)
            assert client.get(tensor) == PAYLOAD
            assert not client.set_from_cache(tensor, HASH)
        else:
            assert not client.set_from_cache(tensor, HASH)
            assert "t" not in server.tensors
        assert len(list_quarantine(tmp_path)) == 1
        check_goes_on(client, tmp_path)


SERVE = """
import encodings.ascii, os, resource, sys  # what is imported later may not be readable then
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from weightwire.server import Server
with Server(port=0, cache=".") as server:
    if os.geteuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
    print(server.port, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A cache directory that a user without rights can get to, and write to."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o777)
        yield Path(path)
        os.chmod(path, 0o777)


@pytest.fixture
def own_process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a server in a process of its own, without the rights of a superuser."""
    started: list[subprocess.Popen[str]] = []

    def start(directory: Path, limit: int = 0) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SERVE, str(limit)]
        process = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_no_permission_to_read_an_entry(own_process: Callable[..., subprocess.Popen[str]], directory: Path) -> None:
    (directory / NAME).write_bytes(PAYLOAD)
    (directory / NAME).chmod(0)
    process = own_process(directory)
    with RawClient(port_of(process)) as client:
        assert not ask(client)
        assert not (directory / NAME).exists()
        check_goes_on(client, directory)
    assert len(list_quarantine(directory)) == 1
    _, said = process.communicate("\n", timeout=60)
    assert "Permission denied" in said


def test_a_directory_that_cannot_be_written(own_process: Callable[..., subprocess.Popen[str]], directory: Path) -> None:
    good = random.Random(2).randbytes(SIZE)
    (directory / entry_name(fnv1a64(good))).write_bytes(good)
    (directory / NAME).write_bytes(PAYLOAD[:-1])
    (directory / entry_name(fnv1a64(good))).chmod(0o444)
    (directory / NAME).chmod(0o444)
    directory.chmod(0o555)
    process = own_process(directory)
    with RawClient(port_of(process)) as client:
        for _ in range(3):
            assert not ask(client)
        tensor = client.place("t", SIZE, client.allocate(SIZE))
        client.set(tensor, PAYLOAD, flag=1)
        assert client.get(tensor) == PAYLOAD
        assert client.set_from_cache(tensor, fnv1a64(good))
        assert client.get(tensor) == good
    _, said = process.communicate("\n", timeout=60)
    assert len(os.listdir(directory)) == 2
    assert said.count("cannot be moved away: Permission denied") == 1
    assert "making a temporary file failed (Permission denied)" in said


def test_a_file_system_that_takes_no_more(own_process: Callable[..., subprocess.Popen[str]], directory: Path) -> None:
    process = own_process(directory, limit=SIZE // 2)
    with RawClient(port_of(process)) as client:
        for index in range(3):
            tensor = client.place(f"t{index}", SIZE, client.allocate(SIZE))
            client.set(tensor, PAYLOAD, flag=1)
            assert not ask(client)
            assert client.get(tensor) == PAYLOAD
        small = client.place("small", 5, client.allocate(5))
        client.set(small, b"small", flag=1)
        assert client.set_from_cache(small, fnv1a64(b"small"))
    _, said = process.communicate("\n", timeout=60)
    assert os.listdir(directory) == [entry_name(fnv1a64(b"small"))]
    assert said.count("File too large") == 1
