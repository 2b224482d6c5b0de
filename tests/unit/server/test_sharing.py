"""Several servers that keep their tensors in one directory, at the same time."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from support.cachedir import name_of
from support.leaks import LeakCheck

import weightwire
from weightwire.cache import verify_cache

LARGE = (10 << 20) + 1


def tensor(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, LARGE, dtype=np.uint8)


@pytest.mark.timeout(300)
def test_servers_share_a_directory(tmp_path: Path, no_leaks: LeakCheck) -> None:
    """They are sent the same tensors at once, and others; whoever looks meanwhile sees whole entries alone."""
    models = [{f"t{number}": tensor(number) for number in range(first, first + 3)} for first in range(3)]
    looks = 0
    done = threading.Event()
    wrong: list[object] = []

    def look() -> None:
        nonlocal looks
        while not done.is_set():
            wrong.extend(verify_cache(tmp_path, threads=0, index=False).bad)
            looks += 1

    def push(number: int) -> None:
        try:
            with weightwire.Server(port=0, cache=tmp_path) as server:
                for model in (models[number], models[0], models[number]):
                    with weightwire.connect(server.endpoints[0], timeout=100) as connection:
                        pushed = connection.push(model, verify=True, index=False)
                        wrong.extend([pushed.summary] if pushed.summary.corrupt_hits else [])
        except BaseException as error:
            wrong.append(error)

    looking = threading.Thread(target=look)
    pushing = [threading.Thread(target=push, args=(number,)) for number in range(3)]
    looking.start()
    for thread in pushing:
        thread.start()
    for thread in pushing:
        thread.join(200)
    done.set()
    looking.join(60)
    assert not wrong
    assert looks
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(name_of(tensor(n).tobytes()) for n in range(5))
