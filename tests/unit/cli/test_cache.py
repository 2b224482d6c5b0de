"""``weightwire cache list | verify | prune | stat``."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.cachedir import contents, files_in, name_of

from weightwire.cache import check
from weightwire.cli.cache import parse_age

DATA = list(contents(1000, 2000, 3000).values())
NAMES = [name_of(data) for data in DATA]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three entries, used a day after one another."""
    path = tmp_path / "entries"
    path.mkdir()
    for at, (name, data) in enumerate(zip(NAMES, DATA, strict=True)):
        (path / name).write_bytes(data)
        used = int(time.time()) - (3 - at) * 86_400
        os.utime(path / name, (used, used))
    return path


def at(directory: Path) -> tuple[str, str]:
    return "--cache", str(directory)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("90m", 5400), ("12h", 43_200), ("30d", 2_592_000), ("1.5w", 907_200), (" 2 D ", 172_800), ("0s", 0)],
)
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "30", "-1d", "1y", "1d2h", "1e3d", "٣d", "9" * 30 + "d"])
def test_what_is_no_age(text: str, invoke, directory: Path) -> None:
    with pytest.raises(ValueError, match="not an age"):
        parse_age(text)
    invoke("cache", "prune", *at(directory), f"--max-age={text}").failed(2, "--max-age")


def test_list(invoke, directory: Path) -> None:
    (directory / "0123456789abcdef").mkdir()
    ran = invoke("cache", "list", *at(directory))
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [name, str(len(data))] for name, data in zip(NAMES, DATA, strict=True)
    ]
    assert all(re.fullmatch(r"[0-9a-f]{16} +\d+ \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ unknown", line) for line in lines)
    assert "0123456789abcdef is a directory" in ran.err


def test_the_object_of_list(invoke, directory: Path) -> None:
    (directory / "notes").write_bytes(b"")
    (directory / "0123456789abcdef").mkdir()
    report = invoke("cache", "list", *at(directory), "--json").json
    assert set(report) == {"directory", "bytes", "entries", "misplaced", "temporary", "others"}
    assert (report["directory"], report["bytes"]) == (str(directory), 6000)
    assert [(entry["hash"], entry["bytes"], entry["tensors"]) for entry in report["entries"]] == [
        (name, len(data), []) for name, data in zip(NAMES, DATA, strict=True)
    ]
    assert report["misplaced"] == [{"name": "0123456789abcdef", "kind": "directory"}]
    assert report["others"] == ["notes"]


def test_verify(invoke, directory: Path) -> None:
    ran = invoke("cache", "verify", *at(directory))
    assert (ran.code, ran.err) == (0, "")
    assert "3 entries, 5.9 KiB, 0 bad" in ran.out
    (directory / NAMES[0]).write_bytes(b"bad")
    (directory / "notes").write_bytes(b"")
    ran = invoke("cache", "verify", *at(directory)).failed(4, "1 bad entry in", "--quarantine")
    assert ran.out.splitlines()[0].split()[:2] == [NAMES[0], "3"]
    assert f"hashes to {name_of(b'bad')}" in ran.out
    assert "1 name that is no entry's: notes" in ran.out
    ran = invoke("cache", "verify", *at(directory), "--quarantine", "--threads", "0").failed(4)
    assert "; quarantined" in ran.out
    assert (directory / ".weightwire-quarantine" / f"{NAMES[0]}-0").read_bytes() == b"bad"
    assert invoke("cache", "verify", *at(directory)).code == 0


@pytest.mark.parametrize("option", [[], ["--quarantine"], ["--remove"]])
def test_verify_says_who_has_to_remove_what_is_no_file(invoke, directory: Path, option: list[str]) -> None:
    (directory / ("1" * 16)).mkdir()
    ran = invoke("cache", "verify", *at(directory), *option).failed(4, "left to you", "1" * 16)
    assert "--quarantine" not in ran.err, "neither option would touch it"
    assert (directory / ("1" * 16)).is_dir()


