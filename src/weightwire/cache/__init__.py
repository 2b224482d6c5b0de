"""The tensor cache on disk: one file per payload, named by its FNV-1a 64."""

from __future__ import annotations

from weightwire.cache.store import CacheWriter, TensorCache, default_directory, entry_name

__all__ = ["CacheWriter", "TensorCache", "default_directory", "entry_name"]
