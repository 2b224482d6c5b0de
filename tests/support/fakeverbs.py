"""The stand-in libibverbs of tests/rdma/fake: building it, and telling it what to do."""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import os
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "rdma" / "fake"
CC = os.environ.get("CC", "cc")

SUCCESS, LOC_LEN_ERR, LOC_PROT_ERR, FLUSHED, RETRY_EXC_ERR, RNR_RETRY_EXC_ERR = 0, 1, 4, 5, 12, 13
ROCE_V1, ROCE_V2 = 1, 2
DEVICE_FATAL, QP_FATAL, PORT_ERR = 8, 1, 10
HANDLES = ("contexts", "pds", "mrs", "cqs", "channels", "qps", "pinned")


@functools.cache
def cannot_build() -> str:
    """Why the stand-in cannot be built here, or nothing."""
    if shutil.which(CC) is None:
        return f"no C compiler: {CC} is not on the path"
    probe = subprocess.run(
        [CC, "-E", "-x", "c", "-"], input="#include <infiniband/verbs.h>\n", capture_output=True, text=True, check=False
    )
    return "" if probe.returncode == 0 else "no infiniband/verbs.h (on Debian: apt-get install libibverbs-dev)"


def build(folder: Path, *options: str) -> Path:
    """Build it into a folder; returns the library."""
    library = folder / "libibverbs.so.1"
    command = [CC, "-std=gnu11", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror", *options]
    command += [f"-Wl,--version-script={SOURCES / 'fake.map'}", "-Wl,-soname,libibverbs.so.1", "-o", str(library)]
    command += map(str, sorted(SOURCES.glob("*.c")))
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=110)
    return library


class FakeVerbs:
    """What the stand-in can be told, in the process that has it loaded."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._dll = ctypes.CDLL(str(library))
        self._dll.fake_get.restype = ctypes.c_long
        self._dll.fake_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._dll.fake_forge.argtypes = [ctypes.c_uint32, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint32]

    def reset(self) -> None:
        """Settings and faults as at the start."""
        self._dll.fake_reset()

    def get(self, name: str) -> int:
        """A count or setting."""
        value = int(self._dll.fake_get(name.encode()))
        assert value != -1 or name == "budget", f"the stand-in knows no {name}"
        return value

    def set(self, name: str, value: int) -> None:
        """Change a setting: devices, budget (bytes, -1 none), port_state, max_inline, stall, queue_cost (bytes),
        hold (asking a device, and changing a queue pair, take until it is 0).
        """
        assert self._dll.fake_set(name.encode(), value) == 0, f"the stand-in knows no {name}"

    def fault(self, text: str, *, after: int = 0, times: int = 0) -> None:
        """Let a call fail: "modify_qp:RTR:ETIMEDOUT", "reg_mr:EIO".

        After so many that work, so many times (0: ever after).
        """
        assert self._dll.fake_fault(text.encode(), after, times) == 0, f"the stand-in knows no fault {text}"

    def gid(self, index: int, address: str | None, kind: int = ROCE_V2) -> None:
        """Set or clear an entry of the GID table."""
        raw = bytes(16)
        if address is not None:
            parsed = ipaddress.ip_address(address)
            raw = parsed.packed if parsed.version == 6 else bytes(10) + b"\xff\xff" + parsed.packed
        assert self._dll.fake_gid(index, raw, kind) == 0

    def forge(self, number: int, *, receiving: bool, id: int, status: int = SUCCESS, nbytes: int = 0) -> None:
        """A completion that nothing caused, on the queue pair ``number``."""
        assert self._dll.fake_forge(number, receiving, id, status, nbytes) == 0

    def fail_pair(self, number: int, status: int) -> None:
        """Break a queue pair: the first SEND in flight ends with ``status``, all else is flushed."""
        assert self._dll.fake_fail_pair(number, status) == 0

    def event(self, kind: int) -> None:
        """An asynchronous event on every opened device."""
        self._dll.fake_event(kind)

    def sysfs(self, path: Path) -> None:
        """Where devices say their folder in sysfs is."""
        self._dll.fake_path(str(path).encode())

    def handles(self) -> dict[str, int]:
        """What is open, by kind; empty when nothing is."""
        return {name: count for name in HANDLES if (count := self.get(name))}
