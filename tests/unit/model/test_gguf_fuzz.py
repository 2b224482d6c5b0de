"""The GGUF walk on generated files: valid ones are found out exactly, damaged ones raise ModelError or nothing."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import raw_gguf as raw

from weightwire.errors import ModelError
from weightwire.model import open_model
from weightwire.wire.types import TYPES, contiguous_nbytes

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
Taken = tuple[str, int | None, tuple[int, ...], bytes]
Attempt = Callable[[bytes], list[Taken]]

HOSTILE = (0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


class Made(NamedTuple):
    content: bytes
    keys: set[str]  # of scalars and strings
    tensors: list[tuple[str, int, tuple[int, ...], bytes]]
    header: int  # bytes before the data


def arrays() -> st.SearchStrategy[bytes]:
    def of(kind: int) -> st.SearchStrategy[bytes]:
        return st.integers(0, 5).map(lambda count: raw.array(kind, count, bytes(count * SIZES[kind])))

    flat = st.sampled_from(sorted(SIZES)).flatmap(of)
    words = st.lists(st.text(max_size=9), max_size=5).map(
        lambda texts: raw.array(raw.STRING, len(texts), b"".join(map(raw.string, texts)))
    )
    return st.recursive(
        flat | words,
        lambda inner: st.lists(inner, max_size=3).map(lambda each: raw.array(raw.ARRAY, len(each), b"".join(each))),
        max_leaves=5,
    )


def values() -> st.SearchStrategy[tuple[int, bytes]]:
    scalars = st.sampled_from(sorted(SIZES)).flatmap(
        lambda kind: st.binary(min_size=SIZES[kind], max_size=SIZES[kind]).map(lambda data: (kind, data))
    )
    texts = st.text(max_size=40).map(lambda text: (raw.STRING, raw.string(text)))
    return scalars | texts | arrays().map(lambda data: (raw.ARRAY, data))


flips = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=8)
names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)


@st.composite
def models(draw: st.DrawFn) -> Made:
    alignment = draw(st.sampled_from([1, 8, 32, 64, 256]))
    entries = draw(st.dictionaries(names.filter(lambda key: key != "general.alignment"), values(), max_size=6))
    pairs = [raw.pair(key, kind, data) for key, (kind, data) in entries.items()]
    pairs.insert(draw(st.integers(0, len(pairs))), raw.pair("general.alignment", raw.U32, struct.pack("<I", alignment)))
    infos: list[bytes] = []
    tensors: list[tuple[str, int, tuple[int, ...], bytes]] = []
    data = b""
    for name in draw(st.lists(names, unique=True, max_size=5)):
        code = draw(st.sampled_from(sorted(TYPES)))
        rest = draw(st.lists(st.integers(0, 3), max_size=3))
        ne = (draw(st.integers(0, 2)) * TYPES[code].block, *rest)
        nbytes = contiguous_nbytes(code, ne)
        content = draw(st.binary(min_size=4, max_size=4)) * (nbytes // 4 + 1)
        data += bytes(-len(data) % alignment)
        infos.append(raw.tensor(name, ne, code, len(data)))
        data += content[:nbytes]
        tensors.append((name, code, ne, content[:nbytes]))
    content = raw.build(pairs, infos, data, alignment=alignment)
    keys = {key for key, (kind, _) in entries.items() if kind != raw.ARRAY} | {"general.alignment"}
    return Made(content, keys, tensors, len(content) - len(data))


@pytest.fixture(scope="module")
def attempt(
    tmp_path_factory: pytest.TempPathFactory,
) -> Attempt:
    """Opens content as a model and takes everything out of it."""
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"

    def take(content: bytes) -> list[Taken]:
        path.write_bytes(content)
        with open_model(path) as model:
            return [(each.name, each.type_code, each.ne, bytes(each.view())) for each in model.tensors.values()]

    return take


@given(made=models())
@settings(deadline=None)
def test_valid_files_are_found_out_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    attempt: Attempt,
    made: Made,
) -> None:
    assert attempt(made.content) == made.tensors
    path = tmp_path_factory.getbasetemp() / "metadata.gguf"
    path.write_bytes(made.content)
    with open_model(path) as model:
        assert set(model.metadata) == made.keys


def small_file() -> bytes:
    pairs = [
        raw.pair("general.architecture", raw.STRING, raw.string("test")),
        raw.pair("general.alignment", raw.U32, b"\x20\0\0\0"),
        raw.pair("words", raw.ARRAY, raw.array(raw.STRING, 3, b"".join(map(raw.string, ("a", "", "bcd"))))),
        raw.pair("nested", raw.ARRAY, raw.array(raw.ARRAY, 1, raw.array(4, 2, bytes(8)))),
        raw.pair("f64", 12, bytes(8)),
    ]
    tensors = [
        raw.tensor("f32", (3, 5), 0, 0),
        raw.tensor("q4_K", (256, 2), 12, 64),
        raw.tensor("new", (3, 3, 3), 57, 352),
        raw.tensor("f16", (2, 2, 2, 2), 1, 416),
    ]
    return raw.build(pairs, tensors, bytes(range(256)) + bytes(192))


def test_truncation_at_every_byte_is_a_model_error(
    attempt: Attempt,
) -> None:
    content = small_file()
    assert len(attempt(content)) == 4
    for end in range(len(content)):
        with pytest.raises(ModelError) as caught:
            attempt(content[:end])
        assert caught.value.offset is not None
        assert caught.value.offset <= end


def test_every_hostile_number_at_every_byte_of_the_header(
    attempt: Attempt,
) -> None:
    """Every hostile number laid over the header everywhere: an answer or a ModelError, and little memory."""
    content = small_file()
    header = len(content) - 448
    refusals = 0
    tracemalloc.start()
    try:
        for at in range(header - 8):
            for value in HOSTILE:
                try:
                    attempt(content[:at] + struct.pack("<Q", value) + content[at + 8 :])
                except ModelError:
                    refusals += 1
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert refusals > header


@given(
    made=models(),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=8),
)
@settings(deadline=None, max_examples=300)
def test_flipped_bytes_raise_nothing_but_model_errors(
    attempt: Attempt,
    made: Made,
    flips: list[tuple[float, int]],
) -> None:
    damaged = bytearray(made.content)
    for where, mask in flips:
        damaged[int(where * min(made.header, len(damaged)))] ^= mask
    with contextlib.suppress(ModelError):
        for _, _, _, content in attempt(bytes(damaged)):
            assert len(content) <= len(damaged)