def test_the_object_of_verify(invoke, directory: Path) -> None:
    (directory / NAMES[1]).write_bytes(b"bad")
    ran = invoke("cache", "verify", *at(directory), "--json", "--remove", "-q")
    assert ran.code == 4
    report = ran.json
    (bad,) = report.pop("bad")
    assert bad.pop("reason")
    assert bad == {"name": NAMES[1], "kind": "content", "nbytes": 3, "action": "removed"}
    assert report == {
        "directory": str(directory),
        "entries": 3,
        "bytes": 4003,
        "digests": 0,
        "changing": [],
        "others": [],
        "unchecked": [],
    }
    assert sorted(files_in(directory)) == sorted([NAMES[0], NAMES[2]])


def test_prune(invoke, directory: Path) -> None:
    ran = invoke("cache", "prune", *at(directory), "--max-size", "5000", "--dry-run")
    assert ran.code == 0
    assert ran.out.splitlines()[0].split()[0] == NAMES[0]
    assert "1 entry, 1000 bytes, would be removed; 2 entries, 4.9 KiB, would remain" in ran.out
    assert len(os.listdir(directory)) == 3
    assert "1 entry, 1000 bytes, removed" in invoke("cache", "prune", *at(directory), "--max-size", "5000").out
    assert invoke("cache", "prune", *at(directory), "--max-age", "36h").code == 0
    assert os.listdir(directory) == [NAMES[2]]
    assert "0 in quarantine, 0 bytes, removed" in invoke("cache", "prune", *at(directory), "--quarantine").out
    assert invoke("cache", "prune", *at(directory), "--max-size", "0").code == 0
    assert os.listdir(directory) == []


def test_the_object_of_prune(invoke, directory: Path) -> None:
    report = invoke("cache", "prune", *at(directory), "--max-size", "3000", "--json").json
    assert [(entry["hash"], entry["bytes"], entry["tensors"]) for entry in report.pop("removed")] == [
        (NAMES[0], 1000, []),
        (NAMES[1], 2000, []),
    ]
    assert report == {
        "directory": str(directory),
        "dry_run": False,
        "removed_bytes": 3000,
        "kept": 1,
        "kept_bytes": 3000,
        "quarantined": 0,
        "quarantined_bytes": 0,
        "temporary": 0,
        "failed": [],
    }


