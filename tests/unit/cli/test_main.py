"""The command itself: help, version, exit codes by error, and no traceback unless asked for."""

from __future__ import annotations

import errno
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import weightwire
from weightwire import client, errors
from weightwire.cli import main
from weightwire.cli import root as root_module
from weightwire.cli.failures import Failure, as_failure
from weightwire.cli.output import printable
from weightwire.cli.root import root

pytestmark = pytest.mark.timeout(120)

VERBS = ("serve", "push", "hash", "info", "demo", "seed", "cache", "warm", "bench")


def test_version(invoke) -> None:
    assert invoke("--version").out == f"weightwire {weightwire.__version__}\n"


@pytest.mark.parametrize("verb", [(), *((verb,) for verb in VERBS)])
def test_help(invoke, verb: tuple[str, ...]) -> None:
    for option in ("--help", "-h"):
        ran = invoke(*verb, option)
        assert ran.code == 0
        assert ran.out.startswith(f"Usage: {' '.join(('weightwire', *verb))} ")
        assert "lifeline" not in ran.out


def test_without_a_verb_it_helps_and_fails(invoke) -> None:
    ran = invoke()
    assert ran.code == 2
    assert ran.out == ""
    assert all(verb in ran.err for verb in VERBS)
    ran.failed(2, "a verb is missing", "weightwire VERB --help")
    ran = invoke("cache").failed(2, "a verb is missing", "weightwire cache VERB --help")
    assert all(verb in ran.err for verb in ("list", "verify", "prune", "stat"))
    assert ran.out == ""


@pytest.mark.parametrize(
    "words",
    [("seed", "m", "--threads"), ("push", "m", "h:1", "--threads"), ("serve", "--port"), ("serve", "--metrics-port"),
     ("bench", "h:1", "--rounds"), ("cache", "verify", "--threads")],
)  # fmt: skip
def test_what_is_no_whole_number(invoke, words: tuple[str, ...]) -> None:
    for text in ("1e3", "", "four", "1.5"):
        invoke(*words, text).failed(2, words[-1], f"{text!r} is not a whole number")
    invoke(*words, "99999").failed(2, words[-1], "99999 is not in the range")


def every_verb() -> Iterator[click.Command]:
    """The verbs, and those of groups in the groups' place."""
    for verb in root.commands.values():
        yield from verb.commands.values() if isinstance(verb, click.Group) else [verb]


def test_every_verb_is_there_and_reports_as_json() -> None:
    assert set(root.commands) == set(VERBS)
    for verb in every_verb():
        assert "--json" in {name for parameter in verb.params for name in parameter.opts}


def test_every_option_and_variable_is_documented(request: pytest.FixtureRequest) -> None:
    text = (request.config.rootpath / "docs" / "configuration.md").read_text()
    for verb in every_verb():
        assert re.search(rf"weightwire ([a-z]+ )?{verb.name}", text)
        for parameter in verb.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert f"`{max(parameter.opts, key=len)}" in text, parameter.opts
    sources = list((request.config.rootpath / "src" / "weightwire").glob("c*/*.py"))
    sources.append(request.config.rootpath / "src" / "weightwire" / "config.py")
    variables = {name for path in sources for name in re.findall(r'"(WEIGHTWIRE_[A-Z_]+[A-Z])"', path.read_text())}
    assert len(variables) >= 11
    assert not [name for name in variables if f"`{name}`" not in text]


