"""The guest with soft-RoCE that RDMA is tested in: Debian's packages for it, and its kernel."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from prepare.base import CannotPrepare, run, say

_FOLDER = Path(__file__).resolve().parent.parent / "rdma"
SOFTROCE = _FOLDER / "softroce"
#: Debian packages, one a line: what softroce runs, what is seen in the guest, and the headers that RDMA is built with.
PACKAGES = tuple((_FOLDER / "packages").read_text().split())
_APT = ("apt-get", "-q", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300")
_QUIET = {"DEBIAN_FRONTEND": "noninteractive"}


def missing_packages() -> list[str]:
    """Those of PACKAGES that are not installed. Raises CannotPrepare where there can be no such guest."""
    if not (shutil.which("dpkg-query") and shutil.which("apt-get")):
        raise CannotPrepare("the guest is made of Debian's packages, and there is no apt-get here")
    if platform.machine() != "x86_64":
        raise CannotPrepare(f"the guest is an x86-64 machine, and this is {platform.machine()}")
    command = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", *PACKAGES]
    # Its exit code is 1 when it does not know one of them, which is no error here.
    known = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [package for package in PACKAGES if f"installed {package}" not in known]


def prepare_packages() -> None:
    """Install what is missing. Raises CannotPrepare, also for anybody but root."""
    missing = missing_packages()
    if not missing:
        return
    if os.geteuid() != 0:
        raise CannotPrepare(f"only root can install what is missing: apt-get install {' '.join(missing)}")
    say(f"installing {' '.join(missing)}")
    install = [*_APT, "install", "-y", "--no-install-recommends", *missing]
    _with_fresh_lists([str(part) for part in install], what="installing the guest's packages")


def prepare_kernel() -> None:
    """Have the guest's kernel and first file system in the tests' cache. Raises CannotPrepare."""
    _with_fresh_lists([str(SOFTROCE), "--prepare"], what="preparing the guest's kernel")


def _with_fresh_lists(command: list[str], *, what: str) -> None:
    """Run what downloads packages; once more with new lists of packages if it fails, as old ones name what is gone."""
    try:
        run(command, what=what, timeout=900, env=_QUIET)
    except CannotPrepare:
        if os.geteuid() != 0:
            raise
        run([*_APT, "update"], what="apt-get update", timeout=300, env=_QUIET)
        run(command, what=what, timeout=900, env=_QUIET)
