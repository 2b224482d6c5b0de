"""What holds for every `LoadProfile`, whatever was loaded and however."""

from __future__ import annotations

from weightwire.profile import LoadProfile

INSIDE = ("read", "hash", "ask", "staging", "wire", "wait", "gap")
"""What the span consists of."""


def assert_adds_up(profile: LoadProfile) -> None:
    """The stages add up to the span, exactly, and nothing is counted that cannot be."""
    parts = {name: getattr(profile, f"{name}_ns") for name in INSIDE}
    assert profile.measured
    assert profile.span_ns > 0
    assert sum(parts.values()) == profile.span_ns, parts
    assert all(ns >= 0 for ns in parts.values())
    assert 0 <= profile.blocked_ns <= profile.wait_ns
    counted = {
        name: profile.commands[name].count for name in ("SET_TENSOR", "SET_TENSOR_2D") if name in profile.commands
    }
    assert sum(counted.values()) == profile.set_tensor_calls
    assert all(stat.count > 0 and stat.ns > 0 for stat in profile.commands.values())
