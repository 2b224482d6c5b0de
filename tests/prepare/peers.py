"""The stock peers: ggml-rpc servers and clients as upstream released them, one for each protocol the tests speak.

The newest is a whole llama-cpp-python, built from its sdist in a virtual environment of its own (so that it can load
a model too). The older ones are only the four ggml libraries that the RPC server and client need, built from the
sources inside the older sdists.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from prepare.base import (
    CannotPrepare,
    cache_directory,
    make_venv,
    pip,
    run,
    say,
    scratch,
    venv_python,
    write_atomically,
)
from prepare.smoke import smoke

PACKAGE = "llama-cpp-python"
FULL_PROTOCOL, FULL_RELEASE = "7.0.0", "0.3.36"
# Not for this machine's processor alone: the guest in which RDMA is tested has another one.
FULL_CMAKE_ARGS = "-DGGML_RPC=ON -DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF"
#: protocol -> release whose sdist holds it
OLDER = {"2.0.0": "0.3.16", "3.6.1": "0.3.20", "4.0.0": "0.3.28", "5.0.0": "0.3.35"}
PROTOCOLS = (*OLDER, FULL_PROTOCOL)
#: Those that can do RDMA, if they are built where programs can be linked against libibverbs.
WITH_RDMA = ("4.0.0", "5.0.0", FULL_PROTOCOL)

# Only storing and fetching is wanted of the old ones, so what makes them compute fast (and compile slowly) is left out.
_OLDER_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DGGML_RPC=ON",
    "-DGGML_RPC_RDMA=OFF",
    "-DGGML_NATIVE=OFF",
    "-DGGML_OPENMP=OFF",
    "-DGGML_LLAMAFILE=OFF",
    "-DGGML_CPU_REPACK=OFF",
    "-DGGML_CCACHE=OFF",
)
# The libraries' own project file wants its neighbours for installing; as a part of another project it does not.
_OLDER_PROJECT = """cmake_minimum_required(VERSION 3.21)
project(peer C CXX ASM)
add_subdirectory(${GGML_SOURCE} ggml)
"""


def peers_directory() -> Path:
    """Where the peers are kept between runs."""
    return cache_directory() / "peers"


def peer_folder(protocol: str) -> Path:
    """The folder of one peer; for the newest it is a virtual environment."""
    if protocol == FULL_PROTOCOL:
        return peers_directory() / f"{PACKAGE}-{FULL_RELEASE}"
    return peers_directory() / f"ggml-{OLDER[protocol]}"


def peer_python() -> Path:
    """The Python of the newest peer, in which llama_cpp can be imported."""
    return venv_python(peer_folder(FULL_PROTOCOL))


def peer_library(protocol: str) -> Path | None:
    """The folder with libggml-rpc.so of one peer, or None when it is not (wholly) there."""
    folder = peer_folder(protocol)
    pattern = "lib/python3.*/site-packages/llama_cpp/lib" if protocol == FULL_PROTOCOL else "lib"
    found = [path for path in folder.glob(pattern) if (path / "libggml-rpc.so").exists()]
    return found[0] if found and (folder / ".complete").is_file() else None


def why_missing(protocol: str) -> str:
    """Why the last preparing run could not make this peer."""
    try:
        return _why(protocol).read_text()
    except OSError:
        return "it was never prepared (run ./test)"


def _why(protocol: str) -> Path:
    return peers_directory() / f"{peer_folder(protocol).name}.why"


def prepare_peers() -> dict[str, str]:
    """Make every peer that is missing or does not run. Returns protocol -> reason for those that could not be made."""
    peers_directory().mkdir(parents=True, exist_ok=True)
    missing: dict[str, str] = {}
    tools: dict[str, Path] = {}
    with scratch(peers_directory(), "tools") as folder:
        for protocol in PROTOCOLS:
            try:
                _prepare(protocol, folder, tools)
                _why(protocol).unlink(missing_ok=True)
            except CannotPrepare as problem:
                missing[protocol] = str(problem)
                write_atomically(_why(protocol), str(problem))
    return missing


def _prepare(protocol: str, tools_folder: Path, tools: dict[str, Path]) -> None:
    if _sound(protocol):
        return
    if not shutil.which("c++") and not shutil.which("g++"):
        raise CannotPrepare("no C++ compiler (on Debian: apt-get install g++)")
    if protocol == FULL_PROTOCOL:
        _build_full()
    else:
        if not tools:
            python = make_venv(tools_folder / "venv")
            pip(python, "install", "cmake", "ninja", what="installing cmake and ninja")
            tools["bin"] = python.parent
        _build_older(protocol, tools["bin"])
    trouble = _trouble(protocol)
    if trouble:
        raise CannotPrepare(f"built, but {trouble}")


def _sound(protocol: str) -> bool:
    """True when the peer is there, of this recipe, and runs."""
    folder = peer_folder(protocol)
    if not folder.exists():
        return False
    trouble = "of another recipe or half built" if _recorded(folder) != _recipe(protocol) else _trouble(protocol)
    if trouble:
        say(f"the stock peer {folder.name} is {trouble}: building it again")
    return not trouble


def _recorded(folder: Path) -> str:
    try:
        return (folder / ".complete").read_text()
    except OSError:
        return ""


def _recipe(protocol: str) -> str:
    if protocol == FULL_PROTOCOL:
        return f"{PACKAGE} {FULL_RELEASE} {FULL_CMAKE_ARGS} {'with' if can_link_verbs() else 'without'} verbs\n"
    return f"{PACKAGE} {OLDER[protocol]} {' '.join(_older_options(protocol))}\n"


def _trouble(protocol: str) -> str | None:
    library = peer_library(protocol)
    if library is None:
        return "not complete"
    if protocol == FULL_PROTOCOL:
        check = "import llama_cpp, numpy, sys; sys.exit(not llama_cpp.llama_supports_rpc())"
        try:
            run([peer_python(), "-c", check], what="importing llama_cpp", timeout=120)
        except CannotPrepare as problem:
            return f"broken ({problem})"
    trouble = smoke(library, protocol)
    return f"not running ({trouble})" if trouble else None


@functools.cache
def can_link_verbs() -> bool:
    """True when programs can be linked against libibverbs here; the newest peer is then built with RDMA."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if not compiler:
        return False
    command = [compiler, "-x", "c++", "-", "-libverbs", "-o", "/dev/null"]
    program = b"#include <infiniband/verbs.h>\nint main() { return 0; }\n"
    return subprocess.run(command, input=program, capture_output=True, check=False).returncode == 0


