from collections.abc import Callable, Iterable, Sequence
from typing import Final

from typing_extensions import Buffer

from weightwire.ranges import FileRange

OFFSET: Final[int]

def variants() -> dict[str, bool]: ...
def chosen() -> str: ...
def choose(name: str) -> None: ...
def fnv1a64(data: Buffer, start: int = ...) -> int: ...
def read_fnv1a64(fd: int, target: Buffer, offset: int, start: int = ...) -> tuple[int, int]: ...
def fnv1a64_payloads(
    payloads: Iterable[Buffer | FileRange],
    check: Callable[[], object] | None = None,
    plain: bool = False,
    starts: Sequence[int] | None = None,
) -> list[int]: ...
