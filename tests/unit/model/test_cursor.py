"""The reading position: fields across the window's edges, and lengths that the file does not have."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightwire.errors import ModelError
from weightwire.model import cursor as module
from weightwire.model.base import ModelFile
from weightwire.model.cursor import HeaderCursor


@pytest.fixture
def over(tmp_path: Path) -> Iterator[Callable[[bytes], HeaderCursor]]:
    files: list[ModelFile] = []

    def make(content: bytes) -> HeaderCursor:
        path = tmp_path / f"file-{len(files)}"
        path.write_bytes(content)
        files.append(ModelFile(str(path)))
        return HeaderCursor(files[-1])

    yield make
    for file in files:
        file.close()


def refused(call: Callable[[], object]) -> ModelError:
    with pytest.raises(ModelError) as caught:
        call()
    assert caught.value.path
    return caught.value


def test_fields_one_after_another(over: Callable[[bytes], HeaderCursor]) -> None:
    cursor = over(b"GGUF" + struct.pack("<IQ", 3, 1 << 40) + b"name!")
    assert cursor.take(4, "the magic") == b"GGUF"
    assert cursor.u32("the version") == 3
    assert cursor.u64("a count") == 1 << 40
    assert (cursor.offset, cursor.remaining) == (16, 5)
    cursor.skip(4, "most of a name")
    assert cursor.take(1, "the rest") == b"!"
    assert cursor.remaining == 0
    assert cursor.take(0, "nothing") == b""


@pytest.mark.parametrize("window", [1, 3, 8, 13])
def test_fields_across_windows(
    over: Callable[[bytes], HeaderCursor], monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(module, "_FIRST_WINDOW", window)
    monkeypatch.setattr(module, "_LAST_WINDOW", window)
    cursor = over(b"".join(struct.pack("<IQ", index, index << 33) for index in range(50)))
    for index in range(50):
        assert cursor.offset == 12 * index
        assert (cursor.u32("a"), cursor.u64("b")) == (index, index << 33)


@pytest.mark.parametrize("window", [9, 64, 1 << 16])
def test_strings_are_stepped_over(
    over: Callable[[bytes], HeaderCursor], monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(module, "_FIRST_WINDOW", window)
    monkeypatch.setattr(module, "_LAST_WINDOW", window)
    lengths = [0, 1, 7, 100, 0, 3, 5000, 2]
    content = b"".join(struct.pack("<Q", length) + bytes(length) for length in lengths)
    cursor = over(content + b"end")
    cursor.skip_strings(len(lengths), "a vocabulary")
    assert cursor.offset == len(content)
    assert cursor.take(3, "the end") == b"end"


@pytest.mark.parametrize("nbytes", [11, 1 << 32, 1 << 63, (1 << 64) - 1])
def test_more_than_the_file_has_is_refused_where_it_begins_and_read_nowhere(
    over: Callable[[bytes], HeaderCursor], monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    cursor = over(bytes(20))
    cursor.skip(10, "a start")
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("nothing is to be read"))
    for call in (cursor.take, cursor.skip):
        error = refused(lambda call=call: call(nbytes, "a field"))  # type: ignore[misc]
        assert error.offset == 10
        assert f"inside a field: {nbytes} bytes needed, 10 left" in error.detail
        assert error.hint
    assert cursor.offset == 10, "a refusal does not move"


def test_numbers_cut_short(over: Callable[[bytes], HeaderCursor]) -> None:
    assert refused(lambda: over(bytes(3)).u32("a number")).offset == 0
    cursor = over(bytes(11))
    cursor.u32("a number")
    assert refused(lambda: cursor.u64("a number")).offset == 4


@pytest.mark.parametrize("length", [6, 1 << 40, (1 << 64) - 1])
def test_a_string_past_the_end(over: Callable[[bytes], HeaderCursor], length: int) -> None:
    cursor = over(struct.pack("<Q", 1) + b"x" + struct.pack("<Q", length) + bytes(5))
    assert refused(lambda: cursor.skip_strings(2, "a vocabulary")).offset == 9


def test_more_strings_than_the_file_can_hold(over: Callable[[bytes], HeaderCursor]) -> None:
    assert refused(lambda: over(bytes(80)).skip_strings(11, "a vocabulary")).offset == 0


def test_an_error_is_at_the_position_unless_told_otherwise(over: Callable[[bytes], HeaderCursor]) -> None:
    cursor = over(bytes(8))
    cursor.skip(5, "a start")
    assert cursor.error("bad").offset == 5
    assert cursor.error("bad", offset=0).offset == 0
