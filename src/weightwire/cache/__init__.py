"""The tensor cache on disk: one file per payload, named by its FNV-1a 64.

A server keeps one (`TensorCache`); the other functions fill, list, check and prune a directory without one.
"""

from __future__ import annotations

from weightwire.cache.check import BadEntry, CacheReport, UncheckedEntry, verify_cache
from weightwire.cache.directory import default_directory, entry_name
from weightwire.cache.inspect import CacheStatus, Entry, Listing, cache_status, list_entries
from weightwire.cache.prune import PruneResult, prune_cache
from weightwire.cache.seeding import SeedResult, seed
from weightwire.cache.store import TensorCache
from weightwire.cache.writing import CacheWriter

__all__ = [
    "BadEntry",
    "CacheReport",
    "CacheStatus",
    "CacheWriter",
    "Entry",
    "Listing",
    "PruneResult",
    "SeedResult",
    "TensorCache",
    "UncheckedEntry",
    "cache_status",
    "default_directory",
    "entry_name",
    "list_entries",
    "prune_cache",
    "seed",
    "verify_cache",
]
