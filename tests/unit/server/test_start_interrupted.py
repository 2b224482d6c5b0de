"""A server whose start is interrupted, or that a signal's handler closes meanwhile, wherever that comes."""

from __future__ import annotations

import pytest
from support.everywhere import run_script

EVERYWHERE = """
import logging, os, signal, sys, threading
from support.everywhere import Everywhere
from weightwire import errors, threads
from weightwire.server import Server, accepting, listener

class Raised(Exception):
    pass

def handler(number, frame):
    if sys.argv[1] == "closes":
        server.close()
    else:
        raise Raised

class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

def held():
    return len(os.listdir("/proc/self/fd"))

# What comes at the last line comes to whoever called.
last = max(line for _, _, line in Server.start.__code__.co_lines() if line)
said = []  # that a thread did not end in time, say
logging.getLogger("weightwire").addHandler(Said(logging.WARNING))
threading.excepthook = lambda arguments: said.append(arguments.exc_value)
signal.signal(signal.SIGTERM, handler)
with Server(port=0, transport="tcp"):
    pass
everywhere = Everywhere(
    threads, listener, accepting, number=signal.SIGTERM,
    but=lambda frame: frame.f_code is Server.start.__code__ and frame.f_lineno == last,
)
for _ in everywhere:
    before = held()
    server = Server(port=0, transport="tcp")
    try:
        everywhere.trace(server.start)
    except (Raised, errors.ConfigError):
        everywhere.count += 1
    else:
        server.close()
    everywhere.settle(lambda: held() != before)
    assert not said, said
print(everywhere.count)
"""


@pytest.mark.parametrize("handler", ["raises", "closes"])
def test_nothing_is_left(handler: str) -> None:
    """No thread, no socket, though nobody closes what did not start; and nobody is waited for who waits himself."""
    assert run_script(EVERYWHERE, handler) > 10


AGAIN = """
import os, signal, sys
from support.everywhere import Everywhere
from weightwire import threads
from weightwire.server import Server, accepting, ending, listener

def held():
    return len(os.listdir("/proc/self/fd"))

def fails():
    # The first look is before anything is made, the second one when the acceptor has begun, the third without the lock.
    global looks
    looks += 1
    if looks == int(sys.argv[1]):
        raise OSError

def before_that(frame):
    while frame is not None:
        if frame.f_code is Server.start.__code__:
            return looks < int(sys.argv[1])
        frame = frame.f_back
    return True

with Server(port=0, transport="tcp"):
    pass
everywhere = Everywhere(threads, accepting, ending, listener, but=before_that)
for _ in everywhere:
    before, looks = held(), 0
    server = Server(port=0, transport="tcp")
    server._check_open = fails
    try:
        everywhere.trace(server.start)
    except KeyboardInterrupt:
        everywhere.count += 1
    except OSError:
        pass
    server.close()
    everywhere.settle(lambda: held() != before)
print(everywhere.count)
"""


@pytest.mark.parametrize("look", ["2", "3"])
def test_one_that_failed_and_is_interrupted_as_it_is_undone_can_be_closed(look: str) -> None:
    assert run_script(AGAIN, look) > 10
