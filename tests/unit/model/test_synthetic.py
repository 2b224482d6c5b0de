"""The generated model: a valid GGUF with a real model's proportions, the same for the same seed, whole or not there."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.leaks import descriptors_below

from weightwire.errors import ConfigError, ModelError
from weightwire.model import open_model
from weightwire.model.synthetic import ARCHITECTURE, FULL_SIZE_LAYOUT, synthetic_layout, write_synthetic_gguf
from weightwire.wire.types import contiguous_nbytes, type_by_name

MIB = 1 << 20
LARGE = 10 * MIB


def sizes(layout: list[tuple[str, str, tuple[int, ...]]]) -> dict[str, int]:
    return {name: contiguous_nbytes(type_by_name(kind).code, ne) for name, kind, ne in layout}


FULL = sizes(list(FULL_SIZE_LAYOUT))


def test_the_full_size_model_is_a_27b_one() -> None:
    assert len(FULL) == len(FULL_SIZE_LAYOUT) == 876
    assert sum(nbytes > LARGE for nbytes in FULL.values()) == 369
    parameters = sum(np.prod(ne, dtype=np.int64) for _, _, ne in FULL_SIZE_LAYOUT)
    assert 25e9 < parameters < 28e9
    assert {kind for _, kind, _ in FULL_SIZE_LAYOUT} == {"f32", "q4_K", "q6_K", "q8_0"}


@pytest.mark.parametrize("nbytes", [MIB, 8 * MIB, 1 << 30, sum(FULL.values())])
def test_a_layout_has_the_bytes_asked_for(nbytes: int) -> None:
    layout = synthetic_layout(nbytes)
    assert [(name, kind) for name, kind, _ in layout] == [(name, kind) for name, kind, _ in FULL_SIZE_LAYOUT]
    assert nbytes - 5120 <= sum(sizes(layout).values()) <= nbytes
    assert all(min(ne) > 0 for _, _, ne in layout)


def test_the_full_size_is_its_own_layout() -> None:
    assert synthetic_layout(sum(FULL.values())) == list(FULL_SIZE_LAYOUT)


def test_large_tensors_keep_their_proportions_at_1_gib() -> None:
    scale = (1 << 30) / sum(FULL.values())
    for name, nbytes in sizes(synthetic_layout(1 << 30)).items():
        if FULL[name] > LARGE:
            assert nbytes == pytest.approx(FULL[name] * scale, rel=0.01)


@pytest.mark.parametrize("nbytes", [-1, 0, MIB - 1])
def test_impossible_sizes_and_seeds(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(ConfigError):
        write_synthetic_gguf(tmp_path / "model.gguf", nbytes)
    with pytest.raises(ConfigError):
        write_synthetic_gguf(tmp_path / "model.gguf", MIB, seed=-1)
    assert not list(tmp_path.iterdir())


def test_the_file_is_a_gguf_for_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    before = descriptors_below(tmp_path)
    write_synthetic_gguf(path, 8 * MIB)
    assert descriptors_below(tmp_path) == before
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.architecture").contents() == ARCHITECTURE  # type: ignore[union-attr]
    layout = synthetic_layout(8 * MIB)
    assert [(each.name, each.tensor_type.name.lower()) for each in reader.tensors] == [
        (name, kind.lower()) for name, kind, _ in layout
    ]
    assert [tuple(int(extent) for extent in each.shape) for each in reader.tensors] == [ne for _, _, ne in layout]
    with open_model(path) as model:
        assert model.metadata["general.architecture"] == ARCHITECTURE
        for theirs in reader.tensors:
            ours = model.tensors[theirs.name]
            assert (ours.payload.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)  # type: ignore[union-attr]
            if ours.type_name == "f32":
                assert np.all((theirs.data >= 1) & (theirs.data < 2))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    write_synthetic_gguf(first, 2 * MIB, seed=7)
    write_synthetic_gguf(again, 2 * MIB, seed=7)
    write_synthetic_gguf(other, 2 * MIB, seed=8)
    assert digest(first) == digest(again) != digest(other)


def test_the_content_does_not_compress_and_no_two_tensors_are_alike(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_synthetic_gguf(path, 16 * MIB)
    content = path.read_bytes()
    assert len(zlib.compress(content, 1)) > 0.97 * len(content)
    with open_model(path) as model:
        starts = [bytes(each.view()[:32]) for each in model.tensors.values() if each.nbytes >= 32]
    assert len(set(starts)) == len(starts)


def test_memory_is_bounded(tmp_path: Path) -> None:
    write_synthetic_gguf(tmp_path / "warm.gguf", MIB)  # numpy is imported outside the measurement
    tracemalloc.start()
    try:
        write_synthetic_gguf(tmp_path / "model.gguf", 96 * MIB)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    write_synthetic_gguf(tmp_path / "model.gguf", 64 * MIB, progress=lambda *call: calls.append(call))
    total = sum(sizes(synthetic_layout(64 * MIB)).values())
    assert {call[2] for call in calls} == {total}
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert done[-1] == total
    assert list(dict.fromkeys(call[0] for call in calls)) == [name for name, _, _ in FULL_SIZE_LAYOUT]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no"), SystemExit(3)])
def test_nothing_is_left_when_it_is_interrupted(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"what was there")
    before = descriptors_below(tmp_path)

    def stop(name: str, done: int, total: int) -> None:
        assert len(list(tmp_path.iterdir())) == 2
        raise error

    with pytest.raises(type(error)):
        write_synthetic_gguf(path, MIB, progress=stop)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"what was there"]
    assert descriptors_below(tmp_path) == before


@pytest.mark.parametrize("call", ["posix_fallocate", "replace"])
def test_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ModelError, match="No space left") as caught:
        write_synthetic_gguf(tmp_path / "model.gguf", MIB)
    assert caught.value.path == str(tmp_path / "model.gguf")
    assert "free space" in caught.value.hint
    assert isinstance(caught.value.__cause__, OSError)
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_cannot_reserve_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unable)
    write_synthetic_gguf(tmp_path / "model.gguf", MIB)
    with open_model(tmp_path / "model.gguf") as model:
        assert len(model.tensors) == 876


def test_the_limit_on_file_sizes_is_a_model_error(tmp_path: Path) -> None:
    """A real refusal by the kernel, in a process of its own: setrlimit(2) cannot be taken back."""
    code = (
        "import resource, signal, sys\n"
        "from weightwire.errors import ModelError\n"
        "from weightwire.model.synthetic import write_synthetic_gguf\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try: write_synthetic_gguf(sys.argv[1], 8 << 20)\n"
        "except ModelError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.gguf")],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert "File too large" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file") as caught:
        write_synthetic_gguf(tmp_path / "absent" / "model.gguf", MIB)
    assert caught.value.hint


def test_the_umask_decides_who_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_synthetic_gguf(tmp_path / "model.gguf", MIB)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.gguf").stat().st_mode) == 0o640
