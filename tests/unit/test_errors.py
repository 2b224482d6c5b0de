"""The tree of errors: what is caught by which name, what each carries, and how it reads."""

from __future__ import annotations

import pytest

from weightwire import errors
from weightwire.errors import ModelError, PeerClosed, ServerBusy, TransferTimeout, TransportError, WeightwireError

LEAVES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", LEAVES)
def test_every_error_has_a_detail_and_a_hint(kind: type[WeightwireError]) -> None:
    error = kind("it broke", hint="mend it")
    assert isinstance(error, WeightwireError)
    assert (error.detail, error.hint, str(error)) == ("it broke", "mend it", "it broke (mend it)")
    assert kind("it broke").hint == ""
    assert str(kind("it broke")) == "it broke"


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("ModelError", ValueError),
        ("AllocationError", MemoryError),
        ("TransferTimeout", TimeoutError),
        ("ServerBusy", TimeoutError),
        ("TransportError", OSError),
        ("PeerClosed", ConnectionError),
    ],
)
def test_who_knows_only_pythons_own_errors_catches_them_too(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), builtin)


def test_what_is_a_kind_of_what() -> None:
    assert issubclass(errors.VersionError, errors.ProtocolError)
    assert issubclass(ServerBusy, TransferTimeout)
    assert issubclass(PeerClosed, TransportError)
    assert not issubclass(TransferTimeout, TransportError)


@pytest.mark.parametrize(
    ("path", "offset", "text"),
    [
        ("m.gguf", 7, "m.gguf at byte 7: bad"),
        ("m.gguf", 0, "m.gguf at byte 0: bad"),
        ("m.gguf", None, "m.gguf: bad"),
        ("", None, "bad"),
    ],
)
def test_a_model_error_says_where(path: str, offset: int | None, text: str) -> None:
    error = ModelError("bad", path=path, offset=offset, hint="fetch it again")
    assert (error.path, error.offset) == (path, offset)
    assert error.detail == text
    assert str(error) == f"{text} (fetch it again)"


def test_an_errno_is_the_attribute_and_not_the_text() -> None:
    error = PeerClosed("gone", endpoint="h:1", operation="recv", errno=104, position="inside", tensor="t", bytes_done=5)
    assert (error.errno, error.operation, error.endpoint) == (104, "recv", "h:1")
    assert (error.position, error.tensor, error.bytes_done) == ("inside", "t", 5)
    assert str(error) == "gone"
