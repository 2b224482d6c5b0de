"""``layers=``: which tensors a range of layer numbers stands for, and what is said when it stands for none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire import open_model
from weightwire.client.layers import Layers, layer_of, parse_layers
from weightwire.client.plan import select
from weightwire.errors import ConfigError
from weightwire.model.choosing import compile_include

NAMES = ["token_embd.weight", *(f"blk.{n}.attn_q.weight" for n in range(6)), "blk.0.ffn_up.weight", "output.weight"]


def chosen(layers: str | None, include: str | None = None, names: list[str] | None = None) -> list[str]:
    """The names that a push would send of a model that has ``names``."""
    with open_model({name: np.ones(1, np.uint8) for name in names or NAMES}) as model:
        return [tensor.name for tensor in select(model, compile_include(include), parse_layers(layers))]


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [("3", [3]), ("1-3", [1, 2, 3]), ("4-", [4, 5]), ("-1", [0, 1]), (" 0 , 5 ", [0, 5]), ("0-1,1-2", [0, 1, 2])],
)
def test_the_forms(layers: str, numbers: list[int]) -> None:
    assert [name for name in chosen(layers) if "attn" in name] == [f"blk.{n}.attn_q.weight" for n in numbers]
    assert "token_embd.weight" not in chosen(layers)


def test_a_range_may_reach_past_the_last_layer() -> None:
    assert chosen("5-99") == ["blk.5.attn_q.weight"]


def test_what_is_of_no_layer_comes_when_asked_for() -> None:
    assert chosen("other") == ["token_embd.weight", "output.weight"]
    assert chosen("5,other") == ["token_embd.weight", "blk.5.attn_q.weight", "output.weight"]
    assert chosen("0-,other") == chosen(None) == NAMES


def test_the_order_is_the_models() -> None:
    assert chosen("5,0") == ["blk.0.attn_q.weight", "blk.5.attn_q.weight", "blk.0.ffn_up.weight"]


def test_an_expression_has_to_match_as_well() -> None:
    assert chosen("0-1", include="ffn") == ["blk.0.ffn_up.weight"]
    with pytest.raises(ConfigError, match="both have to match"):
        chosen("3", include="ffn")
    with pytest.raises(ConfigError, match="nosuch"):
        chosen("3", include="nosuch")


@pytest.mark.parametrize(
    ("layers", "has"),
    [("6", "layers 0-5"), ("7-9", "layers 0-5"), ("0-2,40-59", "layers 0-5"), ("6-", "layers 0-5")],
)
def test_a_range_of_nothing_says_which_layers_there_are(layers: str, has: str) -> None:
    with pytest.raises(ConfigError, match="there is no layer") as caught:
        chosen(layers)
    assert has in caught.value.hint


def test_layers_with_gaps_are_listed_as_they_are() -> None:
    names = [f"layers.{n}.w" for n in (0, 1, 2, 5, 9, 10)]
    with pytest.raises(ConfigError) as caught:
        chosen("3-4", names=names)
    assert caught.value.hint == "it has layers 0-2, 5, 9-10"
    with pytest.raises(ConfigError) as caught:
        chosen("-99", names=[f"x{name}" for name in names])
    assert "include" in caught.value.hint
    with pytest.raises(ConfigError, match="no 'other'"):
        chosen("0,other", names=names)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blk.12.ffn_down.weight", 12),
        ("model.layers.7.self_attn.q_proj.weight", 7),
        ("layers.0.w1", 0),
        ("transformer.h.31.mlp.c_fc.weight", 31),
        ("h.3.attn.bias", 3),
        ("bert.encoder.layer.11.output.dense.weight", 11),
        ("transformer.blocks.2.norm_1.weight", 2),
        ("encoder.block.3.layer.1.DenseReluDense.wi.weight", 3),
        ("model.layers.7.mlp.experts.63.up_proj.weight", 7),
        ("enc.blk.5.attn_q.weight", 5),
        ("token_embd.weight", None),
        ("output_norm.weight", None),
        ("blk.weight", None),
        ("blk.x.weight", None),
        ("blk.7", None),
        ("myblk.7.weight", None),
        ("graph.7.weight", None),
        ("blk.٣.weight", None),
        ("blk." + "9" * 5000 + ".weight", None),
        ("", None),
    ],
)
def test_the_layer_of_a_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize(
    "layers",
    ["", ",", "1,", "-", "a", "1-2-3", "--2", "3-1", "1 - 2 3", "1.5", "0x1", "٣", "1" * 10, "others", 5, b"1", [1]],
)
def test_what_is_no_range(layers: str) -> None:
    with pytest.raises(ConfigError, match="layers") as caught:
        parse_layers(layers)
    assert caught.value.hint
    assert len(str(caught.value)) < 300


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=5), st.integers(0, 120))
def test_a_list_holds_what_one_of_its_ranges_holds(pairs: list[tuple[int, int]], layer: int) -> None:
    ranges = [(min(pair), max(pair)) for pair in pairs]
    layers = parse_layers(",".join(f"{first}-{last}" for first, last in ranges))
    assert isinstance(layers, Layers)
    assert layers.holds(f"blk.{layer}.weight") == any(layer in range(first, last + 1) for first, last in ranges)
    assert not layers.holds("output.weight")
