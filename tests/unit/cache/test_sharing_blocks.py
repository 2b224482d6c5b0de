"""Seeding where the cache lies on the file system of the model, and its files can share blocks (btrfs)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.disks import sharing_disk

from weightwire import fnv1a64
from weightwire.cache import entry_name, seed

BLOCK = 4096
NBYTES = 12 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with sharing_disk(tmp_path / "disk", 200) as place:
        yield place


def write_model(path: Path, first: int) -> list[bytes]:
    """A safetensors file of two tensors, the first of which begins ``first`` bytes behind a block's beginning."""
    payloads = [np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8).tobytes() for seed in (1, 2)]
    ends = [0, NBYTES, 2 * NBYTES]
    table = {
        f"t{n}": {"dtype": "U8", "shape": [NBYTES], "data_offsets": [ends[n], ends[n + 1]]}
        for n in range(len(payloads))
    }
    header = json.dumps(table).encode().ljust(BLOCK - 8 + first)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(payloads))
    return payloads


def free(place: Path) -> int:
    os.sync()
    status = os.statvfs(place)
    return status.f_bfree * status.f_frsize


def test_entries_share_the_blocks_of_the_model(disk: Path) -> None:
    payloads = write_model(disk / "model.safetensors", 0)
    before = free(disk)
    result = seed(disk / "model.safetensors", disk / "cache", index=False)
    assert (result.written, result.written_bytes, result.cloned_bytes) == (2, 2 * NBYTES, 2 * NBYTES)
    assert before - free(disk) < NBYTES // 2, "nothing was copied"
    with (disk / "model.safetensors").open("r+b") as file:
        file.seek(BLOCK)
        file.write(bytes(BLOCK))
    for payload in payloads:
        assert (disk / "cache" / entry_name(fnv1a64(payload))).read_bytes() == payload, "each keeps its own content"


def test_tensors_between_blocks_are_copied(disk: Path) -> None:
    payloads = write_model(disk / "model.safetensors", 32)
    before = free(disk)
    result = seed(disk / "model.safetensors", disk / "cache", index=False)
    assert (result.written, result.written_bytes, result.cloned_bytes) == (2, 2 * NBYTES, 0)
    assert before - free(disk) >= 2 * NBYTES
    for payload in payloads:
        assert (disk / "cache" / entry_name(fnv1a64(payload))).read_bytes() == payload
