"""csrc/verbs alone: over the stand-in libibverbs, built with sanitizers; and what takes its place without headers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.fakeverbs import CC, build, cannot_build
from support.require import do_without

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "csrc"
VERBS = [path for path in sorted((CORE / "verbs").glob("*.c")) if path.name != "none.c"]
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", f"-I{CORE}", "-pthread", "-g"]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
THREAD = ["-fsanitize=thread"]


def compile_c(folder: Path, options: list[str], sources: list[Path | str]) -> Path:
    program = folder / "program"
    command = [CC, *FLAGS, *options, "-o", str(program), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture
def buildable() -> None:
    why = cannot_build()
    if why:
        do_without("the stand-in libibverbs", why)


def can_sanitize(folder: Path, options: list[str]) -> bool:
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    command = [CC, *options, "-o", str(folder / "probe"), str(folder / "probe.c")]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return False
    return subprocess.run([str(folder / "probe")], capture_output=True, check=False).returncode == 0


@pytest.mark.usefixtures("buildable")
@pytest.mark.parametrize("options", [ADDRESS, THREAD], ids=["address", "thread"])
def test_under_sanitizers(tmp_path: Path, options: list[str]) -> None:
    if not can_sanitize(tmp_path, options):
        do_without("the sanitizer", f"{CC} cannot build, or this kernel not run, a program with {options[0]}")
    library = build(tmp_path, *options)
    beside = [path for folder in ("stream", "profile") for path in sorted((CORE / folder).glob("*.c"))]
    sources = [*VERBS, *beside, Path(__file__).with_name("verbs_driver.c")]
    program = compile_c(tmp_path, ["-O1", *options], sources)
    done = subprocess.run(
        [str(program)],
        env={**os.environ, "WEIGHTWIRE_LIBIBVERBS": str(library)},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["moving", "relief", "ends", "faults"]
    assert done.stderr == ""


def declared() -> set[str]:
    """The functions in the headers that the rest of the core and the modules may use."""
    text = "".join((CORE / "verbs" / name).read_text() for name in ("verbs.h", "link.h"))
    return set(re.findall(r"^(?:struct \w+|int|void|size_t|const char) \*?(ww_\w+)\(", text, re.MULTILINE))


def defined(path: Path, folder: Path) -> set[str]:
    subprocess.run([CC, *FLAGS, "-c", "-o", str(folder / "one.o"), str(path)], check=True, timeout=110)
    done = subprocess.run(["nm", str(folder / "one.o")], capture_output=True, text=True, check=True)
    return {line.split()[2] for line in done.stdout.splitlines() if line.split()[-2] == "T"}


def test_without_headers_every_function_is_there(tmp_path: Path) -> None:
    assert len(declared()) > 20
    assert defined(CORE / "verbs" / "none.c", tmp_path) == declared()


def test_without_headers_there_is_no_rdma(tmp_path: Path) -> None:
    (tmp_path / "ask.c").write_text(
        '#include <stdio.h>\n#include "verbs/verbs.h"\nint main(void)\n{\n'
        "    char why[256];\n    const struct ww_verbs *verbs;\n"
        "    int code = ww_verbs_open(&verbs, why, sizeof why).code;\n    puts(why);\n"
        "    return code == WW_ABSENT && !verbs ? 0 : 1;\n}\n"
    )
    program = compile_c(tmp_path, [], [CORE / "verbs" / "none.c", tmp_path / "ask.c"])
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "built without RDMA" in done.stdout


@pytest.mark.usefixtures("buildable")
def test_nothing_is_linked_to_libibverbs(tmp_path: Path) -> None:
    for path in VERBS:
        subprocess.run([CC, *FLAGS, "-O2", "-c", "-o", str(tmp_path / "one.o"), str(path)], check=True, timeout=110)
        done = subprocess.run(["nm", "-u", str(tmp_path / "one.o")], capture_output=True, text=True, check=True)
        assert "ibv_" not in done.stdout, path
