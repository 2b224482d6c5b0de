"""``weightwire hash``: right hashes, in order, one line each."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightwire
from weightwire.cli import hash_ as verb

pytestmark = pytest.mark.timeout(120)


def fnv(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Seven tensors, one of them empty: two groups."""
    path = tmp_path / "few.safetensors"
    rng = np.random.default_rng(1)
    save_file({f"t{i}": rng.integers(0, 255, i * 100, dtype=np.uint8) for i in range(7)}, path)
    return path


def test_hash_bytes_and_name_per_line(invoke, few: Path) -> None:
    ran = invoke("hash", str(few))
    assert ran.code == 0
    assert ran.err == ""
    with weightwire.open_model(few) as model:
        expected = [(f"{fnv(bytes(t.view())):016x}", str(t.nbytes), t.name) for t in model.tensors.values()]
    assert [tuple(line.split()) for line in ran.out.splitlines()] == expected
    assert len(expected) == 7
    assert all(re.fullmatch(r"[0-9a-f]{16} +\d+ \S+", line) for line in ran.out.splitlines())


def test_the_object(invoke, few: Path) -> None:
    lines = [line.split() for line in invoke("hash", str(few)).out.splitlines()]
    report = invoke("hash", str(few), "--json").json
    assert set(report) == {"model", "format", "bytes", "tensors"}
    assert (report["model"], report["format"], report["bytes"]) == (str(few), "safetensors", 2100)
    assert [[t["hash"], str(t["bytes"]), t["name"]] for t in report["tensors"]] == lines


def test_only_what_is_included(invoke, few: Path) -> None:
    assert [line.split()[2] for line in invoke("hash", str(few), "--include", "[35]$").out.splitlines()] == ["t3", "t5"]
    invoke("hash", str(few), "--include", "nosuch").failed(2, "nosuch")
    for bad in ("[", "a{99999999999999999999}", "(" * 5000 + ")" * 5000, "(?L)a"):
        invoke("hash", str(few), "--include", bad).failed(2, "--include")


def test_lines_come_as_they_are_computed(invoke, few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []
    import weightwire.hashing as hashing

    real = hashing.hash_payloads
    monkeypatch.setattr(hashing, "hash_payloads", lambda seq: (happened.append(len(seq)), real(seq))[1])
    monkeypatch.setattr(verb, "line", lambda text: happened.append(text.split()[2]))
    assert invoke("hash", str(few)).code == 0
    order = list(weightwire.open_model(few).tensors)
    assert happened == [4, *order[:4], 3, *order[4:]]


def test_names_from_a_file_cannot_drive_the_terminal(invoke, tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    save_file({"a\x1b[2J\nb": np.zeros(4, np.uint8)}, path)
    ran = invoke("hash", str(path))
    assert ran.out.splitlines() == [f"{fnv(bytes(4)):016x}            4 a\\x1b[2J\\nb"]
    assert invoke("hash", str(path), "--json").json["tensors"][0]["name"] == "a\x1b[2J\nb"


def test_a_model_that_cannot_be_read(invoke, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    invoke("hash", str(tmp_path / "bad.gguf")).failed(2, "bad.gguf")
    invoke("hash", str(tmp_path / "none.gguf")).failed(2, "none.gguf")
    assert invoke("hash", str(tmp_path / "none.gguf"), "--json").json["error"]["type"] == "ModelError"


def test_a_model_that_shrinks_meanwhile_fails(invoke, few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "line", lambda text: os.truncate(few, 500))
    invoke("hash", str(few)).failed(1, str(few))


def test_a_closed_pipe_is_quiet(spawn, finish, small_gguf: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        ran = finish(spawn("hash", str(small_gguf), stdout=pipe))
    assert (ran.code, ran.err) == (141, "")


def test_a_hasher_that_there_is_not_is_refused_first(spawn, finish, tmp_path: Path) -> None:
    for words in (["hash", "missing.gguf"], ["push", str(tmp_path / "missing.gguf"), "127.0.0.1:1"]):
        ran = finish(spawn(*words, environ={"WEIGHTWIRE_HASH": "mmx"}))
        assert ran.code == 2
        assert "environment variable WEIGHTWIRE_HASH: 'mmx' is not one of auto, plain" in ran.err
