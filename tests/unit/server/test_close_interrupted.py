"""Ctrl-C wherever it comes while a server is closed: closed again, it leaves nothing, and has lost nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.everywhere import run_script

from weightwire.cache.directory import entry_name
from weightwire.hashing import fnv1a64

BEGINNING = """
import atexit, logging, os, pathlib, random, signal, sys, threading, time
from support.everywhere import Everywhere
from support.raw_client import RawClient
from weightwire import threads
from weightwire.cache import kept, progress, reading, saving, workers
from weightwire.cache.directory import entry_name
from weightwire.hashing import fnv1a64
from weightwire.server import Server, accepting, ending, filling, listener, populate, session, stats, waiting

class Said(logging.Handler):
    def emit(self, record):
        if ": waiting, " not in record.getMessage():
            said.append(record.getMessage())

said = []  # that a thread did not end in time, say, or that a tensor could not be stored
logging.getLogger("weightwire").addHandler(Said(logging.WARNING))
threading.excepthook = lambda arguments: said.append(arguments.exc_value)
folder = pathlib.Path(sys.argv[1])
sync = os.fsync
everywhere = Everywhere(
    threading, threads, kept, progress, reading, saving, workers,
    accepting, ending, filling, listener, populate, session, stats, waiting,
)

def held():
    return len(os.listdir("/proc/self/fd"))

def send(client, payload):
    client.set(client.place("t", len(payload), client.allocate(len(payload))), payload, flag=1)
    client.barrier()
"""

EVERYWHERE = """
def slowly(fd):
    time.sleep(0.01)
    sync(fd)

def handler(number, frame):
    everywhere.count += 1
    if sys.argv[3] == "raises":
        raise KeyboardInterrupt
    server.close()
    assert not server.stats().cache_pending

signal.signal(signal.SIGINT, handler)
os.fsync = slowly
with Server(port=0, transport="tcp"):
    pass
for number in everywhere:
    before = held()
    payload = random.Random(number).randbytes(200_000)
    server = Server(port=0, transport="tcp", cache=folder, max_clients=1).start()
    with RawClient(server.port) as client, RawClient(server.port, hello=False):
        while not server.stats().connections_waiting:
            time.sleep(0.001)
        send(client, payload)
        try:
            everywhere.trace(getattr(server, sys.argv[2]))
        except KeyboardInterrupt:
            pass
        server.close()
        now = server.stats()
        assert (now.cache_saved, now.cache_save_failures, now.cache_pending) == (1, 0, 0), (number, now)
        assert (now.connections_open, now.connections_waiting) == (0, 0), (number, now)
    names = os.listdir(folder)
    assert names == [entry_name(fnv1a64(payload))], (number, names)
    path = folder / names[0]
    assert path.read_bytes() == payload
    path.unlink()
    everywhere.settle(lambda: held() != before)
    assert not said, (number, said)
print(everywhere.count)
"""

ENDING = """
def gated(fd):
    reached.set()
    assert go.wait(60)
    sync(fd)

def main_is_in(code):
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None

def interrupt():
    assert reached.wait(60)
    while not main_is_in(Server.close.__code__) or not main_is_in(threads.Latch.wait.__code__):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
    while not main_is_in(threading._shutdown.__code__):
        time.sleep(0.001)
    if sys.argv[2] == "waits":
        go.set()
    else:
        os.kill(os.getpid(), signal.SIGINT)

reached, go = threading.Event(), threading.Event()
os.fsync = gated
server = Server(port=0, transport="tcp", cache=folder).start()
with RawClient(server.port) as client:
    send(client, random.Random(1).randbytes(200_000))
    assert reached.wait(60)
atexit.register(go.set)  # before what was registered already is called
threading.Thread(target=interrupt, daemon=True).start()
try:
    server.close()
except KeyboardInterrupt:
    print(1)
assert not said, said
"""


@pytest.mark.parametrize(("what", "handler"), [("close", "raises"), ("close", "closes"), ("stats", "raises")])
def test_closed_after_that_it_has_ended(tmp_path: Path, what: str, handler: str) -> None:
    """What was received is in the cache; no thread, descriptor or temporary file stays, and nothing is locked."""
    assert run_script(BEGINNING + EVERYWHERE, str(tmp_path), what, handler) > 10


@pytest.mark.parametrize("then", ["waits", "is-interrupted-too"])
def test_a_process_that_ends_meanwhile_keeps_what_was_received(tmp_path: Path, then: str) -> None:
    """With one Ctrl-C within `close`, and with another one while Python waits for the last threads."""
    assert run_script(BEGINNING + ENDING, str(tmp_path), then) == 1
    payload = random.Random(1).randbytes(200_000)
    assert [path.name for path in tmp_path.iterdir()] == [entry_name(fnv1a64(payload))]
    assert (tmp_path / entry_name(fnv1a64(payload))).read_bytes() == payload
