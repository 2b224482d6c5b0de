from __future__ import annotations

from typing import Any

import pytest

from weightwire import profile
from weightwire.profile import LoadProfile, LoadRecorder, Stage


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that shows what the test puts in it."""
    now = [1_000]
    monkeypatch.setattr(profile, "perf_counter_ns", lambda: now[0])
    return now


def test_stages_add_up_to_the_span(clock: list[int]) -> None:
    recorder = LoadRecorder()
    for stage, ns in ((Stage.ALLOC, 5), (Stage.SEND, 70), (Stage.HASH, 11), (Stage.SEND, 30), (Stage.WAIT, 7)):
        clock[0] += 1
        recorder.switch(stage)
        clock[0] += ns - 1
    clock[0] += 2
    done = recorder.finish()
    assert done.span_ns == clock[0] - 1_000
    assert done.other_ns == 1
    assert (done.alloc_ns, done.send_ns, done.hash_ns, done.wait_ns) == (5, 100, 11, 8)
    values = done.as_dict()
    assert (
        sum(values[f"{name}_ns"] for name in ("hash", "ask", "send", "wait", "alloc", "verify", "other"))
        == done.span_ns
    )


def test_switch_returns_the_stage_that_was_left() -> None:
    recorder = LoadRecorder()
    assert recorder.switch(Stage.ASK) is Stage.OTHER
    assert recorder.switch(Stage.HASH) is Stage.ASK
    assert recorder.switch(Stage.HASH) is Stage.HASH


def test_as_dict_has_every_field_and_the_rest() -> None:
    values = LoadProfile(calls=3, bytes=10, span_ns=100, send_ns=60).as_dict()
    assert values["other_ns"] == 40
    assert set(values) == {
        *("calls", "bytes", "span_ns", "hash_ns", "ask_ns", "send_ns", "wait_ns", "alloc_ns", "verify_ns"),
        *("hits", "misses", "corrupt_hits", "bytes_saved", "direct_bytes", "copied_bytes", "other_ns"),
    }


def test_lines_say_where_the_time_went() -> None:
    done = LoadProfile(
        calls=12, bytes=4 << 30, span_ns=2_000_000_000, send_ns=500_000_000, hash_ns=1_250_000_000, wait_ns=250_000_000,
        hits=3, misses=1, bytes_saved=2 << 30,
    )  # fmt: skip
    lines = done.lines()
    assert lines[0] == "4.00 GiB in 2.000 s     2.00 GiB/s, 12 requests"
    assert lines[1] == "  server's cache: 3 hits, 1 misses, 2.00 GiB not sent"
    assert lines[2].split() == ["hashing", "1.250", "s", "62.5", "%"]
    assert lines[3].split() == ["sending", "0.500", "s", "25.0", "%", "4.00", "GiB/s"]
    assert lines[4].split() == [*["waiting", "for", "the", "server"], "0.250", "s", "12.5", "%"]
    assert lines[-1] == "most of the time went on: hashing"


@pytest.mark.parametrize("values", [{}, {"bytes": 5}, {"span_ns": 7}])
def test_lines_of_a_load_that_took_no_time(values: dict[str, Any]) -> None:
    assert LoadProfile(**values).lines()
