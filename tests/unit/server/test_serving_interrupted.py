"""Ctrl-C wherever it comes while a server serves for ever."""

from __future__ import annotations

from support.everywhere import run_script

EVERYWHERE = """
import threading, time
from support.everywhere import Everywhere
from weightwire import threads
from weightwire.server import Server, listener

def end():
    time.sleep(0.05)
    server.close()

everywhere = Everywhere(threading, threads, listener)
for _ in everywhere:
    server = Server(port=0, transport="tcp").start()
    threading.Thread(target=end).start()
    try:
        everywhere.trace(server.serve_forever)
    except KeyboardInterrupt:
        everywhere.count += 1
    everywhere.settle()
print(everywhere.count)
"""


def test_it_ends() -> None:
    assert run_script(EVERYWHERE) > 10
