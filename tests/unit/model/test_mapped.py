"""Arrays in mapped files: read by position, so that a file cut short is an error and never a signal."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.leaks import LeakCheck

from weightwire import Server, connect
from weightwire.errors import ModelError
from weightwire.hashing import fnv1a64, hash_payload
from weightwire.model import open_model
from weightwire.ranges import FileRange

MIB = 1 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(np.random.default_rng(1).bytes(3 * MIB))
    return path


def test_a_memmap_becomes_a_range_of_its_file(path: Path, no_leaks: LeakCheck) -> None:
    data = path.read_bytes()
    array = np.memmap(path, np.float32, "r", offset=PAGE + 8, shape=(100, 50))
    with open_model({"whole": array, "part": array[10:20], "heap": np.arange(5)}) as model:
        whole, part = model.tensors["whole"].payload, model.tensors["part"].payload
        assert isinstance(whole, FileRange)
        assert isinstance(part, FileRange)
        assert (whole.offset, whole.nbytes, whole.path) == (PAGE + 8, 20_000, str(path))
        assert (part.fd, part.offset, part.nbytes) == (whole.fd, PAGE + 8 + 2000, 2000)
        assert isinstance(model.tensors["heap"].payload, memoryview)
        assert model.files == (str(path),)
        assert bytes(model.tensors["part"].view()) == data[part.offset : part.offset + 2000]
        assert model.tensors["part"].ne == (50, 10)
    with pytest.raises(ModelError, match="closed"):
        model.check_unchanged()


def _private(path: Path) -> np.ndarray[Any, Any]:
    array = np.memmap(path, np.uint8, "c")
    array[5 * PAGE : 5 * PAGE + 4] = 7  # in this memory and not in the file
    return array


def _deleted(path: Path) -> np.ndarray[Any, Any]:
    array = np.memmap(path, np.uint8, "r")
    path.unlink()
    return array


def _replaced(path: Path) -> np.ndarray[Any, Any]:
    array = np.memmap(path, np.uint8, "r")
    (path.parent / "other").write_bytes(bytes(3 * MIB))
    (path.parent / "other").replace(path)
    return array


def _plain_mmap(path: Path) -> np.ndarray[Any, Any]:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)


@pytest.mark.parametrize("make", [_private, _deleted, _replaced, _plain_mmap])
def test_whatever_is_mapped_is_sent_as_the_array_has_it(make: Any, path: Path, no_leaks: LeakCheck) -> None:
    array = make(path)
    model = {
        "large": array,
        "small": array[5 * PAGE - 100 : 5 * PAGE + 100],
        "next": array[9 * PAGE : 9 * PAGE + 10],
        "strided": array[1000:90_000:7][::-1],
        "swapped": array[8:4008].view(">i4"),
    }
    with open_model(model) as opened:
        for name in ("large", "small", "next"):
            payload = opened.tensors[name].payload
            assert isinstance(payload, FileRange)
            assert hash_payload(payload) == fnv1a64(model[name].tobytes())
        with Server(port=0) as server, connect(server.endpoints[0], timeout=20) as connection:
            result = connection.push(opened, verify=True)
            for name, value in model.items():
                expected = value.astype(value.dtype.newbyteorder("<")).tobytes()
                assert result[name].read().tobytes() == expected, name
    del array, model, opened


def test_anonymous_shared_memory_is_used_where_it_is() -> None:
    with open_model({"a": np.frombuffer(mmap.mmap(-1, 2 * MIB), np.uint8)}) as model:
        assert isinstance(model.tensors["a"].payload, memoryview)


def test_a_file_that_is_too_short_already(path: Path, no_leaks: LeakCheck) -> None:
    array = np.memmap(path, np.uint8, "r")
    os.truncate(path, MIB)
    with pytest.raises(ModelError, match="shorter than its mapping"):
        open_model({"a": array})
    assert open_model({"a": array[:MIB]}).nbytes == MIB


CUT_SHORT = """
import mmap, os, sys
import numpy as np
import weightwire
from weightwire.errors import ModelError, TransportError

path, kind, moment, options = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])
if kind == "mmap":
    array = np.frombuffer(mmap.mmap(os.open(path, os.O_RDONLY), 0, prot=mmap.PROT_READ), np.uint8)
else:
    array = np.memmap(path, np.uint8, {"memmap": "r", "strided": "r", "private": "c", "deleted": "r"}[kind])
shorter = os.open(path, os.O_RDWR)
if kind == "deleted":
    os.unlink(path)
if kind == "strided":
    array = array[::3]

def cut(*_):
    os.ftruncate(shorter, 4096)

with weightwire.Server(port=0) as server, weightwire.connect(server.endpoints[0], timeout=20) as connection:
    try:
        if moment == "before":
            cut()
            connection.push({"a": array}, **options)
        elif moment == "opened":
            model = weightwire.open_model({"a": array})
            cut()
            connection.push(model, **options)
        else:
            connection.push({"a": array}, progress=cut, **options)
    except (ModelError, TransportError) as error:
        print(type(error).__name__, error)
    else:
        print("nothing")
"""


@pytest.mark.parametrize("options", [{}, {"cache": "always"}, {"verify": True}], ids=["plain", "cache", "verify"])
@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("memmap", "before"),
        ("memmap", "opened"),
        ("memmap", "sending"),
        ("mmap", "opened"),
        ("deleted", "before"),
        ("deleted", "opened"),
        ("private", "opened"),
        ("private", "sending"),
        ("strided", "before"),
    ],
)
def test_a_file_cut_short_is_an_error(kind: str, moment: str, options: dict[str, Any], path: Path) -> None:
    os.truncate(path, 80 * MIB)
    run = subprocess.run(
        [sys.executable, "-c", CUT_SHORT, str(path), kind, moment, repr(options)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, (run.returncode, run.stderr)
    assert run.stdout.startswith("ModelError"), run.stdout
    assert "short" in run.stdout, run.stdout


def rewrite(path: Path) -> None:
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:  # time stamps are only so fine
        with path.open("r+b") as file:
            file.write(b"other")


def test_a_file_that_is_written_to_while_an_array_is_read_from_it(path: Path, no_leaks: LeakCheck) -> None:
    array = np.memmap(path, np.uint8, "r")
    with open_model({"a": array}) as model:
        model.check_unchanged()
        rewrite(path)
        with pytest.raises(ModelError, match="modified"):
            model.check_unchanged()


def test_who_may_write_through_a_mapping_may(path: Path, no_leaks: LeakCheck) -> None:
    """However it is mapped once more: the kernel has one time for all that is written."""
    array, mine = np.memmap(path, np.uint8, "r"), np.memmap(path, np.uint8, "r+")
    with open_model({"a": array, "b": mine}) as model:
        before = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == before:
            mine[:5] += 1
            mine.flush()
        model.check_unchanged()
