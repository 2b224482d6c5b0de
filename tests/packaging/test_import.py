"""What importing the package does, and does not do, each seen in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

LOOK = """
import json, logging, os, sys, threading, warnings
def libraries():
    return {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if ".so" in line}
before = libraries()
environment = []
class Watched(dict):
    def __getitem__(self, name):
        environment.append(name)
        return super().__getitem__(name)
os.environ._data = Watched(os.environ._data)
%s
print(json.dumps({
    "modules": sorted(sys.modules),
    "threads": len(os.listdir("/proc/self/task")),
    "libraries": sorted(libraries() - before),
    "handlers": len(logging.root.handlers) + len(logging.getLogger("weightwire").handlers),
    "environment": [str(name) for name in environment if b"WEIGHTWIRE" in name],
    "descriptors": len(os.listdir("/proc/self/fd")),
}))
"""


def after(statement: str) -> dict[str, Any]:
    """What a fresh process looks like after a statement."""
    command = [sys.executable, "-I", "-c", LOOK % statement]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_importing_the_package_does_nothing():
    nothing, found = after("pass"), after("import weightwire")
    assert not {"numpy", "click", "rich", "blake3"} & set(found["modules"])
    assert not [name for name in found["modules"] if name.startswith("weightwire._native.")]
    assert not [name for name in found["libraries"] if "weightwire" in name or "ibverbs" in name]
    assert found["threads"] == nothing["threads"] == 1
    assert found["handlers"] == 0
    assert found["environment"] == []
    assert found["descriptors"] == nothing["descriptors"]


def test_the_library_needs_nothing_of_the_command_line():
    found = after("from weightwire import *")
    assert "weightwire._native._stream" in found["modules"]
    assert not {"click", "rich", "weightwire.cli", "prometheus_client"} & set(found["modules"])
    assert found["threads"] == 1
    assert found["handlers"] == 0
    assert not [name for name in found["libraries"] if "ibverbs" in name]


def test_every_public_name_is_there():
    import weightwire

    for name in weightwire.__all__:
        assert getattr(weightwire, name) is not None
    assert set(weightwire.__all__) <= set(dir(weightwire))
    assert weightwire.__all__ == sorted(weightwire.__all__)
