"""What the guide says of the objects that the verbs write, against what they write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightwire
from weightwire.index import identity

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide.md"


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """The table of members: what is said of each verb."""
    table = GUIDE.read_text().split("| verb | members |", 1)[1].split("\n\n", 1)[0]
    return dict(re.findall(r"^\| (.*?`.*?) \| (.*) \|$", table, re.MULTILINE))


def names_in(text: str) -> set[str]:
    return {name for name in re.findall(r"`([^`]+)`", text) if name.isidentifier()}


def members(rows: dict[str, str], row: str) -> set[str]:
    """The names in ``row``, with those of the row above that it refers to: "as `push`, without `verified`"."""
    text, *without = re.sub(r"\(as [^)]* above\)", "", rows[row]).split("without", 1)
    said = names_in(text)
    if "push" in said:
        said |= names_in(rows["`push`"])
    for part in without:
        left_out, _, rest = part.partition(";")
        said = (said | names_in(rest)) - names_in(left_out)
    return said - {"push"}


def keys_of(value: Any) -> set[str]:
    """All names in an object, the inner ones, too."""
    if isinstance(value, dict):
        return set(value) | {name for inner in value.values() for name in keys_of(inner)}
    return {name for inner in value for name in keys_of(inner)} if isinstance(value, list) else set()


def test_the_members_of_every_verb(
    invoke, rows: dict[str, str], small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_INDEX", str(tmp_path / "index"))
    monkeypatch.setattr(identity, "_RACY_NS", 0)  # the index knows a file at once
    model, entries = str(tmp_path / "large.safetensors"), str(tmp_path / "entries")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / ("0" * 16)).write_bytes(b"x")
    save_file({"w": np.zeros((10 << 20) + 1, np.uint8)}, model)
    with (
        weightwire.Server(port=0, cache=tmp_path / "a") as one,
        weightwire.Server(port=0, cache=tmp_path / "b") as other,
    ):
        both = (one.endpoints[0], other.endpoints[0])
        words = {
            "`push`": ("push", model, both[0], "--verify"),
            "`push` to several servers": ("push", model, *both),
            "`warm`": ("warm", model, both[0]),
            "`demo`": ("demo", model),
            "`seed`": ("seed", model, "--cache", entries),
            "`cache list`": ("cache", "list", "--cache", entries),
            "`cache verify`": ("cache", "verify", "--cache", str(damaged)),
            "`cache stat`": ("cache", "stat", "--cache", entries),
            "`cache prune`": ("cache", "prune", "--cache", entries, "--max-size", "0"),
            "`hash`": ("hash", str(small_gguf)),
            "`info` of a model": ("info", str(small_gguf)),
            "`info` of a server": ("info", both[0]),
            "`bench`": ("bench", both[0], "--size", "2MiB", "--rounds", "1"),
        }
        written = {row: invoke(*verb, "--json").json for row, verb in words.items()}
    assert set(rows) == {*words, "`serve`"}
    for row, value in written.items():
        said = members(rows, row)
        assert set(value) <= said, f"{row}: the guide lacks members"
        assert said - {"error"} <= keys_of(value), f"{row}: the guide has members that are not written"
    totals = written["`push` to several servers"]["totals"]
    assert set(totals) <= names_in(rows["`push` to several servers"])
