"""The C core alone, built with AddressSanitizer and UndefinedBehaviorSanitizer, run by a C driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.require import do_without

ROOT = Path(__file__).resolve().parents[2]
CC = os.environ.get("CC", "cc")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", "-pthread", "-g"]


def compile_c(sources: list[Path], program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [CC, *FLAGS, *options, "-o", str(program), *map(str, sources)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="module")
def sanitizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which(CC) is None:
        do_without("a C compiler", f"{CC} is not on the path")
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    built = compile_c([folder / "probe.c"], folder / "probe", *SANITIZE)
    if built.returncode:
        do_without("the address and undefined-behaviour sanitizers", f"{CC}: {built.stderr.splitlines()[-1]}")


@pytest.mark.usefixtures("sanitizers")
@pytest.mark.parametrize("level", ["-O1", "-O3"])
def test_the_core_under_sanitizers(tmp_path: Path, level: str) -> None:
    # csrc/verbs has a driver of its own: it needs the headers of libibverbs, and a stand-in for the library.
    core = [path for path in sorted((ROOT / "csrc").rglob("*.c")) if path.parent.name != "verbs"]
    sources = [*core, Path(__file__).with_name("driver.c")]
    assert len(sources) > 1
    built = compile_c(sources, tmp_path / "driver", level, *SANITIZE)
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(tmp_path / "driver")], capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["hashing", "memory", "stream", "ends", "signals", "profile"]
    assert run.stderr == ""


@pytest.mark.usefixtures("sanitizers")
def test_no_call_asks_for_more_than_the_limit(tmp_path: Path) -> None:
    core = [path for path in sorted((ROOT / "csrc").rglob("*.c")) if path.parent.name != "verbs"]
    sources = [*core, Path(__file__).with_name("limits.c")]
    wrap = "-Wl,--wrap=sendmsg,--wrap=recv,--wrap=pread"
    built = compile_c(sources, tmp_path / "limits", "-O1", *SANITIZE, "-DWW_SYSCALL_MAX=((size_t)4096)", wrap)
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(tmp_path / "limits")], capture_output=True, text=True, timeout=110, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "split\n", "")


@pytest.mark.usefixtures("sanitizers")
def test_what_is_rare(tmp_path: Path) -> None:
    core = [path for path in sorted((ROOT / "csrc").rglob("*.c")) if path.parent.name != "verbs"]
    sources = [*core, Path(__file__).with_name("rare.c")]
    wrap = "-Wl,--wrap=memcmp,--wrap=sendfile,--wrap=send,--wrap=pread,--wrap=fstat"
    built = compile_c(sources, tmp_path / "rare", "-O1", *SANITIZE, wrap)
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(tmp_path / "rare")], capture_output=True, text=True, timeout=110, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "comparing\nsending\n", "")


def test_the_core_knows_no_python() -> None:
    for path in (ROOT / "csrc").rglob("*.[ch]"):
        text = path.read_text()
        assert "Python.h" not in text, path
        assert "ggml" not in text.lower(), path
