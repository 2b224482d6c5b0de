"""The worker that touches memory ahead of the data."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.leaks import LeakCheck, eventually

from weightwire import Server, connect
from weightwire.server import populate
from weightwire.server.destinations import HostMemory
from weightwire.server.populate import Populator

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populate, "LOOK_AHEAD", 16 * MIB)
    monkeypatch.setattr(populate, "STEP", 2 * MIB)


def resident(memory: HostMemory) -> int:
    """Bytes of the memory that are present, from /proc."""
    import numpy as np

    address = np.frombuffer(memory.look(0, 1), np.uint8).ctypes.data
    for block in Path("/proc/self/smaps").read_text().split("VmFlags"):
        for line in block.splitlines():
            head = line.split(maxsplit=1)[0]
            if "-" in head and not head.endswith(":"):
                start, end = (int(part, 16) for part in head.split("-"))
                inside = start <= address < end
            elif line.startswith("Rss:") and inside:
                return int(line.split()[1]) * 1024
    raise AssertionError("the memory is not mapped")


def test_it_runs_ahead_of_the_data_by_the_look_ahead_and_no_further(no_leaks: LeakCheck) -> None:
    populator = Populator()
    memory = HostMemory(64 * MIB)
    job = populator.add(memory.region)
    assert eventually(lambda: job.done == 16 * MIB)
    job.reached(5 * MIB)  # less than half of it used up: not woken
    job.reached(10 * MIB)
    assert eventually(lambda: job.done == 26 * MIB)
    job.reached(50 * MIB)  # overtaken: goes on from there
    assert eventually(lambda: job.done == 64 * MIB)
    populator.close()


def test_it_leaves_alone_what_is_behind_data_that_needs_no_look_ahead(no_leaks: LeakCheck) -> None:
    populator = Populator()
    memory, other = HostMemory(64 * MIB), HostMemory(4 * MIB)
    job = populator.add(memory.region)
    assert eventually(lambda: job.done == 16 * MIB)
    job.reached(30 * MIB, ahead=False)
    # Worked on after whatever had been woken by that.
    behind = populator.add(other.region)
    assert eventually(lambda: behind.done == 4 * MIB)
    assert job.done <= 30 * MIB
    job.reached(30 * MIB)
    assert eventually(lambda: job.done == 46 * MIB)
    populator.close()


def test_the_pages_are_there_and_their_bytes_untouched(no_leaks: LeakCheck) -> None:
    memory = HostMemory(12 * MIB)
    memory.window(5 * MIB, 3)[:] = b"abc"
    before = resident(memory)
    populator = Populator()
    job = populator.add(memory.region)
    assert eventually(lambda: job.done == 12 * MIB)
    populator.close()
    assert bytes(memory.look(5 * MIB - 1, 5)) == b"\0abc\0"
    if hasattr(mmap, "MADV_NORMAL"):
        assert before < 12 * MIB
        assert resident(memory) >= 12 * MIB


def test_several_buffers_take_turns(no_leaks: LeakCheck) -> None:
    populator = Populator()
    memories = [HostMemory(8 * MIB) for _ in range(5)]
    jobs = [populator.add(memory.region) for memory in memories]
    assert eventually(lambda: all(job.done == 8 * MIB for job in jobs))
    populator.close()


def test_a_cancelled_job_lets_go_of_its_memory(no_leaks: LeakCheck) -> None:
    populator = Populator()
    memory = HostMemory(64 * MIB)
    gone = weakref.ref(memory.region)
    job = populator.add(memory.region)
    job.cancel()
    memory.close()
    gc.collect()
    assert eventually(lambda: gone() is None)
    job.reached(60 * MIB)  # late words from the session change nothing
    populator.close()


def test_a_finished_job_does_not_keep_its_memory(no_leaks: LeakCheck) -> None:
    populator = Populator()
    memory = HostMemory(2 * MIB)
    gone = weakref.ref(memory.region)
    job = populator.add(memory.region)
    assert eventually(lambda: job.done == 2 * MIB)
    job.cancel()
    memory.close()
    assert eventually(lambda: gone() is None)
    populator.close()


def test_trouble_with_one_buffer_does_not_end_the_worker(no_leaks: LeakCheck) -> None:
    class Broken:
        nbytes = 8 * MIB

        def populate(self, offset: int, nbytes: int) -> None:
            raise MemoryError

    populator = Populator()
    populator.add(Broken())  # type: ignore[arg-type]
    memory = HostMemory(4 * MIB)
    job = populator.add(memory.region)
    assert eventually(lambda: job.done == 4 * MIB)
    populator.close()


def test_closing_is_prompt_idempotent_and_final(no_leaks: LeakCheck) -> None:
    populator = Populator()
    memories = [HostMemory(64 * MIB) for _ in range(8)]
    for memory in memories:
        populator.add(memory.region)
    populator.close()
    populator.close()
    job = populator.add(memories[0].region)
    job.reached(30 * MIB)
    assert job.done == 0


def test_no_thread_before_the_first_buffer(no_leaks: LeakCheck) -> None:
    populator = Populator()
    assert populator._thread is None
    populator.close()


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The system gives no thread to populate memory with, until this is undone."""
    right = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "weightwire-populate":
            raise RuntimeError("can't start new thread")
        right(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield patch


def test_without_a_thread_nothing_is_populated_and_nothing_held(
    no_thread: pytest.MonkeyPatch, no_leaks: LeakCheck
) -> None:
    populator = Populator()
    memory = HostMemory(64 * MIB)
    gone = weakref.ref(memory.region)
    job = populator.add(memory.region)
    job.reached(30 * MIB)
    assert job.done == 0
    memory.close()
    del memory
    gc.collect()
    assert gone() is None  # though the job is still there
    no_thread.undo()
    other = HostMemory(4 * MIB)
    later = populator.add(other.region)
    assert eventually(lambda: later.done == 4 * MIB)
    populator.close()


def test_closing_without_a_thread(no_thread: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    populator = Populator()
    memory = HostMemory(4 * MIB)
    populator.add(memory.region)
    populator.close()
    populator.close()


def test_a_server_without_the_thread_serves_and_closes(no_thread: pytest.MonkeyPatch, no_leaks: LeakCheck) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * MIB, np.uint8)
    with Server(port=0, memory=8 * MIB) as server:
        for _ in range(3):  # of 8 MiB: none may be lost
            with connect(server.endpoints[0], timeout=30) as connection:
                assert connection.push({"a": data}, index=False)["a"].read().tobytes() == data.tobytes()
                assert connection.push({"b": data}, index=False)["b"].read().tobytes() == data.tobytes()
