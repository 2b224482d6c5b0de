"""``weightwire seed``."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cachedir import contents, entries_of, files_in, name_of, write_model
from support.leaks import eventually
from support.require import do_without

from weightwire.cache import seeding

MIB = 1 << 20


@pytest.fixture
def tensors() -> dict[str, bytes]:
    return contents(11 * MIB, 10 * MIB, 10 * MIB + 1)


@pytest.fixture
def model(tmp_path: Path, tensors: dict[str, bytes]) -> Path:
    return write_model(tmp_path / "model.safetensors", tensors)


def test_lines(invoke, model: Path, tensors: dict[str, bytes], tmp_path: Path) -> None:
    ran = invoke("seed", str(model), "--cache", str(tmp_path / "c"))
    assert (ran.code, ran.err) == (0, "")
    assert files_in(tmp_path / "c") == entries_of(tensors["t0"], tensors["t2"])
    assert "2 tensors over 10 MiB" in ran.out
    assert "2 entries written, 21.0 MiB" in ran.out
    again = invoke("seed", str(model), "--cache", str(tmp_path / "c"))
    assert "2 entries were there already; by name and size, --verify reads them" in again.out
    (tmp_path / "c" / name_of(tensors["t0"])).write_bytes(bytes(11 * MIB))
    mended = invoke("seed", str(model), "--cache", str(tmp_path / "c"), "--verify")
    assert "1 of them replaced a damaged entry" in mended.out
    assert "1 entry was there already; read, and sound" in mended.out


def test_the_object(invoke, model: Path, tmp_path: Path) -> None:
    report = invoke("seed", str(model), "--cache", str(tmp_path / "c"), "--json", "--threads", "1").json
    seconds = report.pop("seconds")
    assert 0 < seconds == round(seconds, 6)
    assert report.pop("gib_per_s") > 0
    assert 0 <= report.pop("cloned_bytes") <= 21 * MIB + 1
    assert report == {
        "model": str(model),
        "directory": str(tmp_path / "c"),
        "tensors": 2,
        "bytes": 21 * MIB + 1,
        "written": 2,
        "written_bytes": 21 * MIB + 1,
        "replaced": 0,
        "present": 0,
        "unread": 0,
        "duplicates": 0,
    }


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"LLAMA_CACHE": "{}/a", "XDG_CACHE_HOME": "{}/b"}, "a/rpc"),
        ({"LLAMA_CACHE": "", "XDG_CACHE_HOME": "{}/b"}, "b/llama.cpp/rpc"),
        ({"LLAMA_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "{}/h"}, "h/.cache/llama.cpp/rpc"),
    ],
)
def test_the_default_directory(
    environ: dict[str, str], place: str, invoke, model: Path, tmp_path: Path, tensors: dict[str, bytes]
) -> None:
    given = {name: value.format(tmp_path) for name, value in environ.items()}
    assert invoke("seed", str(model), **given).code == 0
    assert files_in(tmp_path / place) == entries_of(tensors["t0"], tensors["t2"])
    tilde = {"HOME": str(tmp_path / "home")}
    assert invoke("seed", str(model), "--cache", "~/x", **tilde).code == 0
    assert len(files_in(tmp_path / "home" / "x")) == 2


def test_the_users_index_is_used(invoke, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightwire.index import identity

    monkeypatch.setattr(identity, "_RACY_NS", 0)
    environ = {"WEIGHTWIRE_INDEX": str(tmp_path / "index.sqlite3")}
    invoke("seed", str(model), "--cache", str(tmp_path / "c"), **environ)
    listed = invoke("cache", "list", "--cache", str(tmp_path / "c"), "--json", **environ).json["entries"]
    assert sorted(entry["tensors"][0]["tensor"] for entry in listed) == ["t0", "t2"]
    invoke("seed", str(model), WEIGHTWIRE_INDEX="", LLAMA_CACHE=str(tmp_path / "l")).failed(2, "WEIGHTWIRE_INDEX")


def test_usage(invoke, model: Path, tmp_path: Path) -> None:
    cache = ("--cache", str(tmp_path / "c"))
    invoke("seed", str(model), *cache, "--threads", "65").failed(2, "--threads")
    invoke("seed", str(model), *cache, "--threads", "-1").failed(2, "--threads")
    invoke("seed", str(model), *cache, GGML_RPC_LOAD_THREADS="many").failed(2, "GGML_RPC_LOAD_THREADS")
    invoke("seed", str(model), *cache, "--include", "[").failed(2, "--include")
    invoke("seed", str(model), *cache, "--include", "nosuch").failed(2, "nosuch")
    invoke("seed", str(model), "--cache", " ").failed(2, "--cache")
    invoke("seed", str(tmp_path / "none.gguf"), *cache).failed(2, "none.gguf")
    assert not (tmp_path / "c").exists()
    (tmp_path / "file").write_bytes(b"")
    invoke("seed", str(model), "--cache", str(tmp_path / "file")).failed(2, "file")


def test_threads_from_the_environment(invoke, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = seeding.worker_count

    def watched(threads: int | None) -> int:
        seen.append(real(threads))
        return 0

    monkeypatch.setattr(seeding, "worker_count", watched)
    invoke("seed", str(model), "--cache", str(tmp_path / "c"), GGML_RPC_LOAD_THREADS="3")
    invoke("seed", str(model), "--cache", str(tmp_path / "c"), "--threads", "0", GGML_RPC_LOAD_THREADS="3")
    invoke("seed", str(model), "--cache", str(tmp_path / "c"))
    assert seen[:2] == [3, 0]
    assert 1 <= seen[2] <= 8


def test_a_model_with_nothing_large(invoke, small_gguf: Path, tmp_path: Path) -> None:
    ran = invoke("seed", str(small_gguf), "--cache", str(tmp_path / "c"))
    assert ran.code == 0
    assert "0 tensors over 10 MiB" in ran.out


#: Mounts a file system of 16 MiB at the first argument, runs the others, and copies what is there to "<first>-left".
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=16m tmpfs "$1" || exit 77
disk=$1; shift; "$@"; code=$?
cp -r "$disk" "$disk-left" && exit $code
"""


