"""Results as pytest-benchmark writes them, read for the report and the comparison. Numbers are there or absent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class BadResult(ValueError):
    """A file that is no result of pytest-benchmark; the text names it."""


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as ``peer`` ``subject`` is: the median over the rounds, its quartiles if kept."""

    subject: str
    peer: str
    median: float
    quartiles: tuple[float, float] | None


@dataclass(frozen=True)
class Measured:
    """One benchmark: ``facts`` is what it recorded (``extra_info``)."""

    name: str
    facts: Mapping[str, Any]

    @property
    def ratios(self) -> list[Ratio]:
        """Of its subject to every peer."""
        subject = str(self.facts.get("subject", "weightwire"))
        spread = _mapping(self.facts.get("quartiles_times_as_fast_as"))
        return [
            Ratio(subject, peer, ratio, _pair(spread.get(peer)))
            for peer, ratio in _numbers(_mapping(self.facts.get("times_as_fast_as")))
        ]

    @property
    def absent(self) -> Mapping[str, str]:
        """Peers that were not there, and why."""
        return {str(name): str(why) for name, why in _mapping(self.facts.get("absent")).items()}


@dataclass
class Results:
    """Everything of several files: benchmarks by their names, and each machine that a file says it was."""

    benchmarks: dict[str, Measured] = field(default_factory=dict)
    machines: list[Mapping[str, Any]] = field(default_factory=list)
    dates: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)


def load(paths: Iterable[Path]) -> Results:
    """Read ``paths``. Raises BadResult for one that cannot be read, or that measures again what another has."""
    found = Results()
    for path in paths:
        try:
            value = json.loads(path.read_text())
            entries = [(str(entry["name"]), _mapping(entry["extra_info"])) for entry in value["benchmarks"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadResult(f"{path}: not a result of pytest --benchmark-json ({error!r})") from error
        for name, facts in entries:
            if name in found.benchmarks:
                raise BadResult(f"{path}: {name} is in another of the files too; give results of one run")
            found.benchmarks[name] = Measured(name, facts)
        machine = _mapping(value.get("machine_info"))
        if machine not in found.machines:
            found.machines.append(machine)
        found.dates.append(str(value.get("datetime", ""))[:10])
        commit = _mapping(value.get("commit_info"))
        found.commits.append(str(commit.get("id"))[:12] + (", changed" if commit.get("dirty") else ""))
    return found


def number(value: object) -> float | None:
    """``value`` if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _numbers(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(str(name), found) for name, value in values.items() if (found := number(value)) is not None]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _pair(value: object) -> tuple[float, float] | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    low, high = (number(each) for each in value)
    return None if low is None or high is None else (low, high)
