"""What every preparing step shares: where things are kept, running commands, locks and the words on stderr."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

#: Last lines of a failed command's output that are shown.
TAIL_LINES = 25


class CannotPrepare(Exception):
    """Something the tests want cannot be had here; the text says what went wrong."""


def cache_directory() -> Path:
    """The folder that outlives a clone: WEIGHTWIRE_TEST_CACHE, or weightwire in the user's cache folder."""
    chosen = os.environ.get("WEIGHTWIRE_TEST_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weightwire"


def everything_required() -> bool:
    """True when nothing may be skipped: in CI, or under ./test --require-all."""
    return any(
        os.environ.get(name, "").lower() not in ("", "0", "false", "no")
        for name in ("CI", "WEIGHTWIRE_TEST_REQUIRE_ALL")
    )


def say(text: str) -> None:
    """One line to the person who waits, on stderr."""
    print(f"./test: {text}", file=sys.stderr, flush=True)


def run(
    command: Sequence[str | Path],
    *,
    what: str,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
) -> str:
    """Run a command to its end and return what it printed (stdout and stderr together).

    The output goes to `log` (kept) or a temporary file, never to the terminal. The command gets a process group of
    its own, so that `timeout` seconds end its children too. Raises CannotPrepare, with the last lines of the output,
    when it fails.
    """
    merged = {**os.environ, **(env or {})}
    with contextlib.ExitStack() as stack:
        output: IO[bytes] = stack.enter_context(open(log, "w+b") if log else tempfile.TemporaryFile())  # noqa: SIM115
        try:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=merged,
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as problem:
            raise CannotPrepare(f"{what}: cannot start {command[0]}: {problem.strerror}") from problem
        try:
            code = process.wait(timeout)
            trouble = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            trouble = f"not done after {timeout:.0f} s"
        finally:
            # Also on an interrupt: nothing of it may go on building behind our back.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if trouble:
        tail = "\n    ".join(text.strip().splitlines()[-TAIL_LINES:])
        raise CannotPrepare(f"{what}: {trouble}\n    {tail}")
    return text


@contextlib.contextmanager
def locked(path: Path, *, waiting: str) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` (made when missing), so that no two runs prepare the same thing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        lock(handle, fcntl.LOCK_EX, waiting=waiting)
        yield
    finally:
        os.close(handle)


def lock(handle: int, kind: int, *, waiting: str) -> None:
    """Take (or change to) a lock of `kind` on an open file, saying so if that means waiting for another run."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"waiting for another run that uses {waiting}")
        fcntl.flock(handle, kind)


@contextlib.contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """A temporary folder beside its destination (so that a rename is atomic), removed whatever happens."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_venv(folder: Path) -> Path:
    """Make a virtual environment in `folder`, replacing what is there; returns its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    hint = " (on Debian: apt-get install python3-venv)"
    run([sys.executable, "-m", "venv", folder], what=f"making a virtual environment{hint}", timeout=300)
    return venv_python(folder)


def venv_python(folder: Path) -> Path:
    """The Python of a virtual environment."""
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str | Path, what: str, timeout: float = 900, **options: Any) -> str:
    """Run pip without questions, with a long read timeout and retries. Raises CannotPrepare."""
    base: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "5"]
    return run([*base, *arguments], what=what, timeout=timeout, **options)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as handle:
        handle.write(text)
    os.chmod(handle.name, 0o644)
    os.replace(handle.name, path)
