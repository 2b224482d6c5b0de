"""What is in the wheel and the sdist, and that each installs what the other holds."""

from __future__ import annotations

import email
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from prepare.environment import venv_folder, verbs_setting
from support.require import do_without

NATIVE = ("_base", "_fnv1a", "_link", "_memory", "_profile", "_stream", "_verbs")


def names_in(wheel: Path) -> set[str]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_one_wheel_for_every_python(wheel):
    name, _, python, abi, platform = wheel.stem.split("-")
    assert (name, python, abi) == ("weightwire", "cp311", "abi3")
    assert platform.startswith(("linux", "manylinux"))


def test_only_the_stable_interface_is_used(wheel):
    done = subprocess.run(
        [sys.executable, "-m", "abi3audit", "--strict", "--report", str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A report that looked at nothing would pass too.
    for name in NATIVE:
        assert f"{name}.abi3.so" in done.stdout


def test_it_holds_modules_stubs_and_no_sources(wheel, tree):
    names = names_in(wheel)
    for name in NATIVE:
        assert f"weightwire/_native/{name}.abi3.so" in names
        assert f"weightwire/_native/{name}.pyi" in names
    assert {name for name in names if name.endswith(".so")} == {f"weightwire/_native/{name}.abi3.so" for name in NATIVE}
    assert "weightwire/py.typed" in names
    assert not {name for name in names if name.endswith((".pyx", ".pxd", ".c", ".h", ".cpp", ".pyc"))}
    python = {str(path.relative_to(tree / "src")) for path in (tree / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == python
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"weightwire"}


def test_it_has_rdma(wheel):
    """What `csrc/verbs/none.c` says, which is built in its place, is in none of the modules that could."""
    if verbs_setting() != "on":
        do_without("RDMA in the wheel", "no program can be linked with libibverbs (on Debian: libibverbs-dev)")
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(f"weightwire/_native/{name}.abi3.so") for name in ("_link", "_verbs")}
    for name, content in found.items():
        assert b"the headers of libibverbs were missing" not in content, name
    assert b"libibverbs.so.1" in found["_verbs"]


def test_its_metadata(wheel, tree):
    with zipfile.ZipFile(wheel) as archive:
        (found,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(found))
        scripts = archive.read(found.replace("METADATA", "entry_points.txt")).decode()
        licences = [name for name in archive.namelist() if ".dist-info/licenses/" in name]
    assert metadata["Name"] == "weightwire"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_payload().strip() == (tree / "README.md").read_text().strip()
    runtime = {value for value in metadata.get_all("Requires-Dist", []) if "extra ==" not in value}
    assert {value.split(">")[0].split(";")[0].strip() for value in runtime} == {"numpy", "click", "rich", "blake3"}
    extras = [
        value for value in metadata.get_all("Requires-Dist", []) if "extra == 'metrics'" in value.replace('"', "'")
    ]
    assert [value.split(";")[0].strip() for value in extras] == ["prometheus_client"]
    assert "weightwire = weightwire.cli:main" in scripts.replace("=", " = ").replace("  ", " ")
    assert len(licences) == 1


def test_what_is_installed_is_the_wheel(wheel, tree):
    """The tests must not run against the source folder, in which a forgotten file of the wheel would not be missed."""
    if Path(sys.prefix) != venv_folder(tree):
        do_without("an environment made by ./test", f"these tests run in {sys.prefix}")
    import weightwire

    assert Path(sys.prefix) in Path(weightwire.__file__).parents
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(names_in(wheel)):
            if name.startswith("weightwire/"):
                installed = Path(weightwire.__file__).parent.parent / name
                assert installed.read_bytes() == archive.read(name), name


def test_the_sdist_is_clean(sdist):
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    top = sdist.name.removesuffix(".tar.gz")
    names = {member.name.removeprefix(f"{top}/") for member in members if member.isfile()}
    assert {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "PKG-INFO", "test", ".ci/run"} <= names
    assert any(name.startswith("csrc/") and name.endswith(".c") for name in names)
    assert "src/weightwire/_native/_stream.pyx" in names
    assert "tests/conftest.py" in names
    assert not {name for name in names if name.startswith((".venv/", "build/", "dist/", ".git/"))}
    assert not {name for name in names if name.endswith((".so", ".pyc", ".gguf", ".whl"))}
    executable = {member.name.removeprefix(f"{top}/") for member in members if member.mode & stat.S_IXUSR}
    assert {"test", ".ci/run"} <= executable


def test_a_wheel_built_from_the_sdist_is_the_same(wheel, wheel_from_sdist):
    assert wheel_from_sdist.name == wheel.name
    assert names_in(wheel_from_sdist) == names_in(wheel)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(wheel_from_sdist) as other:
        for name in sorted(names_in(wheel)):
            if name.endswith((".py", ".pyi", "py.typed")):
                assert one.read(name) == other.read(name), name
