"""What the system refuses while a cache is seeded."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.cachedir import entries_of, files_in, name_of

from weightwire.cache import seed
from weightwire.errors import CacheError

pytestmark = pytest.mark.usefixtures("small_threshold")


def expected(tensors: dict[str, bytes]) -> dict[str, bytes]:
    return entries_of(*(data for data in tensors.values() if len(data) > 1000))


FULL = """
import resource, sys
from weightwire.cache import seed, seeding
from weightwire.errors import CacheError
seeding.CACHE_THRESHOLD = 1000
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    seed(sys.argv[1], sys.argv[2], threads=int(sys.argv[3]), index=False)
except CacheError as error:
    print(error)
"""


@pytest.mark.parametrize("threads", ["0", "2"])
def test_a_full_disk_ends_it_and_leaves_whole_entries(
    threads: str, model: Path, directory: Path, tensors: dict[str, bytes]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(model), str(directory), threads], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "'t6'" in done.stdout
    assert "File too large" in done.stdout
    assert "ulimit -f" in done.stdout
    assert "make room" not in done.stdout
    assert "entries were stored" in done.stdout
    left = files_in(directory)
    assert left.items() <= expected(tensors).items()
    assert name_of(tensors["t6"]) not in left
    if threads == "0":
        assert len(left) == 4


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_too_many_open_files(
    threads: int, model: Path, directory: Path, tensors: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, most, opened = tempfile.mkstemp, [1], list[str]()

    def crowded(*arguments: Any, **options: Any) -> Any:
        if sum(map(os.path.exists, opened)) >= most[0]:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made = real(*arguments, **options)
        opened.append(made[1])
        return made

    monkeypatch.setattr(tempfile, "mkstemp", crowded)
    seed(model, directory, threads=threads, index=False)  # one at a time, if it must be
    assert files_in(directory) == expected(tensors)
    most[0] = 0
    with pytest.raises(CacheError, match="0 of 5 entries were stored") as caught:
        seed(model, directory.with_name("other"), threads=threads, index=False)
    assert "ulimit -n" in caught.value.hint


def test_another_users_file_in_an_entrys_place_costs_this_entry_alone(
    model: Path, directory: Path, tensors: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory with the sticky bit, as /tmp has it."""
    theirs = name_of(tensors["t1"])
    real = os.replace

    def sticky(old: Any, new: Any) -> None:
        if Path(new).name == theirs:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        real(old, new)

    monkeypatch.setattr(os, "replace", sticky)
    with pytest.raises(CacheError, match="4 of 5 entries were stored") as caught:
        seed(model, directory, index=False)
    assert "another user's" in caught.value.hint
    assert "directory" not in caught.value.hint
