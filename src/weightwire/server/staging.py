"""The one buffer a session uses for bytes that cannot go straight to where they belong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from weightwire.transport.memory import HostRegion

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["STAGING_BYTES", "Staging", "rows_of"]

STAGING_BYTES: Final = 1 << 20
"""Small enough to stay in a core's cache between being received and being handed on."""


class Staging:
    """`STAGING_BYTES` of memory, made when first needed and never cleared."""

    def __init__(self) -> None:
        self._view: memoryview | None = None

    def take(self, nbytes: int) -> memoryview:
        """The first ``nbytes`` bytes (at most `STAGING_BYTES`), writable, with whatever is in them."""
        if self._view is None:
            self._view = memoryview(HostRegion(STAGING_BYTES)).cast("B")
        return self._view[:nbytes]

    def release(self) -> None:
        """Give the memory back."""
        self._view = None


def rows_of(view: memoryview, nbytes: int, rows: int, stride: int) -> NDArray[Any]:
    """``view`` as ``rows`` rows of ``nbytes`` bytes, ``stride`` bytes apart: a uint8 array of that shape, no copy."""
    import numpy as np

    return np.ndarray((rows, nbytes), np.uint8, buffer=view, strides=(stride, 1))
