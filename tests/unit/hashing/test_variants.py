"""Every variant of the hasher that this CPU offers, forced in turn, against the plain loop."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fnvhash
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fnv import slow

from weightwire._native import _fnv1a
from weightwire.hashing import FNV_OFFSET, cpu_features, fnv1a64, fnv1a64_many, hash_payload, hash_payloads
from weightwire.ranges import FileRange

LONGEST_BLOCK = 8192  # bytes; blocks are powers of two from 1024 on
WIDE = ("avx512", "avxvnni", "avx2", "sse2", "neon")

each_variant = pytest.mark.usefixtures("variant")
with_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=cpu_features().offered)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _fnv1a.chosen()
    _fnv1a.choose(request.param)
    yield request.param
    _fnv1a.choose(before)


def plain(data: np.ndarray, start: int = FNV_OFFSET) -> int:
    """By the plain loop, which test_plain_is_the_loop_itself compares with one in Python."""
    before = _fnv1a.chosen()
    _fnv1a.choose("plain")
    try:
        return fnv1a64(data, start)
    finally:
        _fnv1a.choose(before)


def noise(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_plain_is_the_loop_itself() -> None:
    for nbytes in (0, 1, 1023, 1024, 8192, 20_000):
        assert plain(noise(nbytes)) == slow(noise(nbytes).tobytes())


def test_the_variants_of_this_cpu() -> None:
    features = cpu_features()
    assert features.offered[-1] == "plain"
    assert features.single in features.offered
    assert set(features.offered) | set(features.unavailable) <= {*WIDE, "plain"}
    assert not set(features.offered) & set(features.unavailable)


@each_variant
def test_known_vectors() -> None:
    # Of the FNV authors' test suite (http://www.isthe.com/chongo/src/fnv/test_fnv.c).
    assert fnv1a64(b"foobar") == 0x85944171F73967E8
    assert fnv1a64(b"chongo was here!\n") == 0x46810940EFF5F915
    assert fnv1a64(b"") == FNV_OFFSET


@each_variant
@with_fixture
@given(st.binary(max_size=9000), st.integers(0, 2**64 - 1))
def test_any_bytes_from_any_start(data: bytes, start: int) -> None:
    assert fnv1a64(data, start) == slow(data, start)


@each_variant
@with_fixture
@given(st.integers(0, 5 * LONGEST_BLOCK), st.integers(0, 200), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_any_length_place_and_start(nbytes: int, at: int, start: int, seed: int) -> None:
    data = noise(at + nbytes, seed)[at:]
    assert fnv1a64(data, start) == plain(data, start)
    assert fnv1a64_many([data]) == [plain(data)]


@each_variant
def test_every_length_to_4096() -> None:
    data, start = noise(4096), FNV_OFFSET
    expected = [start := (start ^ byte) * 0x100000001B3 % 2**64 for byte in data.tolist()]
    assert [fnv1a64(data[: n + 1]) for n in range(4096)] == expected
    assert fnv1a64_many([data[: n + 1] for n in range(4096)]) == expected


@each_variant
@pytest.mark.parametrize("block", [1024, 2048, 4096, 8192])
def test_about_every_boundary_of_blocks(block: int) -> None:
    data = noise(4 * block + 1100)
    for whole in (1, 2, 3, 4):
        for more in (-2, -1, 0, 1, 2, 1023, 1024, 1025):
            part = data[: whole * block + more]
            assert fnv1a64(part) == plain(part)


@each_variant
def test_every_misalignment() -> None:
    data = noise(3 * LONGEST_BLOCK + 64)
    for at in range(64):
        assert fnv1a64(data[at:]) == plain(data[at:])


@each_variant
@with_fixture
@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=6), st.integers(0, 2**64 - 1))
def test_chaining(sizes: list[int], start: int) -> None:
    data, value, at = noise(sum(sizes)), start, 0
    for size in sizes:
        value = fnv1a64(data[at : at + size], value)
        at += size
    assert value == plain(data, start)


@each_variant
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80, 0x55, 0xB3])
def test_bytes_that_are_all_the_same(byte: int) -> None:
    data = np.full(3 * LONGEST_BLOCK, byte, dtype=np.uint8)
    for low in range(256):  # with each low byte to begin with
        assert fnv1a64(data, low) == plain(data, low)


@each_variant
def test_an_independent_implementation() -> None:
    data = noise(2 * LONGEST_BLOCK + 1234).tobytes()
    assert fnv1a64(data) == fnvhash.fnv1a_64(data)


@each_variant
def test_longer_than_a_step_between_looks_around() -> None:
    data = noise((33 << 20) + 4321)
    assert fnv1a64(data) == plain(data) == hash_payload(data)


@each_variant
def test_buffers_and_file_ranges_of_all_sizes_in_one_queue(tmp_path: Path) -> None:
    generator = random.Random(7)
    data = noise(1 << 20)
    path = tmp_path / "blob"
    data.tofile(path)
    payloads: list[np.ndarray | FileRange] = []
    expected = []
    with path.open("rb") as file:
        for _ in range(120):
            nbytes = min(int(2 ** generator.uniform(0, 19)), 400_000)
            at = generator.randrange(len(data) - nbytes)
            part = data[at : at + nbytes]
            payloads.append(generator.choice([part, FileRange(file.fileno(), at, nbytes, str(path))]))
            expected.append(plain(part))
        assert hash_payloads(payloads) == expected


def test_threads_hash_at_once() -> None:
    pieces = [noise(100_000 + n, n) for n in range(40)]
    expected = [plain(piece) for piece in pieces]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(fnv1a64, pieces)) == expected


def run(code: str, **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


SHOW = "import weightwire; f = weightwire.cpu_features(); print(f.single, f.many, hex(weightwire.fnv1a64(b'a' * 9999)))"


@pytest.mark.parametrize("name", cpu_features().offered)
def test_the_environment_forces_a_variant(name: str) -> None:
    many = "interleaved" if name == "plain" else name
    expected = f"{name} {many} {slow(b'a' * 9999):#x}\n"
    assert run(SHOW, WEIGHTWIRE_HASH=name) == run(SHOW, WEIGHTWIRE_HASH=f" {name.upper()} ") == (0, expected)


@pytest.mark.parametrize("value", ["", "auto"])
def test_without_one_the_best_is_taken(value: str) -> None:
    assert run(SHOW, WEIGHTWIRE_HASH=value)[1].split()[0] == cpu_features().offered[0]


CALLS: list[str] = [
    "w.cpu_features()",
    "w.fnv1a64(b'')",
    "w.fnv1a64_many([])",
    "h.hash_payload(b'')",
    "h.hash_payloads([])",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_variable_that_names_none_is_refused(call: str) -> None:
    code = f"""
