"""Choosing tensors by their names."""

from __future__ import annotations

import re
import reprlib
from typing import Final

from weightwire.errors import ConfigError
from weightwire.model.base import Model, ModelTensor

__all__ = ["compile_include", "included"]

_EXPRESSIONS: Final = r"for example '^blk\.0\.' or 'attn_.*weight'"


def compile_include(include: str | None) -> re.Pattern[str] | None:
    """The expression tensors are chosen by. ConfigError if it is none, or none that Python's `re` can hold."""
    if include is None:
        return None
    if not isinstance(include, str):
        raise ConfigError(f"include: {reprlib.repr(include)} is not text", hint=_EXPRESSIONS)
    try:
        return re.compile(include)
    except RecursionError:
        reason = "it is nested too deeply"
    except MemoryError:
        reason = "it takes too much memory"
    except (re.error, ValueError, OverflowError) as error:
        reason = str(error)
    raise ConfigError(f"include: {reprlib.repr(include)} is not a regular expression: {reason}", hint=_EXPRESSIONS)


def included(model: Model, include: re.Pattern[str] | None) -> list[ModelTensor]:
    """The tensors of ``model`` whose names ``include`` is found in, in its order; ConfigError if it is in none."""
    found = [tensor for name, tensor in model.tensors.items() if include is None or include.search(name)]
    if not found and include is not None:
        first = next(iter(model.tensors), None)
        raise ConfigError(
            f"include: {include.pattern!r} is in none of the {len(model.tensors)} tensor names",
            hint=f"the first is {first!r}" if first is not None else "there is no tensor in the model",
        )
    return found