def test_a_prune_that_cannot_remove(invoke, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", refuse)
    invoke("cache", "prune", *at(directory), "--max-size", "0").failed(1, "3 entries cannot be removed", NAMES[0])


def test_stat(invoke, directory: Path) -> None:
    (directory / "notes").write_bytes(b"")
    out = invoke("cache", "stat", *at(directory)).out.splitlines()
    assert out[0] == str(directory)
    assert out[1].split(maxsplit=1) == ["entries", "3, 5.9 KiB"]
    assert any(line.startswith("free ") for line in out)
    assert any(line == "not entries  0 of an entry's name, 1 of other names" for line in out)
    report = invoke("cache", "stat", *at(directory), "--json").json
    assert (report["entries"], report["bytes"], report["others"]) == (3, 6000, 1)
    assert report["oldest"] < report["newest"]
    assert report["free_bytes"] > 0
    assert invoke("cache", "stat", *at(directory / ".."), "--json").json["oldest"] is None


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EACCES, "as the user"), (errno.EPERM, "as the user"), (errno.EROFS, "mounted read-only")],
)
def test_what_the_system_does_not_let_go(
    number: int, hint: str, invoke, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    (directory / NAMES[0]).write_bytes(b"bad")
    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    said = os.strerror(number)
    invoke("cache", "prune", *at(directory), "--max-size", "0").failed(1, "3 entries cannot be removed", said, hint)
    for option in ("--remove", "--quarantine"):
        ran = invoke("cache", "verify", *at(directory), option).failed(4, "1 bad entry", hint)
        assert said in ran.out


def test_something_else_in_the_place_of_the_quarantine(invoke, directory: Path) -> None:
    (directory / NAMES[0]).write_bytes(b"bad")
    (directory / ".weightwire-quarantine").write_bytes(b"")
    ran = invoke("cache", "verify", *at(directory), "--quarantine").failed(4, "remove what is called")
    assert ".weightwire-quarantine is not a directory; failed" in ran.out


#: Runs the verb with descriptors below ``argv[1]`` only.
WITH_FEW_FILES = """
import resource, sys
from weightwire.cli import root
from weightwire.cache import verify_cache
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), 4096))
sys.argv[1:] = sys.argv[2:]
sys.exit(root.root())
"""


def test_verify_with_few_open_files_checks_all_the_same(directory: Path) -> None:
    for number in range(12):  # large, so that several are open at once
        data = number.to_bytes(4, "little") * (2 << 20)
        (directory / name_of(data)).write_bytes(data)
    words = [sys.executable, "-c", WITH_FEW_FILES, "4", "cache", "verify", *at(directory), "--threads", "8"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "15 entries" in ran.stdout
    assert "0 bad;" in ran.stdout


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EACCES, "the user that the server runs as"), (errno.EMFILE, "ulimit -n"), (errno.ENFILE, "later")],
)
def test_verify_says_what_it_could_not_check(
    number: int, hint: str, invoke, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of these: they are not bad, and removing them is no cure."""
    real = check._open

    def refuse(entry: Any) -> int:
        if entry.path.name == NAMES[1]:
            raise OSError(number, os.strerror(number))
        return real(entry)

    monkeypatch.setattr(check, "_open", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for option in ((), ("--remove",), ("--quarantine",)):
        ran = invoke("cache", "verify", *at(directory), *option).failed(3, "1 entry not checked in", hint)
        assert f"{NAMES[1]}: not checked: it cannot be opened" in ran.out
        assert "2 entries, 3.9 KiB, 0 bad, 1 not checked" in ran.out
        assert "quarantine" not in ran.err
    ran = invoke("cache", "verify", *at(directory), "--json")
    assert (ran.code, ran.json["bad"]) == (3, [])
    (left,) = ran.json["unchecked"]
    assert left["name"] == NAMES[1]
    assert os.strerror(number) in left["reason"]
    (directory / NAMES[0]).write_bytes(b"bad")
    invoke("cache", "verify", *at(directory)).failed(4, "1 bad entry, 1 entry not checked in", "--quarantine", hint)


@pytest.mark.parametrize("verb", [["list"], ["verify"], ["prune", "--max-size", "1"], ["stat"]])
def test_a_directory_that_is_not_there(verb: list[str], invoke, tmp_path: Path) -> None:
    invoke("cache", *verb, *at(tmp_path / "none")).failed(2, "does not exist", "--cache")
    ran = invoke("cache", *verb, LLAMA_CACHE=str(tmp_path / "llama")).failed(2, "llama/rpc", "stock server")
    assert ran.out == ""
    assert invoke("cache", *verb, "--json", *at(tmp_path / "none")).json["error"]["exit_code"] == 2
    assert os.listdir(tmp_path) == []


def test_usage(invoke, directory: Path) -> None:
    invoke("cache", "prune", *at(directory)).failed(2, "--max-size")
    invoke("cache", "prune", *at(directory), "--max-size", "much").failed(2, "--max-size")
    invoke("cache", "verify", *at(directory), "--quarantine", "--remove").failed(2, "--remove")
    invoke("cache", "verify", *at(directory), "--threads", "99").failed(2, "--threads")
    invoke("cache", "nosuch").failed(2, "nosuch")
    assert invoke("cache", "--help").code == 0
    assert invoke("cache", "verify", "-h").code == 0


def test_names_from_a_directory_cannot_drive_the_terminal(invoke, directory: Path) -> None:
    (directory / "a\x1b[2J\nb").write_bytes(b"")
    assert "a\\x1b[2J\\nb" in invoke("cache", "verify", *at(directory)).out
