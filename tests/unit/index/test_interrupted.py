"""Ctrl-C while an index is used, which lives on where the program does."""

from __future__ import annotations

from pathlib import Path

from support.everywhere import run_script

EVERYWHERE = """
import sys
from support.everywhere import Everywhere
from weightwire.index import HashIndex, store

def work(use):
    return use.execute("UPDATE hashes SET fnv1a = 0").rowcount

def write():
    index._attempt("writing", work, 5.0, writes=True)

everywhere = Everywhere(store)
with HashIndex(sys.argv[1]) as index, HashIndex(sys.argv[1]) as other:
    write()
    for _ in everywhere:
        try:
            everywhere.trace(write)
        except KeyboardInterrupt:
            everywhere.count += 1
        assert other._attempt("writing", work, 0.0, writes=True) == 0, everywhere.at
        assert index._attempt("writing", work, 0.0, writes=True) == 0, everywhere.at
print(everywhere.count)
"""


def test_no_transaction_is_left_open(tmp_path: Path) -> None:
    """It would lock all others out, and this index itself."""
    assert run_script(EVERYWHERE, str(tmp_path / "index.sqlite3")) > 10
