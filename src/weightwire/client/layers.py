"""Tensors by the number of their layer: what ``layers="20-39"`` means."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from weightwire.errors import ConfigError

__all__ = ["LAYER_NAMES", "Layers", "layer_of", "parse_layers"]

LAYER_NAMES: Final = "blk.N., layers.N., layer.N., blocks.N., block.N. or h.N."
"""How names tell their layer: llama.cpp's form, and those of the safetensors files of the usual families."""

_OTHER: Final = "other"
_FORMS: Final = "such as 7, 20-39, 20-, -19, or several with commas; 'other' is what belongs to no layer"
_IN_NAME: Final = re.compile(r"(?:^|\.)(?:blk|layers?|blocks?|h)\.([0-9]{1,9})\.")
_ITEM: Final = re.compile(r"([0-9]{1,9})?(?:(-)([0-9]{1,9})?)?", re.ASCII)
_NO_END: Final = 10**9
_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class Layers:
    """Which layers are wanted: ``ranges`` of first and last number, and whether tensors of no layer are, too."""

    ranges: tuple[tuple[int, int], ...]
    other: bool

    def holds(self, name: str) -> bool:
        """Whether the tensor called ``name`` is of one of these layers."""
        layer = layer_of(name)
        return self.other if layer is None else any(first <= layer <= last for first, last in self.ranges)

    def check(self, names: Iterable[str]) -> None:
        """ConfigError if one of the ranges, or ``other``, stands for none of ``names``; it says which layers there are.

        Each by itself: in ``0-19,40-59`` a second range that finds nothing is as much a mistake as an only one.
        """
        found = [layer_of(name) for name in names]
        layers = sorted({layer for layer in found if layer is not None})
        if not layers and self.ranges:
            raise ConfigError(
                f"layers: none of the {len(found)} tensor names has the number of a layer in it",
                hint=f"that is {LAYER_NAMES}; choose with include instead",
            )
        for first, last in self.ranges:
            if not any(first <= layer <= last for layer in layers):
                raise ConfigError(
                    f"layers: there is no layer {_written(first, last)} in this model",
                    hint=f"it has {_listed(layers)}",
                )
        if self.other and None not in found:
            raise ConfigError("layers: every tensor is of a layer, so there is no 'other'", hint="leave it out")


def layer_of(name: str) -> int | None:
    """The number of the layer that the tensor ``name`` belongs to; None if it belongs to none.

    It is the first number after a word for a layer: an encoder's ``encoder.block.3.layer.1.…`` is of layer 3.
    """
    match = _IN_NAME.search(name)
    return int(match.group(1)) if match is not None else None


def parse_layers(text: str | None) -> Layers | None:
    """Turn ``"20-39"``, ``"7"``, ``"20-"``, ``"-19"``, ``"other"`` or several of them with commas into layers.

    Both ends belong to a range. None is None: every tensor. Raises ConfigError for anything else.
    """
    if text is None:
        return None
    if not isinstance(text, str):
        raise ConfigError(f"layers: {reprlib.repr(text)} is not text", hint=_FORMS)
    ranges: list[tuple[int, int]] = []
    other = False
    for part in text.split(","):
        item = part.strip()
        if item == _OTHER:
            other = True
            continue
        match = _ITEM.fullmatch(item)
        if match is None or not item or item == "-":
            raise ConfigError(
                f"layers: {reprlib.repr(item)} in {reprlib.repr(text)} is no range of layers", hint=_FORMS
            )
        low, dash, high = match.groups()
        first = int(low or 0)
        last = (int(high) if high else _NO_END) if dash else first
        if first > last:
            raise ConfigError(f"layers: {item!r} begins behind its end", hint=f"{last}-{first} is the same in order")
        ranges.append((first, last))
    return Layers(tuple(ranges), other)


def _written(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-" if last == _NO_END else f"{first}-{last}"


def _listed(layers: Sequence[int]) -> str:
    """``layers``, sorted, as the ranges they are."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    shown = ", ".join(_written(first, last) for first, last in runs[:_SHOWN])
    return f"layer{'s' if len(layers) > 1 else ''} {shown}{', ...' if len(runs) > _SHOWN else ''}"
