"""How threads are started."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from support.everywhere import run_script
from support.leaks import LeakCheck, eventually

from weightwire.errors import TransportError
from weightwire.threads import Latch, Thread, start


def mask() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_a_thread_has_the_signal_mask_of_who_started_it(no_leaks: LeakCheck) -> None:
    """And so has a process that it starts: blocked signals would be inherited, and a child that cannot be stopped."""
    before, seen = mask(), []
    assert signal.SIGINT not in before
    thread = Thread(target=lambda: seen.append(mask()))
    thread.start()
    assert mask() == before
    thread.join(20)
    assert seen == [before]


def test_one_that_another_thread_starts(no_leaks: LeakCheck) -> None:
    seen: list[str] = []

    def work() -> None:
        inner = Thread(target=lambda: seen.append("inner"))
        inner.start()
        inner.join(20)

    outer = Thread(target=work)
    outer.start()
    outer.join(20)
    assert seen == ["inner"]


@pytest.mark.parametrize("way", [Thread.start, start])
def test_no_thread_to_be_had(
    way: Callable[[Thread], None], monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = mask()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    thread = Thread(target=print)
    with pytest.raises(TransportError if way is start else RuntimeError) as caught:
        way(thread)
    assert way is not start or caught.value.errno == errno.EAGAIN  # type: ignore[attr-defined]
    assert mask() == before
    assert thread.ended()
    thread.join()


INTERRUPTED = """
import os, signal, sys, threading, time
from weightwire.threads import Thread

release, timeout = threading.Event(), eval(sys.argv[1])
thread = Thread(target=release.wait, args=(20,))
thread.start()
assert not thread.ended()

def joins():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame and frame.f_code is not Thread.join.__code__:
        frame = frame.f_back
    return frame is not None

def interrupt():
    while not joins():
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    thread.join(timeout)
except KeyboardInterrupt:
    pass
else:
    sys.exit("not interrupted")
assert not thread.ended()
thread.join(0.2)
assert not thread.ended()
release.set()
thread.join()
assert thread.ended() and not thread.is_alive()
"""


@pytest.mark.parametrize("timeout", ["None", "15"])
def test_an_interrupted_join_can_be_done_again(timeout: str) -> None:
    """`threading.Thread` takes it for one that has ended, up to Python 3.12."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, timeout], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_one_whose_start_raises_does_nothing(monkeypatch: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    """What a signal's handler raises comes after the thread was begun, and whoever started it knows nothing of it."""
    right, ran = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        right(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        Thread(target=lambda: ran.append(1), name="weightwire-given-up").start()
    assert eventually(lambda: all(thread.name != "weightwire-given-up" for thread in threading.enumerate()))
    assert not ran


EVERYWHERE = """
import signal, sys, threading, time, traceback
from support.everywhere import Everywhere
from weightwire import threads

class Raised(Exception):
    pass

def handler(number, frame):
    raise Raised

number = getattr(signal, sys.argv[1])
signal.signal(number, handler)
# One that takes the process's signals whatever the main thread blocks.
threading.Thread(target=time.sleep, args=(120,), daemon=True).start()
everywhere = Everywhere(threading, threads, number=number)
for _ in everywhere:
    ran = []
    thread = threads.Thread(target=ran.append, args=(1,))
    try:
        everywhere.trace(thread.start)
    except Raised as error:
        everywhere.count += 1
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        assert threading.Thread.start.__code__ not in codes, traceback.format_exc()
    else:
        thread.join()
        assert ran == [1]
    thread.join()
    assert thread.ended()
    everywhere.settle()
print(everywhere.count)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGALRM"])
def test_no_handler_runs_within_the_start_of_a_thread(name: str) -> None:
    """It holds locks there that the new thread waits for. Any other thread may take a signal that one blocks."""
    assert run_script(EVERYWHERE, name) > 10


JOINED = """
import signal, threading
from support.everywhere import Everywhere
from weightwire import threads

def handler(number, frame):
    everywhere.count += 1
    thread.join()
    assert thread.ended()

signal.signal(signal.SIGINT, handler)
everywhere = Everywhere(threading, threads)
for _ in everywhere:
    thread = threads.Thread(target=int)
    thread.start()
    everywhere.trace(thread.join)
    everywhere.settle()
print(everywhere.count)
"""


def test_a_handler_may_join_what_is_being_joined() -> None:
    """`threading.Thread` holds a lock as it finds that it has ended, up to Python 3.12, and would wait for it."""
    assert run_script(JOINED) > 10


def test_the_child_of_a_fork_has_none_to_wait_for() -> None:
    release = threading.Event()
    thread = Thread(target=release.wait, args=(60,))
    thread.start()
    child = os.fork()
    if child == 0:
        thread.join()
        os._exit(3 if thread.ended() else 4)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    finally:
        release.set()
        thread.join()


def test_a_latch_lets_everybody_go(no_leaks: LeakCheck) -> None:
    latch = Latch()
    assert not latch.wait(0.01)
    gone: list[bool] = []
    waiting = [Thread(target=lambda: gone.append(latch.wait())) for _ in range(3)]
    for thread in waiting:
        thread.start()
    latch.set()
    latch.set()
    for thread in waiting:
        thread.join(20)
    assert gone == [True, True, True]
    assert latch.wait(0)
    assert latch.wait()


WAITING = """
import sys, threading, time
from support.everywhere import Everywhere
from weightwire import threads

def both(frame):
    # The signal comes at this very line, and the latch is set right before: what tells of that may be taken in it.
    global line
    line += 1
    if line == everywhere.at:
        latch.set()
    return False

def waits():
    frame = sys._current_frames().get(other.ident)
    while frame and frame.f_code is not threads.Latch.wait.__code__:
        frame = frame.f_back
    return frame is not None

sys.setswitchinterval(30)  # the other one is waiting, or has not begun; and it takes nothing before this one does
everywhere = Everywhere(threads, but=both)
for _ in everywhere:
    line, latch = 0, threads.Latch()
    other = threading.Thread(target=latch.wait, daemon=True)
    other.start()
    while not waits():
        time.sleep(0.001)
    try:
        everywhere.trace(lambda: latch.wait(0.05))
    except KeyboardInterrupt:
        everywhere.count += 1
    else:
        latch.set()
    everywhere.settle()
print(everywhere.count)
"""


def test_who_is_interrupted_takes_nothing_from_the_others_that_wait() -> None:
    assert run_script(WAITING) > 3


def test_it_cannot_wait_for_itself(no_leaks: LeakCheck) -> None:
    caught: list[RuntimeError] = []

    def work() -> None:
        try:
            thread.join()
        except RuntimeError as error:
            caught.append(error)

    thread = Thread(target=work)
    thread.start()
    thread.join(20)
    assert thread.ended()
    assert len(caught) == 1
