"""Debian's packages: which are missing, and installing them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from prepare.base import CannotPrepare, run, say

_APT = ("apt-get", "-q", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300")
_QUIET = {"DEBIAN_FRONTEND": "noninteractive"}

#: What the tests need that is no part of Python, by the command that shows it is there: stock peers are C++, and the
#: tree is checked as git has it.
_TOOLS = {"g++": "g++", "git": "git"}

#: A compiler for 64-bit Arm, and what runs its programs on another processor.
_ARM = ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user-static")
ARM_TOOLS = ("aarch64-linux-gnu-gcc", "qemu-aarch64-static")
"""The commands of those."""


def not_installed(packages: Sequence[str]) -> list[str]:
    """Those of ``packages`` that are not installed. Raises CannotPrepare where there is no apt."""
    if not (shutil.which("dpkg-query") and shutil.which("apt-get")):
        raise CannotPrepare("there is no apt-get here")
    command = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", *packages]
    # Its exit code is 1 when it does not know one of them, which is no error here.
    known = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [package for package in packages if f"installed {package}" not in known]


def install(packages: Sequence[str]) -> None:
    """Install ``packages``. Raises CannotPrepare, also for anybody but root."""
    if not packages:
        return
    if os.geteuid() != 0:
        raise CannotPrepare(f"only root can install what is missing: apt-get install {' '.join(packages)}")
    say(f"installing {' '.join(packages)}")
    command = [*_APT, "install", "-y", "--no-install-recommends", *packages]
    with_fresh_lists(command, what=f"installing {' '.join(packages)}")


def prepare_tools() -> None:
    """Install the compiler of the stock peers, and git. Raises CannotPrepare."""
    missing = [package for command, package in _TOOLS.items() if not shutil.which(command)]
    if missing and not shutil.which("apt-get"):
        raise CannotPrepare(f"{' and '.join(missing)} are missing and there is no apt-get to install them")
    install(missing)


def prepare_arm() -> None:
    """Install what shows that Arm's variant of the hasher is right. Raises CannotPrepare."""
    if not all(map(shutil.which, ARM_TOOLS)):
        install(not_installed(_ARM))


def prepare_disks() -> None:
    """Install what makes a file system whose files can share blocks. Raises CannotPrepare."""
    if not shutil.which("mkfs.btrfs"):
        install(not_installed(("btrfs-progs",)))


def with_fresh_lists(command: list[str], *, what: str) -> None:
    """Run what downloads packages; once more with new lists of packages if it fails, as old ones name what is gone."""
    try:
        run(command, what=what, timeout=900, env=_QUIET)
    except CannotPrepare:
        if os.geteuid() != 0:
            raise
        run([*_APT, "update"], what="apt-get update", timeout=300, env=_QUIET)
        run(command, what=what, timeout=900, env=_QUIET)
