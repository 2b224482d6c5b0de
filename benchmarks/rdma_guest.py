"""weightwire's pair beside the stock pair over RDMA, in the soft-RoCE guest: benchmarks/rdma_guest.py [--mib N]
[--rounds N] [--mtu BYTES] [--cpus N] [--kernel PACKAGE ...].

`benchmarks/test_rdma.py` runs it too. By hand: by a Python in which weightwire is installed with RDMA, after ./test
--prepare-only. Each round pushes the same bytes with each pair in turn, client and server in processes of their own, on
a new connection: from allocating the tensors to the answer that proves the last byte arrived. Printed are the medians,
and the median of the ratios of rounds that ran side by side. Registering memory is measured beside copying it, which is
what it saves.

The guest's device is software on an emulated processor and no network card: times say nothing about one, and the ratio
is only indicative. Unless told otherwise the pairs are measured under two kernels, one guest after the other, as they
differ in what matters here: whether a SEND that was posted proceeds beside the thread that posted it (Linux 6.12, as on
a network card) or inside its call (6.1), where no sender can have more than one on its way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "tests")]

from harness.rounds import Peer, Rounds, alternate  # noqa: E402  (found through the path set above)
from harness.stock_pair import StockPeer  # noqa: E402
from harness.weightwire_pair import WeightwirePeer  # noqa: E402
from prepare import peers  # noqa: E402
from prepare.guest import SOFTROCE  # noqa: E402
from support.guest import ADDRESS  # noqa: E402

import weightwire  # noqa: E402
from weightwire._native import _verbs  # noqa: E402
from weightwire.transport.memory import HostRegion  # noqa: E402
from weightwire.transport.registration import register_rings  # noqa: E402

KERNELS = ("linux-image-6.12-amd64", "linux-image-amd64")
NOTE = "soft-RoCE under emulation is no network card: only the ratio means anything, and that little"
_TENSORS = 4
REGISTERED_MIB = (1, 16)


class RdmaPeer(WeightwirePeer):
    """weightwire's pair, on RDMA or not at all; like the stock pair's, its clock starts once it is connected."""

    mtu = 0
    """Bytes in a packet, as the last connection had it."""

    def round(self) -> float:
        with weightwire.connect(self.endpoint, transport="rdma") as connection:
            self.mtu = int(connection.transport["mtu"])
            started = time.perf_counter()
            connection.push(self._model, cache="never")
            return time.perf_counter() - started


class RegisteredPeer(RdmaPeer):
    """The same out of memory that is pinned before the clock starts, as an application would that keeps its arrays."""

    def round(self) -> float:
        arrays = {name: tensor.view() for name, tensor in self._model.tensors.items()}
        copies = {name: memoryview(bytearray(array)) for name, array in arrays.items()}
        with weightwire.connect(self.endpoint, transport="rdma") as connection:
            for copy in copies.values():
                connection.register(copy)
            started = time.perf_counter()
            connection.push(copies, cache="never")
            return time.perf_counter() - started


def measure(mib: int, rounds: int) -> dict[str, object]:
    """Inside the guest: move ``mib`` MiB with each pair, ``rounds`` times after one that does not count."""
    library = peers.peer_library(peers.FULL_PROTOCOL)
    if library is None:
        sys.exit(f"no stock peer here ({peers.why_missing(peers.FULL_PROTOCOL)})")
    nbytes = mib << 20
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".safetensors") as file:
        each = nbytes // _TENSORS
        tensors = {
            f"w{index}": {"dtype": "U8", "shape": [each], "data_offsets": [index * each, (index + 1) * each]}
            for index in range(_TENSORS)
        }
        header = json.dumps(tensors).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        file.write(os.urandom(nbytes))
        file.flush()
        ranges = [(start + index * each, each) for index in range(_TENSORS)]
        path, serve = Path(file.name), ("--host", ADDRESS, "--transport", "rdma")
        with contextlib.ExitStack() as stack:
            stock = StockPeer(library, path, ranges, host=ADDRESS)
            ours = RdmaPeer(path, serve=serve)
            registered = RegisteredPeer(path, serve=serve, name="weightwire, registered memory")
            turns: list[Peer] = [ours, stock, registered]
            for peer in turns:
                stack.callback(peer.close)
            taken = alternate(turns, nbytes, rounds)
            registration = {
                f"{size} MiB": register(ours.endpoint, size << 20, max(rounds, 3)) for size in REGISTERED_MIB
            }
            activated = stock.server_output().count("RDMA activated")
    if activated != rounds + 1:
        sys.exit(f"the stock pair was on RDMA in {activated} of {rounds + 1} rounds")
    registered_ratio = taken.ratio(registered.name, stock.name)
    return {
        "push": {
            "kernel": platform.release(),
            "mtu": ours.mtu,
            "cpus": os.cpu_count(),
            **taken.summary(ours.name),
            "registered_times_as_fast_as_stock": registered_ratio,
            "note": NOTE,
        },
        "registration": registration,
    }


def register(endpoint: str, nbytes: int, rounds: int) -> dict[str, object]:
    """`Connection.register` of so much memory that has been touched, beside one copy of it, and beside the two rings
    of a connection (the first rung of the ladder).
    """
    source, target = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    taken = Rounds(nbytes)
    with weightwire.connect(endpoint, transport="rdma") as connection:
        domain = connection._stream.domain  # type: ignore[attr-defined]

        def rings() -> float:
            memory = []

            def pin(size: int) -> _verbs.MemoryRegion:
                memory.append(HostRegion(size))
                return _verbs.MemoryRegion(domain, memory[-1])

            started = time.perf_counter()
            found = register_rings(pin)
            took = time.perf_counter() - started
            found.send.close()
            found.receive.close()
            return took

        def copy() -> float:
            started = time.perf_counter()
            target[:] = source
            return time.perf_counter() - started

        def pin_it() -> float:
            started = time.perf_counter()
            with connection.register(source) as held:
                took = time.perf_counter() - started
                if not held.pinned:
                    sys.exit(f"{nbytes} bytes were not pinned: {held.reason}")
            return took

        for turn in range(rounds + 1):
            for name, work in (("register", pin_it), ("copy", copy), ("rings of a connection", rings)):
                took = work()
                if turn:
                    taken.add(name, took)
    return {**taken.summary("register"), "note": NOTE}


def main() -> None:
    """Boot the guests and run this script in them; inside, measure."""
    parser = argparse.ArgumentParser(description=NOTE)
    parser.add_argument("--mib", type=int, default=64, help="MiB to push in a round")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--mtu", type=int, default=9000, help="the network interface's; RDMA's is the next one below")
    parser.add_argument("--cpus", type=int, default=2, help="processors of the guest")
    parser.add_argument(
        "--kernel", nargs="+", default=KERNELS, metavar="PACKAGE", help="Debian's kernels to measure under"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(options.mib, options.rounds), indent=2))
        return
    command = [sys.executable, __file__, "--inside", "--mib", str(options.mib), "--rounds", str(options.rounds)]
    guest = [str(SOFTROCE), "--mtu", str(options.mtu), "--cpus", str(options.cpus), "--timeout", "900"]
    failed = 0
    for kernel in options.kernel:
        with tempfile.TemporaryDirectory() as shared:
            there = [*guest, "--kernel", kernel, "--share", shared, "--", *command]
            failed = subprocess.run(there, check=False).returncode or failed
    sys.exit(failed)


if __name__ == "__main__":
    main()
