"""The index of hashes: what a model's tensors hash to, remembered between runs, so that a file is read once."""

from __future__ import annotations

from weightwire.index.choice import IndexChoice, check_index, index_for, open_index
from weightwire.index.digest import Hashes, hash_together, hash_with_digest
from weightwire.index.identity import FileIdentity, identity_of
from weightwire.index.store import HashIndex, Owner, default_index_path

__all__ = [
    "FileIdentity",
    "HashIndex",
    "Hashes",
    "IndexChoice",
    "Owner",
    "check_index",
    "default_index_path",
    "hash_together",
    "hash_with_digest",
    "identity_of",
    "index_for",
    "open_index",
]
