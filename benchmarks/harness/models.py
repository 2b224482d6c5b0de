"""What cache benchmarks move, and what a cache holds of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import weightwire
from weightwire.client.layers import layer_of, parse_layers
from weightwire.hashing import hash_payloads
from weightwire.model import ModelTensor
from weightwire.model.synthetic import FULL_SIZE_LAYOUT
from weightwire.ranges import FileRange
from weightwire.wire.commands import CACHE_THRESHOLD
from weightwire.wire.types import contiguous_nbytes, type_by_name


def whole_blocks(nbytes: int) -> Iterator[tuple[str, int]]:
    """Names and bytes of the tensors of whole blocks of a 27B model at full size, at least ``nbytes`` in all.

    A small model in a large one's proportions, as `write_synthetic_gguf` makes it, has hardly a tensor that a cache
    keeps (over 10 MiB); in whole blocks of the large one they make up as much as in all of it, 98 %.
    """
    total = 0
    for count in itertools.count(1):
        block = [each for each in first_blocks(count) if layer_of(each[0]) == count - 1]
        yield from block
        total += sum(size for _, size in block)
        if total >= nbytes or not block:
            return


def first_blocks(count: int) -> Iterator[tuple[str, int]]:
    """Names and bytes of the tensors of the first ``count`` blocks of a 27B model at full size, 0.23 GiB each."""
    for name, kind, ne in FULL_SIZE_LAYOUT:
        layer = layer_of(name)
        if layer is not None and layer < count:
            yield name, contiguous_nbytes(type_by_name(kind).code, ne)


def write_random(path: Path, sizes: dict[str, int]) -> None:
    """A safetensors file of unsigned bytes that do not compress, the same in every run.

    Returns when it is old enough for the index of hashes, which believes no time of modification of a moment ago.
    """
    generator = np.random.default_rng(1)
    save_file({name: generator.integers(0, 256, size, dtype=np.uint8) for name, size in sizes.items()}, path)
    time.sleep(2.5)


def file_ranges(path: Path) -> list[tuple[int, int]]:
    """Offset and bytes of every tensor of a single-file model."""
    with weightwire.open_model(path) as model:
        return _ranges(model.tensors.values())


def full_cache(path: Path) -> dict[str, int]:
    """Name and bytes of every entry that a server's cache has once it has the model."""
    with weightwire.open_model(path) as model:
        return _entries(model.tensors.values())


@dataclass(frozen=True)
class Share:
    """What one of several servers gets of a single-file model."""

    #: As `weightwire.Target` takes them.
    layers: str
    #: Offset and bytes of every tensor, in the model's order.
    ranges: list[tuple[int, int]]
    #: Name and bytes of every entry that the server's cache has once it has its share.
    cache: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(nbytes for _, nbytes in self.ranges)


def by_layers(path: Path, count: int) -> list[Share]:
    """A single-file model for ``count`` servers: to each as many layers as to the next, in their order, as llama.cpp
    splits a model over devices with as much memory each. ValueError for a tensor that is of no layer.
    """
    with weightwire.open_model(path) as model:
        layers = sorted({layer for name in model.tensors if (layer := layer_of(name)) is not None})
        cuts = [len(layers) * number // count for number in range(count + 1)]
        shares = []
        for first, end in itertools.pairwise(cuts):
            text = f"{layers[first]}-{layers[end - 1]}"
            wanted = parse_layers(text)
            assert wanted is not None
            tensors = [tensor for tensor in model.tensors.values() if wanted.holds(tensor.name)]
            shares.append(Share(text, _ranges(tensors), _entries(tensors)))
        if sum(len(share.ranges) for share in shares) != sum(tensor.nbytes > 0 for tensor in model.tensors.values()):
            raise ValueError(f"{path.name}: there is a tensor of no layer, for none of the servers")
    return shares


def _ranges(tensors: Iterable[ModelTensor]) -> list[tuple[int, int]]:
    payloads = [tensor.payload for tensor in tensors if tensor.nbytes]
    return [(payload.offset, payload.nbytes) for payload in payloads if isinstance(payload, FileRange)]


def _entries(tensors: Iterable[ModelTensor]) -> dict[str, int]:
    payloads = [tensor.payload for tensor in tensors if tensor.nbytes > CACHE_THRESHOLD]
    hashes = hash_payloads(payloads)
    return {f"{value:016x}": payload.nbytes for value, payload in zip(hashes, payloads, strict=True)}