CASES = [
    (errors.ConfigError("x"), 2, ()),
    (errors.ModelError("x", path="m.gguf", offset=7), 1, ("path", "offset")),
    (errors.ProtocolError("x"), 1, ()),
    (errors.VersionError("x", ours="1.0 to 8.0", theirs="99.0"), 1, ("ours", "theirs")),
    (errors.CacheError("x", path="/cache", errno=errno.ENOSPC), 1, ("path", "errno")),
    (errors.CacheError("x", path="/cache", errno=errno.EROFS), 3, ("path", "errno")),
    (errors.CacheDirectoryError("x", path="/cache", errno=errno.ENOSPC), 3, ("path", "errno")),
    (errors.CacheUnavailable("x", endpoint="h:1"), 3, ("endpoint",)),
    (errors.IntegrityError("x", name="t", expected="00", actual="01"), 4, ("name", "expected", "actual")),
    (errors.AllocationError("x", nbytes=5), 1, ("nbytes",)),
    (
        errors.TransferTimeout("x", phase="send", elapsed=3.0, tensor="t", bytes_done=4),
        1,
        ("phase", "elapsed", "tensor"),
    ),
    (errors.ServerBusy("x", phase="hello"), 1, ("phase",)),
    (errors.TransportError("x", endpoint="h:1", operation="connect", errno=errno.EPIPE), 1, ("endpoint", "errno")),
    (errors.PeerClosed("x", tensor="t", bytes_done=4, position="inside"), 1, ("tensor", "bytes_done", "position")),
    (errors.VerbsError("x", operation="ibv_open_device", errno=errno.EIO), 1, ("operation", "errno")),
    (errors.RegistrationError("x", errno=errno.ENOMEM), 1, ("operation", "errno")),
    (errors.CompletionError("x", status=12, vendor_err=0x81), 1, ("status", "vendor_err")),
    (errors.RdmaUnavailable("x", reason="no device"), 1, ("reason",)),
    (errors.WeightwireError("x"), 1, ()),
    (MemoryError(), 3, ()),
    (PermissionError(errno.EACCES, "Permission denied", "/there"), 3, ()),
    (BrokenPipeError(errno.EPIPE, "Broken pipe"), 3, ()),
    (RuntimeError("a defect"), 1, ()),
]


@pytest.mark.parametrize(("error", "code", "facts"), CASES, ids=lambda value: type(value).__name__)
def test_each_error_has_its_exit_code_and_its_facts(
    invoke, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, facts: tuple[str, ...]
) -> None:
    def connect(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(client, "connect", connect)
    ran = invoke("info", "host:1", "--json").failed(code)
    told = ran.json["error"]
    assert set(told) >= {"type", "detail", "hint", "exit_code", *facts}
    assert told["exit_code"] == code
    assert told["type"] == ("InternalError" if isinstance(error, RuntimeError) else type(error).__name__)
    for fact in facts:
        assert told[fact] == getattr(error, fact)


SEGMENT = "/lib/blake3.so: failed to map segment from shared object"
TLS = "/lib/x.so: cannot allocate memory in static TLS block"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "not enough memory"),
        (ImportError(SEGMENT), SEGMENT),
        (ImportError(f"PLEASE READ THIS\n\nOriginal error was: {SEGMENT}\n"), f"(Original error was: {SEGMENT})"),
        (ImportError("libm.so: cannot create shared object descriptor: Cannot allocate memory"), "libm.so"),
        (LookupError("unknown encoding: idna"), "unknown encoding: idna"),
    ],
)
def test_memory_that_is_short_is_no_defect(
    invoke, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def connect(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(client, "connect", connect)
    ran = invoke("info", "host:1", "--json").failed(3, "not enough memory", words, "ulimit -v")
    assert "defect" not in ran.err
    assert ran.json["error"]["type"] == "MemoryError"


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'x' from 'y'"),
        ImportError(TLS),
        ImportError(f"{SEGMENT}: Operation not permitted"),
        LookupError("unknown tensor"),
        KeyError("unknown encoding"),
    ],
)
def test_other_errors_of_these_kinds_are_not_about_memory(error: Exception) -> None:
    assert as_failure(error).kind == "InternalError"


