from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.fakeverbs import FakeVerbs

import weightwire
from weightwire import rdma
from weightwire.errors import VerbsError


def test_the_devices_of_this_machine(fake: FakeVerbs) -> None:
    fake.set("devices", 2)
    found = weightwire.rdma.devices()
    assert [device.name for device in found] == ["fake0", "fake1"]
    assert all(isinstance(device, rdma.DeviceInfo) for device in found)
    (port,) = found[0].ports
    assert (port.number, port.state, port.link_layer, port.mtu) == (1, "active", "Ethernet", 1024)
    assert {(gid.text, gid.type) for gid in port.gids} >= {("::ffff:127.0.0.1", "RoCE v2")}
    fake.set("devices", 0)
    assert rdma.devices() == []


def test_a_device_that_cannot_be_asked(fake: FakeVerbs) -> None:
    fake.fault("query_port:EIO")
    with pytest.raises(VerbsError):
        rdma.devices()


def test_the_stand_in_is_the_one_whatever_ran_before(fake_library: FakeVerbs) -> None:
    """The documents' Python asks for devices without wanting the stand-in."""
    folder = Path(__file__).parent
    before = f"{folder / 'test_docs.py'}::test_the_python_of_a_document_runs[docs/rdma.md]"
    after = f"{folder / 'test_rdma.py'}::test_the_devices_of_this_machine"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", before, after]
    done = subprocess.run(command, cwd=folder.parents[1], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_it_is_there_without_being_imported() -> None:
    code = "import sys, weightwire; before = 'weightwire.rdma' in sys.modules; print(before, weightwire.rdma.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "weightwire.rdma"]