def _older_options(protocol: str) -> tuple[str, ...]:
    if protocol not in WITH_RDMA or not can_link_verbs():
        return _OLDER_OPTIONS
    return (*_OLDER_OPTIONS, "-DGGML_RPC_RDMA=ON")


def _build_full() -> None:
    say(f"building {PACKAGE} {FULL_RELEASE} from its sdist (about five minutes on two cores, once)")
    folder = peer_folder(FULL_PROTOCOL)
    # A virtual environment cannot be moved, so it is made where it stays and only the marker says that it is whole.
    python = make_venv(folder)
    pip(
        python,
        "install",
        # What pip kept of an earlier build may be of other options, which it does not look at.
        "--no-cache-dir",
        "--no-binary",
        PACKAGE,
        f"{PACKAGE}=={FULL_RELEASE}",
        "numpy",
        what=f"building {PACKAGE} {FULL_RELEASE}",
        timeout=3600,
        env={"CMAKE_ARGS": FULL_CMAKE_ARGS},
        log=peers_directory() / f"{folder.name}.log",
    )
    write_atomically(folder / ".complete", _recipe(FULL_PROTOCOL))


def _build_older(protocol: str, tools: Path) -> None:
    release, folder = OLDER[protocol], peer_folder(protocol)
    say(f"building the ggml libraries of {PACKAGE} {release} (protocol {protocol}, under a minute, once)")
    with scratch(peers_directory(), folder.name) as work:
        source = _unpack(_sdist(release, tools / "python", work), work / "source")
        project, build, made = work / "project", work / "build", work / "made"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(_OLDER_PROJECT)
        log = peers_directory() / f"{folder.name}.log"
        path = {"PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
        output = f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={made / 'lib'}"
        configure: list[str | Path] = [
            tools / "cmake",
            "-S",
            project,
            "-B",
            build,
            "-G",
            "Ninja",
            f"-DGGML_SOURCE={source}",
            output,
            *_older_options(protocol),
        ]
        run(configure, what=f"configuring ggml of {release}", timeout=300, env=path, log=log)
        compile_: list[str | Path] = [
            tools / "cmake",
            "--build",
            build,
            "--target",
            "ggml",
            "ggml-base",
            "ggml-cpu",
            "ggml-rpc",
        ]
        run(compile_, what=f"compiling ggml of {release}", timeout=1800, env=path, log=log)
        (made / ".complete").write_text(_recipe(protocol))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)


def _sdist(release: str, python: Path, work: Path) -> Path:
    """The sdist: one put into the cache's sdist folder by hand, or downloaded for this build alone."""
    name = f"{PACKAGE.replace('-', '_')}-{release}.tar.gz"
    kept = cache_directory() / "sdist" / name
    if kept.is_file():
        return kept
    wanted: list[str | Path] = ["--no-deps", "--no-binary", PACKAGE, "--dest", work, f"{PACKAGE}=={release}"]
    pip(python, "download", *wanted, what=f"downloading the sdist of {PACKAGE} {release}")
    return work / name


def _unpack(archive: Path, destination: Path) -> Path:
    """Unpack only the ggml folder of the sdist; returns it."""
    try:
        with tarfile.open(archive) as sdist:
            members = [member for member in sdist if "/vendor/llama.cpp/ggml/" in member.name]
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            sdist.extractall(destination, members, **safe)  # type: ignore[arg-type]
    except (OSError, tarfile.TarError, EOFError) as problem:
        raise CannotPrepare(f"{archive.name} cannot be unpacked: {problem}") from problem
    found = list(destination.glob("*/vendor/llama.cpp/ggml"))
    if not found:
        raise CannotPrepare(f"{archive.name} holds no ggml sources")
    return found[0]