@pytest.mark.parametrize("raised", [f"ImportError({SEGMENT!r})", "MemoryError()"])
def test_memory_that_is_too_short_for_the_verbs_to_be_loaded(raised: str) -> None:
    program = f"""
import sys
class Short:
    def find_spec(self, name, path=None, target=None):
        if name == "weightwire.cli.root":
            raise {raised}
sys.meta_path.insert(0, Short())
from weightwire.cli import main
main()
"""
    ran = subprocess.run([sys.executable, "-c", program, "info", "host:1"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (3, "")
    error, hint = ran.stderr.splitlines()
    assert error.startswith("weightwire: error: this machine has not enough memory")
    assert hint.startswith("weightwire: hint: ")


def test_every_class_of_error_is_covered() -> None:
    covered = {type(error).__name__ for error, _, _ in CASES}
    assert set(errors.__all__) <= covered


def test_the_hint_has_a_line_of_its_own_and_text_cannot_break_lines(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> None:
        raise errors.TransportError("first\nsecond \x1b[2J", hint="do\nthis")

    monkeypatch.setattr(client, "connect", connect)
    ran = invoke("info", "host:1")
    assert ran.err == "weightwire: error: first\\nsecond \\x1b[2J\nweightwire: hint: do\\nthis\n"
    assert ran.out == ""


@pytest.mark.parametrize("name", ["m\n.gguf", "a  b.gguf", " m.gguf", "m\t\x1b.gguf"])
@pytest.mark.parametrize("verb", ["info", "hash"])
def test_a_path_is_shown_in_an_error_as_in_a_result(invoke, tmp_path: Path, verb: str, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"GGUF")
    invoke(verb, str(path)).failed(2, f"weightwire: error: {printable(str(path))} at byte ")
    path.unlink()
    invoke(verb, str(path)).failed(2, f"weightwire: error: {printable(str(path))}: ")


def test_a_logged_message_is_one_line(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> None:
        logging.getLogger("weightwire.client").warning("%s: cannot be kept", "m\n\x1b  .gguf")
        raise errors.TransportError("x")

    monkeypatch.setattr(client, "connect", connect)
    first, *_ = invoke("info", "host:1").err.splitlines()
    assert first.endswith("WARNING weightwire.client: m\\n\\x1b  .gguf: cannot be kept")


def test_a_defect_in_many_lines_is_told_in_one() -> None:
    assert as_failure(RuntimeError("a\n  defect")).detail == "internal error: RuntimeError: a defect"


def test_a_traceback_only_when_asked_for(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(client, "connect", connect)
    assert "WEIGHTWIRE_DEBUG=1" in invoke("info", "host:1").failed(1, "internal error: RuntimeError: a defect").err
    ran = invoke("info", "host:1", WEIGHTWIRE_DEBUG="1")
    assert ran.code == 1
    assert "Traceback" in ran.err
    assert "in connect" in ran.err


def test_ctrl_c(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "connect", connect)
    ran = invoke("info", "host:1", "--json")
    assert (ran.code, ran.out, ran.err) == (130, "", "weightwire: interrupted\n")


def test_a_failure_is_not_an_oserror_and_stays_itself() -> None:
    failure = Failure(ValueError("x"), 3)
    assert as_failure(failure) is failure
    assert not isinstance(failure, OSError)


def test_starting_up_loads_neither_numpy_nor_the_transport() -> None:
    code = "import sys, weightwire.cli; print([m for m in ('numpy', 'rich', 'weightwire._native') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_a_verb_leaves_logging_as_it_was(invoke) -> None:
    logger = logging.getLogger("weightwire")
    before = logger.level, logger.propagate, logger.handlers[:]
    assert invoke("hash", "missing.gguf", WEIGHTWIRE_LOG="debug").code == 2
    assert invoke("serve", "--port", "0", "--cache", "/proc/weightwire").code == 3
    assert (logger.level, logger.propagate, logger.handlers) == before


# Interrupted before there is anything that could catch it.


@pytest.mark.parametrize("module", ["click", "weightwire.cli.output", "weightwire.cli.demo"])
def test_ctrl_c_while_it_starts(module: str) -> None:
    code = f"""
import os, signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
from weightwire.cli import main
sys.argv[1:] = ["--version"]
main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "weightwire: interrupted\n")


def test_ctrl_c_again_while_the_first_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        raise KeyboardInterrupt

    monkeypatch.setattr(root_module, "root", interrupted)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130


def test_ctrl_c_once_the_verb_is_done() -> None:
    """Modules are torn down when the interpreter has given the signals back to the system already."""
    code = """
import os, signal, sys
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)
last = Last()
from weightwire.cli import main
sys.argv[1:] = ["--version"]
main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert weightwire.__version__ in ran.stdout
