"""Whether threads sleep: told by how often they went to sleep, which no load of the machine changes."""

from __future__ import annotations

import time
from pathlib import Path


def turns(thread: int | None) -> int:
    """How often a thread of this process, given by its native id, has gone to sleep so far."""
    text = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(text.split("voluntary_ctxt_switches:")[1].split()[0])


def sleeps_on(*threads: int | None) -> None:
    """Until for a second, which is five slices, none of the threads has been awake."""
    deadline = time.monotonic() + 30
    while True:
        before = [turns(thread) for thread in threads]
        time.sleep(1)
        if [turns(thread) for thread in threads] == before:
            return
        assert time.monotonic() < deadline, "it wakes again and again"
