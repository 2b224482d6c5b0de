"""iperf3 sending as many bytes over one connection, only where the command is installed.

It sends one small buffer again and again, reads no file and touches no fresh memory: what the network does at most.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import time

from prepare.smoke import free_port, listening

from harness.network import LOOPBACK, Network
from harness.rounds import PeerAbsent

_PATIENCE = 20.0


class IperfPeer:
    """An iperf3 server that stays, and a client for every round. Raises PeerAbsent where there is no iperf3."""

    name = "iperf3"

    def __init__(self, nbytes: int, *, network: Network = LOOPBACK) -> None:
        command = shutil.which("iperf3")
        if command is None:
            raise PeerAbsent("iperf3 is not installed")
        self.nbytes = nbytes
        self._command, self._network = command, network
        with contextlib.ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            for _ in range(5):
                # The server cannot pick a port, and one that was free may be taken before it listens.
                self._port = free_port()
                self._server = subprocess.Popen(
                    [*network.at_server, command, "-s", "-B", network.host, "-p", str(self._port)],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                )
                if self._listens():
                    break
                self._stop()
            else:
                self._log.seek(0)
                raise PeerAbsent(f"iperf3 does not start: {self._log.read().decode(errors='replace').strip()}")
            stack.callback(self._stop)
            self._stack = stack.pop_all()

    def _listens(self) -> bool:
        deadline = time.monotonic() + _PATIENCE
        while self._server.poll() is None and time.monotonic() < deadline:
            if listening(self._port, self._server.pid):
                return True
            time.sleep(0.01)
        return False

    def round(self) -> float:
        where = ["-c", self._network.host, "-p", str(self._port)]
        done = subprocess.run(
            [*self._network.at_client, self._command, *where, "-n", str(self.nbytes), "-J"],
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise RuntimeError(f"iperf3 failed: {(done.stdout + done.stderr)[-500:]}")
        received = json.loads(done.stdout)["end"]["sum_received"]
        # It sends whole buffers, so a little more than it was told to.
        return float(received["seconds"]) * self.nbytes / received["bytes"]

    def close(self) -> None:
        self._stack.close()

    def _stop(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
