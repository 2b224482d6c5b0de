"""Starting a stock server once, to see that a peer runs here and speaks the protocol it should."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SERVER_SCRIPT = Path(__file__).resolve().parent.parent / "support" / "stock_server.py"
_HELLO = 14
_LISTEN = "0A"


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago (the stock server cannot pick one itself)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int, pid: int | None = None) -> bool:
    """True when something listens on the IPv4 port, in the network of process ``pid`` (None: this one).

    Asked of the kernel, as a connection would count as a client.
    """
    wanted = f":{port:04X}"
    try:
        rows = Path(f"/proc/{pid or 'self'}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        if pid is None:
            raise
        return False  # it has just ended
    return any(row.split()[1].endswith(wanted) and row.split()[3] == _LISTEN for row in rows)


def smoke(library_folder: Path, protocol: str, *, seconds: float = 20.0) -> str | None:
    """Start the peer, greet it, end it. Returns None when it answered as `protocol`, else what went wrong."""
    port = free_port()
    command = [sys.executable, str(SERVER_SCRIPT), str(library_folder), f"127.0.0.1:{port}"]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + seconds
            while not listening(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    last = output.read().decode(errors="replace").strip().splitlines()[-1:]
                    state = "still running" if process.poll() is None else f"exit code {process.returncode}"
                    return f"the server does not listen ({state}): {' '.join(last)}"
                time.sleep(0.01)
            answer = _greet(port, protocol)
        except OSError as problem:
            return f"no answer to HELLO: {problem}"
        finally:
            process.kill()
            process.wait()
    # The patch level follows the number of operations upstream knows; it is no part of the wire format.
    if tuple(answer[:2]) == tuple(map(int, protocol.split(".")[:2])):
        return None
    return f"it speaks {'.'.join(map(str, answer))}, not {protocol}"


def _greet(port: int, protocol: str) -> bytes:
    """Send HELLO in the form of this protocol and return the version's three bytes."""
    modern = int(protocol.split(".")[0]) >= 4
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        caps = bytes(24) if modern else b""
        peer.sendall(struct.pack("<BQ", _HELLO, len(caps)) + caps)
        expected = 8 + (28 if modern else 3)
        answer = b""
        while len(answer) < expected:
            piece = peer.recv(expected - len(answer))
            if not piece:
                raise ConnectionError("it closed the connection")
            answer += piece
    return answer[8:11]
