"""Standard streams that are closed, broken or full: the right exit code, and nothing lost or written elsewhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import weightwire
from weightwire.cli.output import occupy_standard_descriptors

pytestmark = pytest.mark.timeout(120)


def without(*numbers: int) -> dict[str, object]:
    """Options of a process that starts without these descriptors."""

    def close() -> None:
        for number in numbers:
            os.close(number)

    names = ("stdin", "stdout", "stderr")
    return {"preexec_fn": close} | {names[number]: None for number in numbers}


SAYING = [("--help",), ("--version",), ("push", "--help"), ("serve", "-h")]


@pytest.mark.parametrize("words", SAYING, ids=" ".join)
def test_help_nobody_reads_is_quiet(spawn, finish, words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        ran = finish(spawn(*words, stdout=pipe))
    assert (ran.code, ran.err) == (141, "")


@pytest.mark.parametrize("words", SAYING, ids=" ".join)
def test_help_that_cannot_be_written(spawn, finish, words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        finish(spawn(*words, stdout=full)).failed(3, "standard output")
    finish(spawn(*words, **without(1))).failed(3, "standard output is closed", "hint:")


def test_without_stdout_nothing_is_done(spawn, finish, server, small_gguf: Path) -> None:
    for words in (("push", str(small_gguf), server.endpoints[0]), ("hash", str(small_gguf)), ("serve", "--port", "0")):
        finish(spawn(*words, **without(1))).failed(3, "standard output is closed")
        finish(spawn(*words, "--json", **without(1))).failed(3, "standard output is closed")
    assert not server.tensors


def test_without_stderr_exit_codes_stay(spawn, finish, server, small_gguf: Path) -> None:
    assert finish(spawn("hash", "missing.gguf", **without(2))).code == 2
    assert finish(spawn("hash", "missing.gguf", **without(2), environ={"WEIGHTWIRE_DEBUG": "1"})).out == ""
    assert finish(spawn("nosuch", **without(2))).code == 2
    assert finish(spawn(**without(2))).code == 2
    assert finish(spawn("hash", "missing.gguf", **without(1, 2))).code == 3
    assert finish(spawn("push", str(small_gguf), server.endpoints[0], **without(0, 2))).code == 0
    assert len(server.tensors) == 876
    assert finish(spawn("demo", "--size", "1MiB", **without(0, 2))).code == 0


def test_a_server_without_stdin_and_stderr_gives_their_numbers_to_no_client(spawn, finish) -> None:
    process = spawn("serve", "--port", "0", **without(0, 2), environ={"WEIGHTWIRE_LOG": "debug"})
    with weightwire.connect(process.stdout.readline().strip()) as connection:
        connection.barrier()
        assert {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (0, 2)} == {os.devnull}
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 0


def test_open_descriptors_are_left_alone() -> None:
    before = [os.fstat(number) for number in range(3)]
    there = set(os.listdir("/proc/self/fd"))
    occupy_standard_descriptors()
    assert [os.fstat(number).st_ino for number in range(3)] == [was.st_ino for was in before]
    assert set(os.listdir("/proc/self/fd")) == there
