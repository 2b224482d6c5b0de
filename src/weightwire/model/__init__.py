"""Where weights come from: GGUF (split, too), safetensors, or arrays in memory."""

from __future__ import annotations

from weightwire.model.base import Model, ModelTensor
from weightwire.model.opening import open_model

__all__ = ["Model", "ModelTensor", "open_model"]
