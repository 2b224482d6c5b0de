"""What is written to stdout can be read: by people, by programs, by terminals."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightwire
from weightwire.cli import output


def test_bytes_for_people() -> None:
    assert output.human_bytes(0) == "0 bytes"
    assert output.human_bytes(1) == "1 byte"
    assert output.human_bytes(1023) == "1023 bytes"
    assert output.human_bytes(1024) == "1.0 KiB"
    assert output.human_bytes((1 << 30) - 1) == "1.0 GiB"
    assert output.human_bytes(253_113_024) == "241.4 MiB"
    assert output.human_bytes(2**64 - 1) == "16.0 EiB"


def test_a_rate_needs_time() -> None:
    assert output.gib_per_second(3 << 30, 2.0) == 1.5
    assert output.gib_per_second(3 << 30, 0.0) == 0.0


def test_names_cannot_drive_a_terminal() -> None:
    assert output.printable("blk.0.größe") == "blk.0.größe"
    assert output.printable("a\x1b[2Jb\nc\u202e\udc80") == r"a\x1b[2Jb\nc\u202e\udc80"


def test_json_is_one_line_whatever_the_values(capsys: pytest.CaptureFixture[str]) -> None:
    output.object_({"nan": float("nan"), "inf": float("-inf"), "raw": b"\xff\n", "odd": {1}, "list": (1, "\udc80")})
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    value = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert value == {"nan": "nan", "inf": "-inf", "raw": "\\xff\n", "odd": "{1}", "list": [1, "\udc80"]}


def test_a_narrow_encoding_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.line("größe")
    assert raw.getvalue() == b"gr\\xf6\\xdfe\n"


def test_a_reader_that_left_and_a_full_disk_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(output.StdoutClosed):
            output.line("nobody reads this")
        monkeypatch.undo()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(output.StdoutFailed, match="No space left"):
            output.line("this does not fit")
        monkeypatch.undo()


def test_a_stderr_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as raw:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, write_through=True))
        output.note("nobody reads this")
        monkeypatch.undo()


def test_one_is_not_many(invoke, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    save_file({"w": np.zeros((10 << 20) + 1, np.uint8)}, model)
    with weightwire.Server(port=0, cache=tmp_path / "cache") as server:
        endpoint = server.endpoints[0]
        said = [
            invoke(*words, WEIGHTWIRE_INDEX="off").out
            for words in (
                ("info", str(model)),
                ("push", str(model), endpoint),
                ("warm", str(model), endpoint),
                ("bench", endpoint, "--size", "1MiB", "--rounds", "1"),
            )
        ]
        invoke("bench", endpoint, "--size", "1").failed(2, "1 byte is too few")
    for text, words in zip(
        said,
        (("1 file", "1 tensor,"), ("pushed 1 tensor,", "0 hits, 1 miss"), ("1 tensor of", "is in"), ("1 round,",)),
        strict=True,
    ):
        assert all(word in text for word in words), text
        assert not re.search(r"\b1 (tensors|misses|hits|files|bytes|rounds|entries|were)\b", text)
