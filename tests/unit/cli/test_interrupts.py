"""Ctrl-C, as a real signal, in the verbs that have no server: exit 130, and what was there is there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cachedir import contents, files_in, name_of
from support.leaks import eventually

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
SIZE, COUNT = 256 * MIB, 40
"""Sparse, and seconds of hashing."""

ON_AND_ON = """
import itertools
import MODULE as module
hash_them, number = module.FUNCTION, itertools.count()
def on_and_on(*arguments, **options):
    hashed = hash_them(*arguments, **options)
    while next(number) >= TIMES:
        hash_them(*arguments, **options)
    return hashed
module.FUNCTION = on_and_on
"""


def endless(module: str, function: str, times: int) -> str:
    """Has a process that has hashed so many ``times`` hash the next for ever, so that a signal finds it at work."""
    return ON_AND_ON.replace("MODULE", module).replace("FUNCTION", function).replace("TIMES", str(times))


SLOW_PRUNE = """
import sys, time
from weightwire.cache import prune
from weightwire.cli.root import root
remove = prune._remove
def slowly(entry):
    removed = remove(entry)
    time.sleep(0.5)
    return removed
prune._remove = slowly
root(sys.argv[1:])
"""
"""Removing is too quick for a signal to find it at work."""


@pytest.fixture
def large() -> Iterator[Path]:
    """A folder for files that are large and have no bytes on the disk."""
    folder = Path(tempfile.mkdtemp(prefix="weightwire-interrupt-"))
    yield folder
    shutil.rmtree(folder)


def test_hash(spawn, finish, large: Path) -> None:
    path = large / "model.safetensors"
    header = {
        f"t{at}": {"dtype": "U8", "shape": [SIZE], "data_offsets": [at * SIZE, (at + 1) * SIZE]} for at in range(COUNT)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + COUNT * SIZE)
    process = spawn("hash", str(path), "-q", first=endless("weightwire.hashing", "hash_payloads", 1))
    first = process.stdout.readline()
    assert first.split()[1:] == [str(SIZE), "t0"]
    process.send_signal(signal.SIGINT)
    ran = finish(process)
    assert (ran.code, ran.err) == (130, "weightwire: interrupted\n")
    assert len(ran.out.splitlines()) < COUNT - 1
    assert all(len(line.split()) == 3 for line in ran.out.splitlines()), "no line is cut"


@pytest.mark.parametrize("option", [[], ["--remove"], ["--quarantine"]], ids=["only look", "remove", "quarantine"])
@pytest.mark.parametrize("threads", ["0", "2"])
def test_cache_verify(spawn, finish, large: Path, option: list[str], threads: str) -> None:
    """What is said of an entry has been seen whole: one that was being read when the signal came is let be."""
    for number in range(COUNT):
        with (large / f"{number:016x}").open("wb") as file:
            file.truncate(SIZE)
    first = endless("weightwire.cache.check", "hash_with_digest", COUNT // 2)
    process = spawn("cache", "verify", "--cache", str(large), "--threads", threads, "-q", *option, first=first)

    def reading() -> bool:
        folder, found = f"/proc/{process.pid}/fd", []
        for name in os.listdir(folder):
            try:
                found.append(os.readlink(f"{folder}/{name}"))
            except FileNotFoundError:
                continue
        return any(Path(each).parent == large and len(Path(each).name) == 16 for each in found)

    assert eventually(reading, 60)
    process.send_signal(signal.SIGINT)
    ran = finish(process)
    assert (ran.code, ran.out, ran.err) == (130, "", "weightwire: interrupted\n")
    left = [path for path in large.iterdir() if len(path.name) == 16]
    assert len(left) == COUNT if not option else len(left) > 0
    assert {path.stat().st_size for path in left} == {SIZE}


def test_cache_prune(finish, tmp_path: Path) -> None:
    folder = tmp_path / "entries"
    folder.mkdir()
    for data in contents(*range(1000, 1020)).values():
        (folder / name_of(data)).write_bytes(data)
    before = files_in(folder)
    command = [sys.executable, "-c", SLOW_PRUNE, "cache", "prune", "--cache", str(folder), "--max-size", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert eventually(lambda: len(os.listdir(folder)) < len(before), 60)
        process.send_signal(signal.SIGINT)
        ran = finish(process)
    finally:
        process.kill()
        process.wait()
    assert (ran.code, ran.out, ran.err) == (130, "", "weightwire: interrupted\n")
    left = files_in(folder)
    assert 0 < len(left) < len(before)
    assert left.items() <= before.items(), "each is whole, or gone"
