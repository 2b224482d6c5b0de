"""Descriptors, mappings and changes of the files under an open model."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import raw_gguf as raw
from support.leaks import descriptors_below
from support.rewriting import rewrite

from weightwire.errors import ModelError
from weightwire.model import Model, open_model
from weightwire.model.base import ModelFile, element_count, usable_name
from weightwire.ranges import FileRange

DATA = bytes(range(128))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "model.gguf"
    where.write_bytes(raw.build([], [raw.tensor("a", (8,), 0, 0), raw.tensor("b", (24,), 0, 32)], DATA))
    return where


@pytest.fixture(autouse=True)
def _no_descriptor_is_left(tmp_path: Path) -> Iterator[None]:
    gc.collect()
    before = descriptors_below(tmp_path)
    yield
    gc.collect()
    assert descriptors_below(tmp_path) == before


def test_payloads_are_ranges_of_one_read_only_descriptor(path: Path) -> None:
    with open_model(path) as model:
        payloads = [each.payload for each in model.tensors.values()]
        assert all(isinstance(payload, FileRange) for payload in payloads)
        first, second = (payload for payload in payloads if isinstance(payload, FileRange))
        assert first.fd == second.fd
        assert first.path == str(path)
        assert (second.offset - first.offset, first.nbytes, second.nbytes) == (32, 32, 96)
        assert os.pread(second.fd, second.nbytes, second.offset) == DATA[32:]
        assert fcntl.fcntl(first.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert fcntl.fcntl(first.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert not os.get_inheritable(first.fd)


def test_views_are_read_only_bytes_and_outlive_the_model(path: Path) -> None:
    with open_model(path) as model:
        view = model.tensors["b"].view()
    assert view.readonly
    assert (view.format, view.itemsize, view.ndim) == ("B", 1, 1)
    assert bytes(view) == DATA[32:]
    del model, view


def test_views_share_one_mapping_and_let_it_go(path: Path) -> None:
    with open_model(path) as model:
        before = descriptors_below(path.parent)
        views = [tensor.view() for _ in range(10) for tensor in model.tensors.values()]
        assert descriptors_below(path.parent) <= before + 1
        assert str(path) in Path("/proc/self/maps").read_text()
        del views
        gc.collect()
        assert descriptors_below(path.parent) == before
        assert str(path) not in Path("/proc/self/maps").read_text()


def test_close_is_idempotent_and_ends_views(path: Path) -> None:
    model = open_model(path)
    tensor = model.tensors["a"]
    model.close()
    model.close()
    with pytest.raises(ModelError, match="closed"):
        tensor.view()
    with pytest.raises(ModelError, match="closed"):
        model.check_unchanged()


def test_close_does_not_close_what_was_opened_since(path: Path) -> None:
    model = open_model(path)
    payload = model.tensors["a"].payload
    assert isinstance(payload, FileRange)
    model.close()
    taken = os.open(path, os.O_RDONLY)
    try:
        model.close()
        os.fstat(taken)
    finally:
        os.close(taken)


def test_a_forgotten_model_gives_its_descriptor_back(path: Path) -> None:
    before = descriptors_below(path.parent)
    model = open_model(path)
    assert descriptors_below(path.parent) == before + 1
    del model
    gc.collect()
    assert descriptors_below(path.parent) == before


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def shrink(path: Path) -> None:
    os.truncate(path, 100)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "said"), [(grow, "longer"), (shrink, "shorter"), (touch, "modified"), (rewrite, "though its date")]
)
def test_changes_are_noticed_before_a_mapping_is_touched(path: Path, change: Callable[[Path], None], said: str) -> None:
    with open_model(path) as model:
        model.check_unchanged()
        change(path)
        with pytest.raises(ModelError, match=said) as caught:
            model.check_unchanged()
        assert caught.value.path == str(path)
        assert caught.value.hint
        with pytest.raises(ModelError, match=said):
            model.tensors["a"].view()


def test_a_file_replaced_by_another_is_still_the_one_opened(path: Path) -> None:
    with open_model(path) as model:
        other = path.with_suffix(".new")
        other.write_bytes(b"another model")
        other.replace(path)
        model.check_unchanged()
        assert bytes(model.tensors["b"].view()) == DATA[32:]


def test_other_names_and_permissions_are_no_change(path: Path) -> None:
    with open_model(path) as model:
        os.link(path, path.with_suffix(".link"))
        model.check_unchanged()
        path.chmod(0o400)
        model.check_unchanged()
        path.unlink()
        model.check_unchanged()


def test_a_rewriting_behind_another_name_is_noticed(path: Path) -> None:
    with open_model(path) as model:
        other = path.with_suffix(".link")
        os.link(path, other)
        model.check_unchanged()
        rewrite(other)
        with pytest.raises(ModelError, match="though its date"):
            model.check_unchanged()


def test_a_file_cut_short_while_its_header_is_read(path: Path) -> None:
    file = ModelFile(str(path))
    try:
        os.truncate(path, 10)
        with pytest.raises(ModelError, match="shorter than when opened") as caught:
            file.read_at(0, 24)
        assert caught.value.offset == 10
    finally:
        file.close()


def test_a_read_error_is_a_model_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(ModelError, match="cannot read") as caught:
        open_model(path)
    assert caught.value.path == str(path)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.hint


def test_an_open_model_is_returned_as_it_is(path: Path) -> None:
    with open_model(path) as model:
        assert open_model(model) is model
        assert isinstance(model, Model)
        assert repr(model) == f"<weightwire.Model gguf {str(path)!r}: 2 tensors, 128 bytes>"


@pytest.mark.parametrize(
    ("ne", "count"),
    [
        ((), 1),
        ((5,), 5),
        ((2, 3, 4), 24),
        ((0, 7), 0),
        ((2**63 - 1,), 2**63 - 1),
        ((2**63,), None),
        ((2**32, 2**31), None),
        ((2**32, 2**31, 0), None),
    ],
)
def test_element_count(ne: tuple[int, ...], count: int | None) -> None:
    assert element_count(ne) == count


def test_usable_names() -> None:
    assert usable_name("blk.0.ä")
    assert not usable_name("a\0")
    assert not usable_name("\udcff")
