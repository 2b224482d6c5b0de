"""Small models to seed from, and what a cache directory looks like."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from weightwire.hashing import fnv1a64


def contents(*sizes: int, seed: int = 1) -> dict[str, bytes]:
    """Tensors of ``sizes`` bytes, named t0, t1 …, no two alike."""
    generator = np.random.default_rng(seed)
    return {f"t{at}": generator.integers(0, 256, size, dtype=np.uint8).tobytes() for at, size in enumerate(sizes)}


def write_model(path: Path, tensors: Mapping[str, bytes]) -> Path:
    """A safetensors file with ``tensors``."""
    save_file({name: np.frombuffer(data, np.uint8) for name, data in tensors.items()}, path)
    return path


def name_of(data: bytes) -> str:
    """The name of the entry with that content."""
    return f"{fnv1a64(data):016x}"


def entries_of(*contents: bytes) -> dict[str, bytes]:
    """What a directory holds that has an entry for each of ``contents``."""
    return {name_of(data): data for data in contents}


def files_in(directory: Path) -> dict[str, bytes]:
    """Every file in ``directory``, whatever its name, with its content."""
    return {name: (directory / name).read_bytes() for name in os.listdir(directory)}
