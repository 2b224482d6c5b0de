import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import ProtocolError
from weightwire.wire import hello
from weightwire.wire.dialect import DIALECTS
from weightwire.wire.hello import Greeting

CAPS = bytes(range(24))


def test_short_answer_byte_by_byte() -> None:
    assert Greeting(3, 6, 1).encode() == b"\x03\x06\x01"
    assert Greeting.decode(b"\x03\x06\x01") == Greeting(3, 6, 1, 0, bytes(24))


def test_long_answer_byte_by_byte() -> None:
    assert Greeting(7, 0, 2, hello.CACHE_BIT, CAPS).encode() == b"\x07\x00\x02\x01" + CAPS
    assert Greeting.decode(b"\x07\x00\x02\x03" + CAPS) == Greeting(7, 0, 2, 3, CAPS)


def test_what_a_greeting_says() -> None:
    greeting = Greeting(7, 1, 9, 0b101)
    assert (greeting.version, greeting.text, greeting.has_cache) == ((7, 1, 9), "7.1.9", True)
    assert not Greeting(7, 0, 0, 0b10).has_cache
    assert not Greeting(7, 0, 0).has_cache


@given(st.integers(0, 3), st.integers(0, 255), st.integers(0, 255))
def test_short_round_trip(major: int, minor: int, patch: int) -> None:
    greeting = Greeting(major, minor, patch)
    assert Greeting.decode(greeting.encode()) == greeting


@given(
    st.integers(4, 255),
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 255),
    st.binary(min_size=24, max_size=24),
)
def test_long_round_trip(major: int, minor: int, patch: int, flags: int, caps: bytes) -> None:
    greeting = Greeting(major, minor, patch, flags, caps)
    assert hello.decode_hello_answer(hello.encode_hello_answer(greeting)) == greeting


@pytest.mark.parametrize("length", [n for n in range(40) if n not in (3, 28)])
def test_an_answer_of_another_length(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"not {length}"):
        Greeting.decode(bytes([7] * length))


@pytest.mark.parametrize("major", range(1, 9))
def test_a_known_major_in_the_wrong_form(major: int) -> None:
    wrong = bytes([major]) + bytes(27 if major < 4 else 2)
    with pytest.raises(ProtocolError, match=f"protocol {major}.0.0"):
        Greeting.decode(wrong)


@pytest.mark.parametrize("major", [0, 9, 107, 108, 255])
def test_unknown_majors_decode_in_either_form(major: int) -> None:
    assert Greeting.decode(bytes([major, 1, 2])).version == (major, 1, 2)
    assert Greeting.decode(bytes([major, 1, 2]) + bytes(25)).version == (major, 1, 2)


@pytest.mark.parametrize("greeting", [Greeting(3, 0, 0, flags=1), Greeting(2, 0, 0, caps=CAPS)])
def test_old_versions_have_no_place_for_flags_or_caps(greeting: Greeting) -> None:
    with pytest.raises(ValueError, match="no place"):
        greeting.encode()


@pytest.mark.parametrize(
    "greeting",
    [Greeting(256, 0, 0), Greeting(7, -1, 0), Greeting(7, 0, 256), Greeting(7, 0, 0, 256), Greeting(7, 0, 0, 0, b"")],
)
def test_fields_that_do_not_fit(greeting: Greeting) -> None:
    with pytest.raises(ValueError, match=r"no byte|24 bytes"):
        greeting.encode()


def test_requests() -> None:
    assert hello.encode_hello_request() == bytes(24)
    assert hello.encode_hello_request(CAPS) == CAPS
    assert hello.encode_hello_request(None) == b""
    assert hello.decode_hello_request(memoryview(CAPS)) == CAPS
    assert hello.decode_hello_request(b"") is None
    with pytest.raises(ValueError, match="24 bytes, not 23"):
        hello.encode_hello_request(bytes(23))


@pytest.mark.parametrize("length", [*range(1, 24), 25, 48])
def test_a_request_of_another_length(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"not {length}"):
        hello.decode_hello_request(bytes(length))


@pytest.mark.parametrize("version", sorted(DIALECTS))
def test_sizes_are_those_of_the_dialect(version: tuple[int, int]) -> None:
    dialect = DIALECTS[version]
    assert len(Greeting(*version, 0).encode()) == dialect.hello_answer_bytes
    caps = hello.NO_CAPS if dialect.rdma else None
    assert len(hello.encode_hello_request(caps)) == dialect.hello_request_bytes
