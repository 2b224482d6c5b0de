"""A server whose start is interrupted, or that a signal's handler closes meanwhile, wherever that comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

EVERYWHERE = """
import ctypes, faulthandler, logging, os, signal, sys, threading, time
from weightwire import errors, threads
from weightwire.server import Server, accepting, listener

class Raised(Exception):
    pass

def handler(number, frame):
    if sys.argv[1] == "closes":
        server.close()
    else:
        raise Raised

faulthandler.dump_traceback_later(100, exit=True)
logging.basicConfig(level=logging.WARNING)  # to stderr, where nothing is to be
signal.signal(signal.SIGTERM, handler)
FILES = {threads.__file__, listener.__file__, accepting.__file__}
kill, left = ctypes.PyDLL(None).kill, 0

def trace(frame, event, argument):
    global left
    if frame.f_code.co_filename not in FILES:
        return None
    if event == "line" and frame.f_lineno != LAST:
        left -= 1
        if left == 0:
            sys.settrace(None)
            # Neither this function of the C library nor unpacking looks for signals: not this function, but the line
            # it was called for goes on until Python looks, as it would without being traced.
            (_,) = map(kill, (os.getpid(),), (signal.SIGTERM,))
    return trace

def held():
    return len(os.listdir("/proc/self/fd"))

# What comes as late as that comes to whoever called.
LAST = max(line for _, _, line in Server.start.__code__.co_lines() if line)
with Server(port=0, transport="tcp"):
    pass
at = raised = 0
while left <= 0:
    at += 1
    left, before = at, held()
    server = Server(port=0, transport="tcp")
    try:
        sys.settrace(trace)
        try:
            server.start()
        finally:
            sys.settrace(None)
    except (Raised, errors.ConfigError):
        raised += 1
    else:
        server.close()
    deadline = time.monotonic() + 20
    while threading.active_count() > 1 or held() != before:
        assert time.monotonic() < deadline, (at, threading.enumerate(), held() - before)
        time.sleep(0.001)
print(raised)
"""


@pytest.mark.parametrize("handler", ["raises", "closes"])
def test_nothing_is_left(handler: str) -> None:
    """No thread, no socket, though nobody closes what did not start; and nobody is waited for who waits himself."""
    done = subprocess.run([sys.executable, "-c", EVERYWHERE, handler], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert int(done.stdout) > 10
