"""Bad entries set aside: unique names, bounds, and nothing else touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightwire.cache import quarantine
from weightwire.cache.quarantine import FOLDER, empty_quarantine, list_quarantine, move_aside

NAME = "0123456789abcdef"


def anything(status: os.stat_result) -> bool:
    return True


def put(directory: Path, content: bytes, name: str = NAME) -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


def test_the_same_name_again_and_again(tmp_path: Path) -> None:
    for index in range(3):
        where = move_aside(put(tmp_path, bytes((index,))), anything)
        assert where == tmp_path / FOLDER / f"{NAME}-{index}"
    assert [entry.path.read_bytes() for entry in list_quarantine(tmp_path)] == [b"\0", b"\1", b"\2"]
    assert {entry.content_hash for entry in list_quarantine(tmp_path)} == {int(NAME, 16)}


def test_what_is_not_there(tmp_path: Path) -> None:
    assert move_aside(tmp_path / NAME, anything) is None
    assert list_quarantine(tmp_path) == []
    assert empty_quarantine(tmp_path) == (0, 0)
    assert os.listdir(tmp_path) == []


def test_one_that_was_replaced_stays(tmp_path: Path) -> None:
    path = put(tmp_path, b"good")
    assert move_aside(path, lambda status: False) is None
    assert path.read_bytes() == b"good"


def test_one_that_is_replaced_at_the_last_moment_comes_back(tmp_path: Path) -> None:
    path = put(tmp_path, b"good")
    answers = iter([True, False])
    assert move_aside(path, lambda status: next(answers)) is None
    assert path.read_bytes() == b"good"
    assert list_quarantine(tmp_path) == []


def test_a_directory_is_not_moved(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(IsADirectoryError):
        move_aside(tmp_path / NAME, anything)
    assert os.listdir(tmp_path) == [NAME]


def test_a_move_that_fails_leaves_no_placeholder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, b"bad")

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(quarantine.os, "rename", refuse)
    with pytest.raises(PermissionError):
        move_aside(path, anything)
    assert list_quarantine(tmp_path) == []
    assert path.exists()


def test_the_oldest_go_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_ENTRIES", 3)
    for index in range(5):
        move_aside(put(tmp_path, bytes((index,)), f"{index:016x}"), anything)
    assert sorted(entry.content_hash for entry in list_quarantine(tmp_path)) == [2, 3, 4]


def test_the_oldest_go_by_size_and_the_newest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_BYTES", 10)
    move_aside(put(tmp_path, bytes(6), f"{1:016x}"), anything)
    move_aside(put(tmp_path, bytes(6), f"{2:016x}"), anything)
    assert [entry.content_hash for entry in list_quarantine(tmp_path)] == [2]
    move_aside(put(tmp_path, bytes(60), f"{3:016x}"), anything)
    assert [entry.content_hash for entry in list_quarantine(tmp_path)] == [3]


def test_emptying_touches_its_own_names_only(tmp_path: Path) -> None:
    move_aside(put(tmp_path, b"bad"), anything)
    foreign = put(tmp_path / FOLDER, b"mine", "notes.txt")
    assert empty_quarantine(tmp_path) == (1, 3)
    assert os.listdir(tmp_path / FOLDER) == [foreign.name]
    foreign.unlink()
    move_aside(put(tmp_path, b"bad"), anything)
    assert empty_quarantine(tmp_path) == (1, 3)
    assert os.listdir(tmp_path) == []


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path, no_leaks: object) -> None:
    directory, elsewhere = tmp_path / "entries", tmp_path / "elsewhere"
    directory.mkdir()
    elsewhere.mkdir()
    theirs = put(elsewhere, b"theirs", f"{NAME}-0")
    (directory / FOLDER).symlink_to(elsewhere)
    path = put(directory, b"bad")
    with pytest.raises(NotADirectoryError, match="is not a directory"):
        move_aside(path, anything)
    assert path.read_bytes() == b"bad"
    assert list_quarantine(directory) == []
    assert empty_quarantine(directory) == (0, 0)
    assert os.listdir(elsewhere) == [theirs.name]


def test_a_folder_that_becomes_a_link_between_the_look_and_the_removal(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "entries", tmp_path / "elsewhere"
    directory.mkdir()
    elsewhere.mkdir()
    move_aside(put(directory, b"bad"), anything)
    found = list_quarantine(directory)
    (directory / FOLDER).rename(directory / "was")
    (directory / FOLDER).symlink_to(elsewhere)
    theirs = put(elsewhere, b"theirs", found[0].path.name)
    assert quarantine._remove(found, directory) == (0, 0)
    assert theirs.exists()
