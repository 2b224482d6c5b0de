"""What a measurement depends on: processor, memory, kernel, versions. No names of hosts, people or folders."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from harness.cached import file_system


def describe() -> dict[str, object]:
    """The members of a result's ``machine_info``; what cannot be found out is absent."""
    from prepare import peers

    import weightwire

    found: dict[str, object] = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "hypervisor": _hypervisor(),
        "system": platform.system(),
        "kernel": _kernel(),
        "architecture": platform.machine(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        # Of temporary files, where models and caches are put.
        "file_system": file_system(Path(tempfile.gettempdir())),
        "python": platform.python_version(),
        "weightwire": weightwire.__version__,
        "stock_peer": f"protocol {peers.FULL_PROTOCOL}, llama-cpp-python {peers.FULL_RELEASE}",
        "iperf3": _iperf3(),
        **{name: _version(name) for name in ("numpy", "gguf", "torch")},
    }
    return {name: value for name, value in found.items() if value is not None}


def _cpu() -> str | None:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or None


def _kernel() -> str:
    """The version, without what whoever built it has put behind it."""
    found = re.match(r"[0-9.]+[0-9]", platform.release())
    return found.group() if found else "unknown"


def _hypervisor() -> bool | None:
    """Whether the processor says that it is emulated or shared (x86 only)."""
    flags = re.search(r"^flags\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return "hypervisor" in flags.group(1).split() if flags else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _iperf3() -> str | None:
    command = shutil.which("iperf3")
    if command is None:
        return None
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout.split()
    return said[1] if len(said) > 1 else None
