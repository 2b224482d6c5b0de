"""The ggml tensor types and the byte arithmetic that goes with them.

Source: docs/protocol.md, section 2. All numbers are bytes or elements; shapes are in ggml order (``ne[0]`` varies
fastest), which is the reverse of numpy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = [
    "I8",
    "MAX_DIMS",
    "REMOVED_TYPES",
    "TYPES",
    "TensorType",
    "contiguous_nbytes",
    "contiguous_strides",
    "span_nbytes",
    "type_by_name",
]

MAX_DIMS: Final = 4
I8: Final = 24


@dataclass(frozen=True, slots=True)
class TensorType:
    """One ggml type: ``block`` elements along ``ne[0]`` are stored in ``nbytes`` bytes.

    ``numpy`` is the dtype string (little-endian) of a type numpy has, ``None`` for the others (bf16 and the quantised).
    ``since`` is the first protocol version whose every server knows the type; older ones may close on it.
    """

    code: int
    name: str
    block: int
    nbytes: int
    numpy: str | None = None
    since: tuple[int, int] = (1, 0)


_TABLE: Final = (
    TensorType(0, "f32", 1, 4, "<f4"),
    TensorType(1, "f16", 1, 2, "<f2"),
    TensorType(2, "q4_0", 32, 18),
    TensorType(3, "q4_1", 32, 20),
    TensorType(6, "q5_0", 32, 22),
    TensorType(7, "q5_1", 32, 24),
    TensorType(8, "q8_0", 32, 34),
    TensorType(9, "q8_1", 32, 36),
    TensorType(10, "q2_K", 256, 84),
    TensorType(11, "q3_K", 256, 110),
    TensorType(12, "q4_K", 256, 144),
    TensorType(13, "q5_K", 256, 176),
    TensorType(14, "q6_K", 256, 210),
    TensorType(15, "q8_K", 256, 292),
    TensorType(16, "iq2_xxs", 256, 66),
    TensorType(17, "iq2_xs", 256, 74),
    TensorType(18, "iq3_xxs", 256, 98),
    TensorType(19, "iq1_s", 256, 50),
    TensorType(20, "iq4_nl", 32, 18),
    TensorType(21, "iq3_s", 256, 110),
    TensorType(22, "iq2_s", 256, 82),
    TensorType(23, "iq4_xs", 256, 136),
    TensorType(I8, "i8", 1, 1, "|i1"),
    TensorType(25, "i16", 1, 2, "<i2"),
    TensorType(26, "i32", 1, 4, "<i4"),
    TensorType(27, "i64", 1, 8, "<i8"),
    TensorType(28, "f64", 1, 8, "<f8"),
    TensorType(29, "iq1_m", 256, 56),
    TensorType(30, "bf16", 1, 2),
    TensorType(34, "tq1_0", 256, 54),
    TensorType(35, "tq2_0", 256, 66),
    TensorType(39, "mxfp4", 32, 17, since=(3, 0)),
    TensorType(40, "nvfp4", 64, 36, since=(4, 0)),
    TensorType(41, "q1_0", 128, 18, since=(4, 0)),
    TensorType(42, "q2_0", 64, 18, since=(5, 0)),
)

TYPES: Final[dict[int, TensorType]] = {entry.code: entry for entry in _TABLE}
"""Every ggml type that has a size, by its number on the wire."""

REMOVED_TYPES: Final = MappingProxyType(
    {
        4: "q4_2",
        5: "q4_3",
        31: "q4_0_4_4",
        32: "q4_0_4_8",
        33: "q4_0_8_8",
        36: "iq4_nl_4_4",
        37: "iq4_nl_4_8",
        38: "iq4_nl_8_8",
    }
)
"""Numbers ggml has retired, with what they were: they have no size any more, and a server closes on them."""

_BY_NAME: Final = {entry.name.lower(): entry for entry in _TABLE}


def type_by_name(name: str) -> TensorType:
    """The type called ``name`` as ggml spells it; case does not matter. ValueError if there is none."""
    found = _BY_NAME.get(name.lower())
    if found is None:
        known = ", ".join(entry.name for entry in _TABLE)
        raise ValueError(f"no ggml type is called {name!r}; known: {known}")
    return found


def _known(code: int) -> TensorType:
    found = TYPES.get(code)
    if found is None:
        if code in REMOVED_TYPES:
            raise ValueError(f"ggml type {code} ({REMOVED_TYPES[code]}) was removed from ggml and has no size")
        raise ValueError(f"unknown ggml type {code}")
    return found


def _row_nbytes(kind: TensorType, ne: Sequence[int]) -> int:
    if any(extent < 0 for extent in ne):
        raise ValueError(f"a dimension is negative: {tuple(ne)}")
    first = ne[0] if ne else 1
    if first % kind.block:
        raise ValueError(f"{kind.name} stores blocks of {kind.block} elements, and ne[0] = {first} is no multiple")
    return first // kind.block * kind.nbytes


def contiguous_nbytes(code: int, ne: Sequence[int]) -> int:
    """Bytes of a tensor without gaps, of ggml type ``code`` and shape ``ne``.

    ``ne`` may have any number of dimensions; none at all is one element. ValueError if the type is unknown, a
    dimension negative, or ``ne[0]`` no multiple of the type's block.
    """
    total = _row_nbytes(_known(code), ne)
    for extent in ne[1:]:
        total *= extent
    return total


def contiguous_strides(code: int, ne: Sequence[int]) -> tuple[int, int, int, int]:
    """The byte strides ggml gives a tensor of up to four dimensions without gaps; missing dimensions count as 1.

    ``nb[0]`` is one block, ``nb[1]`` one row, and so on. ValueError as for `contiguous_nbytes`, or for more than four
    dimensions.
    """
    if len(ne) > MAX_DIMS:
        raise ValueError(f"{len(ne)} dimensions: a ggml tensor has at most {MAX_DIMS}")
    kind = _known(code)
    row = _row_nbytes(kind, ne)
    plane = row * (ne[1] if len(ne) > 1 else 1)
    cube = plane * (ne[2] if len(ne) > 2 else 1)
    return kind.nbytes, row, plane, cube


def span_nbytes(code: int, ne: Sequence[int], nb: Sequence[int]) -> int:
    """Bytes from a tensor's first to its last one, which is what a ggml server takes for its size.

    ``ne`` and ``nb`` have equal length. A dimension of zero (or less) makes it 0. The result is exact, however large;
    ValueError if the type is unknown or the lengths differ.
    """
    if len(ne) != len(nb):
        raise ValueError(f"{len(ne)} dimensions but {len(nb)} strides")
    kind = _known(code)
    if any(extent <= 0 for extent in ne):
        return 0
    if kind.block == 1:
        return kind.nbytes + sum((extent - 1) * stride for extent, stride in zip(ne, nb, strict=True))
    if not ne:
        raise ValueError(f"a {kind.name} tensor needs at least one dimension")
    return ne[0] * nb[0] // kind.block + sum(
        (extent - 1) * stride for extent, stride in zip(ne[1:], nb[1:], strict=True)
    )