@pytest.fixture
def fill_a_disk(command, model: Path, tmp_path: Path) -> Callable[..., tuple[str, dict[str, bytes]]]:
    """Seed a cache on a file system that is too small: what was said, and the entries that are left. Mounted where only
    the process sees it, which takes no root.
    """

    def seed(*options: str) -> tuple[str, dict[str, bytes]]:
        place = tmp_path / "disk"
        place.mkdir()
        alone = ["unshare", "--mount", *(("--user", "--map-root-user") if os.geteuid() else ())]
        words = command("seed", str(model), "--cache", str(place / "c"), *options)
        try:
            done = subprocess.run(
                [*alone, "sh", "-c", ON_A_SMALL_DISK, "sh", str(place), *words],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False,
            )  # fmt: skip
        except FileNotFoundError:
            do_without("a small file system", "there is no unshare here")
        if done.returncode == 77 or done.stderr.startswith("unshare:"):
            do_without("a small file system", done.stderr.strip())
        assert done.returncode == 1, done.stderr
        assert done.stderr.count("weightwire: error: ") == 1, done.stderr
        return done.stderr, files_in(tmp_path / "disk-left" / "c")

    return seed


def test_a_full_disk(fill_a_disk, tensors: dict[str, bytes]) -> None:
    said, left = fill_a_disk("--threads", "0")
    for words in ("No space left on device", "'t2'", "1 of 2 entries were stored", "cache prune"):
        assert words in said
    assert left == entries_of(tensors["t0"])


def test_a_full_disk_with_threads(fill_a_disk, tensors: dict[str, bytes]) -> None:
    """Each thread's half of an entry takes room from the other's: what fits by itself is there all the same."""
    said, left = fill_a_disk("--threads", "2")
    for words in ("No space left on device", "1 of 2 entries were stored"):
        assert words in said
    assert len(left) == 1
    assert left.items() <= entries_of(tensors["t0"], tensors["t2"]).items()


def test_a_directory_that_may_not_be_written(invoke, model: Path, tmp_path: Path) -> None:
    if os.geteuid():
        (tmp_path / "c").mkdir(0o555)
        ran = invoke("seed", str(model), "--cache", str(tmp_path / "c"))
    else:
        # Permissions do not apply to root; a file system that is mounted read-only does.
        (tmp_path / "c").mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path / "c")]
        if subprocess.run(mount, check=False).returncode:
            do_without("a file system that is mounted read-only", "this container may not mount one")
        try:
            ran = invoke("seed", str(model), "--cache", str(tmp_path / "c"))
            below = invoke("seed", str(model), "--cache", str(tmp_path / "c" / "below"))
        finally:
            subprocess.run(["umount", tmp_path / "c"], check=True)
        below.failed(3, "Read-only", "may write to")
    ran.failed(3, str(tmp_path / "c"), "may write to")


