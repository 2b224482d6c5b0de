"""The C core alone, built with AddressSanitizer and UndefinedBehaviorSanitizer, run by a C driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
        pytest.skip(f"no C compiler: {CC} is not on the path")
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    built = compile_c([folder / "probe.c"], folder / "probe", *SANITIZE)
    if built.returncode:
        pytest.skip(f"{CC} has no address and undefined-behaviour sanitizers: {built.stderr.splitlines()[-1]}")


@pytest.mark.usefixtures("sanitizers")
@pytest.mark.parametrize("level", ["-O1", "-O3"])
def test_the_core_under_sanitizers(tmp_path: Path, level: str) -> None:
    sources = [*sorted((ROOT / "csrc").rglob("*.c")), Path(__file__).with_name("driver.c")]
    assert len(sources) > 1
    built = compile_c(sources, tmp_path / "driver", level, *SANITIZE)
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(tmp_path / "driver")], capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["hashing", "memory", "stream", "ends", "signals"]
    assert run.stderr == ""


def test_the_core_knows_no_python() -> None:
    for path in (ROOT / "csrc").rglob("*.[ch]"):
        text = path.read_text()
        assert "Python.h" not in text, path
        assert "ggml" not in text.lower(), path
