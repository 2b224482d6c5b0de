"""csrc/fnv1a alone: every variant that this CPU offers, built with sanitizers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from prepare.packages import ARM_TOOLS
from support.require import do_without

from weightwire import cpu_features

ROOT = Path(__file__).resolve().parents[2]
CC = os.environ.get("CC", "cc")
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", "-pthread", "-g"]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
THREAD = ["-fsanitize=thread"]
SOURCES = [*sorted((ROOT / "csrc" / "fnv1a").glob("*.c")), Path(__file__).with_name("hash_driver.c")]


def can_run(folder: Path, options: list[str]) -> bool:
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    command = [CC, *options, "-o", str(folder / "probe"), str(folder / "probe.c")]
    try:
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return False
    except FileNotFoundError:
        return False
    return subprocess.run([str(folder / "probe")], capture_output=True, check=False).returncode == 0


def compile_c(sources: list[Path], options: list[str], program: Path, compiler: str = CC) -> None:
    command = [compiler, *FLAGS, *options, "-o", str(program), *map(str, sources)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert built.returncode == 0, built.stderr


@pytest.mark.parametrize(
    "options",
    [["-O3"], ["-O1", *ADDRESS]],
    ids=["O3", "O1-address"],
)
def test_every_variant(tmp_path: Path, options: list[str]) -> None:
    if not can_run(tmp_path, options):
        do_without("a C compiler and its sanitizers", f"{CC} cannot build, or this kernel not run, with {options}")
    compile_c(SOURCES, options, tmp_path / "driver")
    run = subprocess.run([str(tmp_path / "driver")], capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert tuple(run.stdout.split()) == cpu_features().offered


@pytest.mark.parametrize("level", ["-O1", "-O3"])
def test_the_variant_of_arm_on_an_emulated_one(tmp_path: Path, level: str) -> None:
    """The same program as in `test_every_variant`, for the other processor there are wheels for."""
    compiler, emulator = ARM_TOOLS
    for tool in ARM_TOOLS:
        if shutil.which(tool) is None:
            do_without("an emulated 64-bit Arm processor", f"{tool} is not on the path")
    compile_c(SOURCES, [level, "-static"], tmp_path / "driver", compiler)
    command = [emulator, str(tmp_path / "driver")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split() == ["neon", "plain"]


def test_threads_that_hash_first_at_once(tmp_path: Path) -> None:
    if not can_run(tmp_path, THREAD):
        do_without("the thread sanitizer", f"{CC} cannot build, or this kernel not run, a program with {THREAD}")
    compile_c(SOURCES, ["-O1", *THREAD], tmp_path / "driver")
    run = subprocess.run([str(tmp_path / "driver"), "tables"], capture_output=True, text=True, timeout=110, check=False)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64's instructions")
def test_only_the_functions_of_a_variant_use_its_instructions(tmp_path: Path) -> None:
    """The library is for every x86-64: what asks the CPU, and what runs before, must not need more."""
    if not can_run(tmp_path, []):
        do_without("a C compiler", CC)
    common = [path for path in SOURCES if path.name in ("dispatch.c", "many.c", "plain.c", "sse2.c", "weights.c")]
    assert len(common) == 5
    for path in common:
        command = [CC, *FLAGS, "-O3", "-S", "-o", "-", str(path)]
        assembly = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True).stdout
        assert "%ymm" not in assembly
        assert "%zmm" not in assembly
    for name, register in (("avx2.c", "%ymm"), ("avx512.c", "%zmm")):
        path = ROOT / "csrc" / "fnv1a" / name
        command = [CC, *FLAGS, "-O3", "-S", "-o", "-", str(path)]
        assembly = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True).stdout
        assert register in assembly
        start = assembly.index("\noffered:")
        offered = assembly[start : assembly.index(".cfi_endproc", start)]
        assert "%xmm" not in offered
        assert register not in offered