@pytest.mark.parametrize("verb", ["seed", "serve"])
def test_a_cache_directory_that_cannot_be_made(
    verb: str, invoke, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("seed", str(model)) if verb == "seed" else ("serve", "--port", "0")
    dangling, circle = tmp_path / "dangling", tmp_path / "circle"
    dangling.symlink_to("nowhere")
    circle.symlink_to("circle")
    for path, said in (
        (model, "is not a directory"),
        ("/dev/null", "is not a directory"),
        (dangling, "link to nowhere"),
        (circle, "link to circle"),
    ):
        ran = invoke(*words, "--cache", str(path)).failed(2, str(path), said, "name a directory")
        assert "may write to" not in ran.err
    for path, said, hint in (
        (model / "sub", f"{model} is not a directory", "through none but such"),
        (dangling / "sub", f"{dangling} is not a directory", "through none but such"),
        ("/proc/weightwire", "No such file", "another place"),
        ("x" * 300, "too long", "shorter"),
        (circle / "sub", "symbolic links", "circle"),
    ):
        ran = invoke(*words, "--cache", str(path)).failed(3, "cannot create cache directory", said, hint)
        assert "may write to" not in ran.err
        assert "File exists" not in ran.err
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    invoke(*words, "--cache", "relative").failed(3, "No such file", "absolute")
    monkeypatch.chdir(tmp_path)
    for number, hint in ((errno.ENOSPC, "make room"), (errno.EROFS, "may write to"), (errno.EACCES, "may write to")):

        def refuse(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "mkdir", refuse)
        ran = invoke(*words, "--cache", "made", "--json").failed(3, os.strerror(number), hint)
        assert ran.json["error"]["type"] == "CacheDirectoryError"
        assert ran.json["error"]["errno"] == number


HELD = """
import itertools, time
from weightwire.cache.copying import CopyingWriter
fill, number = CopyingWriter.fill, itertools.count()
def hold(writer, payload, check, tell):
    cloned = fill(writer, payload, check, tell)
    while next(number) >= FROM:
        check()
        time.sleep(0.01)
    return cloned
CopyingWriter.fill = hold
"""


def held(first: int) -> str:
    """Has a seeding go no further than to ``first`` entries and the copies of more: a signal finds it at work, however
    slow the machine is.
    """
    return HELD.replace("FROM", str(first))


@pytest.fixture
def slow_model() -> Iterator[Path]:
    """40 tensors of 12 MiB, sparse."""
    folder = Path(tempfile.mkdtemp(prefix="weightwire-seed-"))
    size, count = 12 * MIB, 40
    header = {
        f"t{at}": {"dtype": "U8", "shape": [size], "data_offsets": [at * size, (at + 1) * size]} for at in range(count)
    }
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for at in range(count):
            file.seek(start + at * size)
            file.write(at.to_bytes(8, "little"))
        file.truncate(start + count * size)
    yield path
    shutil.rmtree(folder)


@pytest.mark.parametrize("threads", ["0", "2"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(number: int, code: int, threads: str, spawn, finish, slow_model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    process = spawn("seed", str(slow_model), "--cache", str(directory), "--threads", threads, "-q", first=held(20))
    assert eventually(lambda: directory.exists() and any(len(name) == 16 for name in os.listdir(directory)), 60)
    process.send_signal(number)
    ran = finish(process)
    assert ran.code == code, ran.err
    assert ran.out == ""
    left = files_in(directory)
    assert 1 <= len(left) <= 20
    for name, data in left.items():
        assert name == name_of(data)


def test_a_killed_one_leaves_what_the_next_removes(spawn, finish, invoke, slow_model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    process = spawn("seed", str(slow_model), "--cache", str(directory), "-q", first=held(0))
    assert eventually(lambda: directory.exists() and any(".tmp" in name for name in os.listdir(directory)), 60)
    process.kill()
    finish(process)
    assert any(".tmp" in name for name in os.listdir(directory))
    assert invoke("seed", str(slow_model), "--cache", str(directory), "-q", "--include", "t1$").code == 0
    assert not any(".tmp" in name for name in os.listdir(directory))


def test_progress(invoke, spawn, finish, slow_model: Path, tmp_path: Path) -> None:
    ran = finish(spawn("seed", str(slow_model), "--cache", str(tmp_path / "c"), environ={"TERM": "dumb"}))
    assert ran.code == 0
    for text in ran.err.splitlines():
        assert text.startswith("seeding: ")
