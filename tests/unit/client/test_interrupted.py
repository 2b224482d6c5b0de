"""Ctrl-C wherever it comes while threads hash or push for the main one: they end, and it is passed on."""

from __future__ import annotations

from support.everywhere import run_script

HASHING = """
import threading
from support.everywhere import Everywhere
from weightwire import threads
from weightwire.client import hashpool

payloads = [memoryview(bytes(1000 + number)) for number in range(4)]

def work():
    pool = hashpool.HashPool(payloads, threads=2)
    feed = pool.feed(range(4), 1 << 20)
    try:
        pool.start()
        for position in range(4):
            feed.get(position, lambda: None)
            feed.release(position)
    finally:
        pool.close()

everywhere = Everywhere(threading, threads, hashpool)
for _ in everywhere:
    try:
        everywhere.trace(work)
    except KeyboardInterrupt:
        everywhere.count += 1
    everywhere.settle()
print(everywhere.count)
"""

PUSHING = """
import threading
from queue import Empty, SimpleQueue
from support.everywhere import Everywhere
from weightwire import threads
from weightwire.client import crew

class Connection:
    def __init__(self):
        self.closed = SimpleQueue()

    def close(self):
        self.closed.put(None)

def work(number, connection):
    try:
        connection.closed.get(timeout=0.02)
    except Empty:
        pass
    return number

targets = crew.as_targets(["127.0.0.1:1", "127.0.0.1:2"])
everywhere = Everywhere(threading, threads, crew)
for _ in everywhere:
    try:
        everywhere.trace(lambda: crew.run_all(targets, lambda target: Connection(), work))
    except KeyboardInterrupt:
        everywhere.count += 1
    everywhere.settle()
print(everywhere.count)
"""


def test_hashing() -> None:
    assert run_script(HASHING) > 100


def test_pushing_to_several() -> None:
    assert run_script(PUSHING) > 50
