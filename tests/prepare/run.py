"""What ./test does: prepare, say what is missing, run pytest."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prepare.base import CannotPrepare, cache_directory, everything_required, locked, say
from prepare.environment import prepare_environment
from prepare.guest import prepare_kernel, prepare_packages
from prepare.packages import prepare_arm, prepare_disks, prepare_tools
from prepare.peers import peer_folder, prepare_peers
from prepare.realmodel import model_path, prepare_model

_GUEST = "the tests of RDMA in a guest"
_TOOLS = "the tests that need a C++ compiler or git"
_ARM = "the test of the hasher on an emulated Arm processor"
_DISKS = "the test of seeding where files can share blocks"

HELP = """usage: ./test [--require-all] [--prepare-only] [pytest options and paths]

  --require-all    nothing may be skipped: what cannot be had fails the tests that need it (the default when CI=true)
  --prepare-only   set everything up and stop before the tests

Everything else goes to pytest, for example: ./test tests/unit -k hello
WEIGHTWIRE_TEST_CACHE names the folder for the stock peers, the real model and the kernel of the guest that RDMA is
tested in (default: weightwire in the user's cache folder). Run by root on Debian it installs g++ and git if they are
missing, a compiler and an emulator for 64-bit Arm, btrfs-progs, and the packages that the guest needs
(tests/rdma/packages).
"""


def main(tree: Path, arguments: list[str]) -> None:
    """Prepare, then become pytest. Exit code: pytest's; 2 when the tests cannot be run at all."""
    if arguments[:1] in (["--help"], ["-h"]):
        print(HELP, end="")
        sys.exit(0)
    if "--require-all" in arguments:
        os.environ["WEIGHTWIRE_TEST_REQUIRE_ALL"] = "1"
    only_prepare = "--prepare-only" in arguments
    options = [argument for argument in arguments if argument not in ("--require-all", "--prepare-only")]
    # Neither may reach into the environments made here.
    for name in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_USER", "PIP_PREFIX"):
        os.environ.pop(name, None)
    started = time.monotonic()
    try:
        # Before the wheel, as the headers are among them.
        packaged = _prepare_packages()
        python = prepare_environment(tree)
    except CannotPrepare as problem:
        sys.exit(f"./test: cannot run the tests: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
    missing = _prepare_shared(guest=packaged)
    say(f"ready after {time.monotonic() - started:.1f} s")
    if only_prepare:
        sys.exit(1 if missing and everything_required() else 0)
    os.chdir(tree)
    sys.stdout.flush()
    os.execv(python, [str(python), "-P", "-m", "pytest", *options])


def _prepare_packages() -> bool:
    """Install the tools of the tests, and what the guest needs; False when there can be no guest."""
    try:
        prepare_tools()
    except CannotPrepare as problem:
        _say_missing(_TOOLS, str(problem))
    try:
        prepare_arm()
    except CannotPrepare as problem:
        _say_missing(_ARM, str(problem))
    try:
        prepare_disks()
    except CannotPrepare as problem:
        _say_missing(_DISKS, str(problem))
    try:
        prepare_packages()
    except CannotPrepare as problem:
        _say_missing(_GUEST, str(problem))
        return False
    return True


def _prepare_shared(*, guest: bool) -> bool:
    """Prepare what lies in the cache folder, the guest's kernel too if there can be a guest; True when something is
    missing."""
    missing = not guest
    try:
        cache_directory().mkdir(parents=True, exist_ok=True)
        with (
            ThreadPoolExecutor(1) as beside,
            locked(cache_directory() / "lock", waiting="the stock peers and the real model"),
        ):
            # It mostly waits for the network, while the peers are compiled.
            kernel = beside.submit(prepare_kernel) if guest else None
            try:
                prepare_model()
                _why_model().unlink(missing_ok=True)
            except CannotPrepare as problem:
                missing = True
                _why_model().parent.mkdir(parents=True, exist_ok=True)
                _why_model().write_text(str(problem))
                _say_missing("the tests with the real model", str(problem))
            for protocol, reason in prepare_peers().items():
                missing = True
                _say_missing(
                    f"the tests against the stock peer of protocol {protocol} ({peer_folder(protocol).name})", reason
                )
            try:
                if kernel:
                    kernel.result()
            except CannotPrepare as problem:
                missing = True
                _say_missing(_GUEST, str(problem))
    except OSError as problem:
        missing = True
        _say_missing("the tests with stock peers and the real model", f"the cache folder cannot be used: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
    return missing


def why_no_model() -> str:
    """Why the last preparing run has no real model."""
    try:
        return _why_model().read_text()
    except OSError:
        return "it was never prepared (run ./test)"


def _why_model() -> Path:
    return model_path().with_suffix(".why")


def _say_missing(what: str, reason: str) -> None:
    verdict = "FAIL, as nothing may be skipped here" if everything_required() else "are skipped"
    say(f"{what} {verdict}: {reason}")