import weightwire as w, weightwire.hashing as h
for _ in 1, 2:
    try: {call}
    except w.WeightwireError as error: print(error.hint)
"""
    returncode, out = run(code, WEIGHTWIRE_HASH="mmx")
    assert (returncode, out) == (0, "correct or unset WEIGHTWIRE_HASH; see docs/configuration.md\n" * 2)


def test_a_variant_for_another_cpu_is_refused() -> None:
    foreign = next(name for name in WIDE if name not in cpu_features().offered)
    returncode, out = run(SHOW, WEIGHTWIRE_HASH=foreign)
    assert returncode == 1
    assert f"ConfigError: environment variable WEIGHTWIRE_HASH: this CPU cannot run the variant '{foreign}'" in out
    assert f"it can run {', '.join(cpu_features().offered)}" in out


def test_the_native_module_refuses_a_variant_it_does_not_have() -> None:
    before = _fnv1a.chosen()
    for name in ("mmx", *cpu_features().unavailable):
        with pytest.raises(LookupError):
            _fnv1a.choose(name)
    assert _fnv1a.chosen() == before


@each_variant
@with_fixture
@given(sizes=st.lists(st.integers(0, 3 * LONGEST_BLOCK), min_size=1, max_size=6))
def test_the_plain_loop_for_one_call_only(variant: str, sizes: list[int]) -> None:
    """Whatever the others use: the same hashes, and nothing is chosen by it."""
    payloads = [noise(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    assert hash_payloads(payloads, plain=True) == [plain(data) for data in payloads]
    assert _fnv1a.chosen() == variant
