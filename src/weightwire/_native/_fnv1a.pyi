from collections.abc import Callable, Iterable
from typing import Final

from typing_extensions import Buffer

from weightwire.ranges import FileRange

OFFSET: Final[int]

def fnv1a64(data: Buffer, start: int = ...) -> int: ...
def fnv1a64_payloads(
    payloads: Iterable[Buffer | FileRange], check: Callable[[], object] | None = None
) -> list[int]: ...
