"""The guest with soft-RoCE that RDMA is tested in: Debian's packages for it, and its kernel."""

from __future__ import annotations

import platform
from pathlib import Path

from prepare.base import CannotPrepare
from prepare.packages import install, not_installed, with_fresh_lists

_FOLDER = Path(__file__).resolve().parent.parent / "rdma"
SOFTROCE = _FOLDER / "softroce"
#: Debian packages, one a line: what softroce runs, what is seen in the guest, and the headers that RDMA is built with.
PACKAGES = tuple((_FOLDER / "packages").read_text().split())


def prepare_packages() -> None:
    """Install what is missing of PACKAGES. Raises CannotPrepare, also for anybody but root, and where there can be no
    such guest."""
    if platform.machine() != "x86_64":
        raise CannotPrepare(f"the guest is an x86-64 machine, and this is {platform.machine()}")
    install(not_installed(PACKAGES))


def prepare_kernel() -> None:
    """Have the guest's kernel and first file system in the tests' cache. Raises CannotPrepare."""
    with_fresh_lists([str(SOFTROCE), "--prepare"], what="preparing the guest's kernel")
