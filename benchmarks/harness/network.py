"""Where a client and its servers run: on loopback, or in network namespaces joined by shaped veth pairs.

The namespaces have no names. Each is held by a process that ends when this one does, however that is: with it go the
namespace, the addresses and the veth pairs, so nothing can be left behind, and any number of runs do not meet.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

RATE: Final = 2_500_000_000
"""Bits per second each way: the Ethernet of recent desktop machines."""

_BURST: Final = 1 << 20
"""Bytes that may leave at once: more than one timer tick of RATE (0.3 MB at 1000 Hz), and 0.1 % of a GiB."""

_QUEUE: Final = 16 << 20
"""Bytes that may wait for their turn: above what a sender's socket buffer holds, so that nothing is dropped."""

# Addresses set aside for benchmarks between two networks (RFC 2544, appendix C).
_PREFIX: Final = "198.18.0."
_EACH: Final = 4
"""Addresses of a link: two ends, the network's own and the one for all."""

_USER: Final = ("--user", "--preserve-credentials")
_SECONDS: Final = 30


class CannotShape(Exception):
    """There can be no such network here; the text says why."""


@dataclass(frozen=True)
class Network:
    """How commands are started at either end of a link, the address servers listen on, and the client's."""

    name: str = "loopback"
    host: str = "127.0.0.1"
    at_server: tuple[str, ...] = ()
    at_client: tuple[str, ...] = ()
    client: str = "127.0.0.1"


LOOPBACK: Final = Network()


@contextlib.contextmanager
def shaped_network(rate: int = RATE) -> Iterator[Network]:
    """Two namespaces joined by a veth pair of ``rate`` bits per second each way; gone with the block.

    Raises as `shaped_networks` does.
    """
    with shaped_networks(1, rate) as (network,):
        yield network


@contextlib.contextmanager
def shaped_networks(count: int, rate: int = RATE) -> Iterator[tuple[Network, ...]]:
    """A namespace for a client and one for each of ``count`` servers, each of which is joined to the client's by a veth
    pair of its own, of ``rate`` bits per second each way; gone with the block.

    One network for each server; the client's end is the same namespace in all. Raises CannotShape where this user, or
    this kernel, may not. What was started in the namespaces keeps them until it ends.
    """
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(_namespace([]))
        inside = _inside(client, *_USER) if _mapped(client) else []
        at_client = _entering(client)
        _run(at_client, "ip", "link", "set", "lo", "up")
        networks = []
        for number in range(count):
            server = stack.enter_context(_namespace(inside))
            at_server = _entering(server)
            device = f"ww{number}"
            near, far = (f"{_PREFIX}{_EACH * number + end}" for end in (1, 2))
            _run(at_server, "ip", "link", "set", "lo", "up")
            _run(at_server, "ip", "link", "add", device, "type", "veth", "peer", "name", device, "netns", str(client))
            for enter, address in ((at_server, near), (at_client, far)):
                _run(enter, "ip", "address", "add", f"{address}/30", "dev", device)
                _run(enter, "ip", "link", "set", device, "up")
                shape = ["rate", f"{rate}bit", "burst", str(_BURST), "limit", str(_QUEUE)]
                _run(enter, "tc", "qdisc", "add", "dev", device, "root", "tbf", *shape)
            networks.append(Network(f"{rate / 1e9:g} Gbit/s", near, at_server, at_client, far))
        yield tuple(networks)


@contextlib.contextmanager
def _namespace(enter: list[str]) -> Iterator[int]:
    """A process in a network namespace of its own; its id. Made inside the user namespace that ``enter`` enters."""
    kinds = [["--net"]] if enter or os.geteuid() == 0 else []
    if not enter:
        # For who is not root, or is and may not: a user namespace in which it is.
        kinds.append(["--user", "--map-root-user", "--net"])
    said = ""
    for kind in kinds:
        # It ends with its input; in a session of its own Ctrl-C leaves the order of things to us.
        command = [*enter, "unshare", *kind, "--", "sh", "-c", "echo made; exec cat >/dev/null"]
        with _started(command) as holder:
            assert holder.stdout is not None
            said = holder.stdout.readline().strip()
            if said == "made":
                yield holder.pid
                return
    raise CannotShape(f"no network namespace: {said}")


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise CannotShape(f"{error.filename} is not here (util-linux)") from error
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def _mapped(pid: int) -> bool:
    """Whether the process is in another user namespace than this one."""
    return os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user")


def _inside(pid: int, *kinds: str) -> list[str]:
    return ["nsenter", "--target", str(pid), *kinds, "--"]


def _entering(pid: int) -> tuple[str, ...]:
    return tuple(_inside(pid, *(_USER if _mapped(pid) else ()), "--net"))


def _run(enter: tuple[str, ...], *command: str) -> None:
    # ip and tc are where only root's path leads, on some systems.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    try:
        done = subprocess.run(
            [*enter, *command], capture_output=True, text=True, timeout=_SECONDS, env={**os.environ, "PATH": path}
        )
    except FileNotFoundError as error:
        raise CannotShape(f"{error.filename} is not here (util-linux)") from error
    if done.returncode:
        raise CannotShape(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
