"""Being an ordinary user as far as files go: root may read whatever their modes say, and then no file is unreadable."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_3 = 0x20080522
#: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, capabilities(7).
_OVERRIDES = 1 << 1 | 1 << 2


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Set(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def modes_apply() -> Iterator[None]:
    """In the block, and for good in threads started in it, files' modes hold for root too (capset(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    sets = (_Set * 2)()

    def call(name: str) -> None:
        if getattr(libc, name)(ctypes.byref(_Header(_VERSION_3, 0)), sets):
            raise OSError(ctypes.get_errno(), name)

    call("capget")
    before = sets[0].effective
    sets[0].effective = before & ~_OVERRIDES
    call("capset")
    try:
        yield
    finally:
        sets[0].effective = before
        call("capset")


def plain_modes() -> tuple[str, ...]:
    """A command to start another through, so that modes hold for it if it is root (setpriv(1))."""
    if os.geteuid() != 0:
        return ()
    return ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
