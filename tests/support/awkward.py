"""Tensors whose sizes, types and first bytes are known to go wrong somewhere."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

MIB = 1 << 20
F32, F16, Q4_0, Q4_K, Q6_K, I8 = 0, 1, 2, 12, 14, 24
#: type -> (elements per block, bytes per block)
BLOCKS = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q4_K: (256, 144), Q6_K: (256, 210), I8: (1, 1)}
_NUMPY = {F32: np.float32, F16: np.float16, I8: np.int8}

# A tensor of at most 10 MiB is never asked about in the cache, one byte more is. Quantised rows that are no multiple
# of 512 elements make a client ask for their size on the server and announce them.
_SHAPES: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("zero_first", I8, (4096,)),
    ("one_byte", I8, (1,)),
    ("odd", I8, (12345,)),
    ("cube", F16, (7, 5, 3)),
    ("four_dims", F32, (3, 5, 7, 2)),
    ("just_below", I8, (10 * MIB - 1,)),
    ("at_threshold", I8, (10 * MIB,)),
    ("just_above", I8, (10 * MIB + 1,)),
    ("above_zero_first", F32, (1024, 2561)),
    ("q4_0_narrow", Q4_0, (288, 100)),
    ("q4_0_wide", Q4_0, (512, 64)),
    ("q6_k_narrow", Q6_K, (256, 65)),
    ("q4_k_large", Q4_K, (768, 25000)),
    ("q6_k_large", Q6_K, (1024, 13000)),
)


@dataclass(frozen=True)
class Awkward:
    """One tensor: `ne` in ggml's order (the first varies fastest), `data` its bytes."""

    name: str
    type_code: int
    ne: tuple[int, ...]
    data: bytes

    def stored(self) -> np.ndarray:
        """As the gguf writer wants it: plain types as themselves, quantised ones as rows of bytes."""
        shape = tuple(reversed(self.ne))
        if self.type_code in _NUMPY:
            return np.frombuffer(self.data, _NUMPY[self.type_code]).reshape(shape)
        elements, size = BLOCKS[self.type_code]
        return np.frombuffer(self.data, np.uint8).reshape(*shape[:-1], shape[-1] // elements * size)


@functools.cache
def awkward_tensors() -> tuple[Awkward, ...]:
    """The tensors, with the same random bytes in every run; a few begin with a zero byte."""
    random = np.random.default_rng(20240514)
    made = []
    for name, code, ne in _SHAPES:
        elements, size = BLOCKS[code]
        data = bytearray(random.bytes(int(np.prod(ne)) // elements * size))
        # Read with the wrong dialect, a leading zero byte shifts the data by one instead of closing the connection.
        data[0] = 0 if "zero_first" in name else data[0] | 1
        made.append(Awkward(name, code, ne, bytes(data)))
    return tuple(made)
