"""The type table and the size arithmetic against upstream's own library."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from support.stock import run_script

from weightwire.wire.tensor import RpcTensor, weight_tensor
from weightwire.wire.types import REMOVED_TYPES, TYPES, span_nbytes

pytestmark = pytest.mark.interop

GIB = 1 << 30


def ask(stock_lib: Path, codes: list[int], tensors: list[RpcTensor]) -> Any:
    """What upstream's ggml says of both."""
    described = [[tensor.type, tensor.ne, tensor.nb] for tensor in tensors]
    return run_script(sys.executable, "stock_types.py", stock_lib, json.dumps(codes), json.dumps(described))


def test_every_type_has_upstreams_name_and_size(stock_lib: Path) -> None:
    codes = sorted(TYPES)
    found = ask(stock_lib, codes, [])["types"]
    ours = [[TYPES[code].name, TYPES[code].block, TYPES[code].nbytes, TYPES[code].block > 1] for code in codes]
    assert found == ours


def test_removed_types_have_no_size_in_upstream_either(stock_lib: Path) -> None:
    codes = sorted(REMOVED_TYPES)
    assert [entry[1:] for entry in ask(stock_lib, codes, [])["types"]] == [[0, 0, False]] * len(codes)


def test_upstream_takes_a_weight_for_exactly_its_bytes(stock_lib: Path) -> None:
    """Typed and plain, small and beyond 4 GiB: what arrives is what a server computes the size of."""
    weights: list[tuple[int | None, tuple[int, ...], int]] = [
        (12, (512, 10), 2880),
        (0, (2, 3, 4, 5, 6), 2880),
        (12, (5120, 1 << 21), 2880 << 21),
        (0, (1 << 15, 1 << 15, 2), 8 * GIB),
        *[(None, (n,), n) for n in (0, 1, 4 * GIB - 1, 4 * GIB, 4 * GIB + 7, 6 * GIB - 1, 6 * GIB, (1 << 45) + 12345)],
    ]
    tensors = [
        RpcTensor.unpack(weight_tensor("w", code, ne, nbytes, buffer=1, data=2).pack()) for code, ne, nbytes in weights
    ]
    assert ask(stock_lib, [], tensors)["nbytes"] == [nbytes for _, _, nbytes in weights]


def test_span_agrees_with_upstream_for_any_shape(stock_lib: Path) -> None:
    dice = random.Random(20240617)
    tensors = []
    for code in sorted(TYPES):
        for _ in range(8):
            ne = tuple(dice.randrange(0, 50) for _ in range(4))
            nb = tuple(dice.randrange(0, 1 << 32) for _ in range(4))
            tensors.append(RpcTensor(1, code, 0, (ne[0] * TYPES[code].block, *ne[1:]), nb))  # type: ignore[arg-type]
    found = ask(stock_lib, [], tensors)["nbytes"]
    assert found == [span_nbytes(tensor.type, tensor.ne, tensor.nb) for tensor in tensors]
    assert 0 in found
    assert max(found) > 1 << 32
