"""Hold results to stated floors: benchmarks/compare.py RESULT.json... FLOORS.toml

Run by hand, after the benchmarks. Each floor is a ratio that a benchmark has to reach, "so many times as fast as that
peer", out of rounds of the same run: an absolute time would say more about the machine than about the code. Exit code
0: every floor is met. 1: some ratio is below its floor, or was not measured, and stdout says which. 2: files that
cannot be used.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE))

from harness.results import BadResult, Results, load, number  # noqa: E402  (found through the path set above)

MET, BELOW, UNUSABLE = 0, 1, 2


class BadFloors(ValueError):
    """A file of floors that cannot be used; the text says why."""


def read_floors(path: Path) -> dict[str, dict[str, float]]:
    """Benchmark to peer to the least ratio. Raises BadFloors."""
    try:
        value = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadFloors(f"{path}: {error}") from error
    floors: dict[str, dict[str, float]] = {}
    for benchmark, peers in value.items():
        if not isinstance(peers, Mapping) or not peers:
            raise BadFloors(f'{path}: {benchmark!r} is no table of floors; write ["{benchmark}"] and lines below it')
        floors[benchmark] = {}
        for peer, least in peers.items():
            ratio = number(least)
            if ratio is None or ratio <= 0:
                raise BadFloors(f"{path}: the floor of {benchmark} against {peer!r} is {least!r}, and no ratio above 0")
            floors[benchmark][peer] = ratio
    if not floors:
        raise BadFloors(f"{path}: there is no floor in it")
    return floors


def compare(results: Results, floors: Mapping[str, Mapping[str, float]]) -> list[tuple[bool, str]]:
    """For each floor whether it is met, and a line that says it."""
    lines: list[tuple[bool, str]] = []
    for name, peers in floors.items():
        measured = results.benchmarks.get(name)
        ratios = {} if measured is None else {ratio.peer: ratio for ratio in measured.ratios}
        for peer, least in peers.items():
            what = f"{name}: {least:g} times as fast as {peer}"
            if measured is None:
                lines.append((False, f"{what}: not measured; {_similar(name, results.benchmarks)}"))
            elif peer in ratios:
                met = ratios[peer].median >= least
                lines.append((met, f"{what}: {ratios[peer].median:.2f}{'' if met else ', below the floor'}"))
            elif peer in measured.absent:
                lines.append((False, f"{what}: not measured: {measured.absent[peer]}"))
            else:
                lines.append((False, f"{what}: not measured; {_similar(peer, ratios)}"))
    return lines


def _similar(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"the results have {', '.join(map(repr, known))}" if known else "the results have none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print a line for each floor, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="Exit codes: 0 every floor is met, 1 one is not or was not measured, 2 usage.",
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json", help="of pytest --benchmark-json")
    parser.add_argument("floors", type=Path, metavar="FLOORS.toml", help="such as benchmarks/floors.toml")
    options = parser.parse_args(arguments)
    try:
        lines = compare(load(options.results), read_floors(options.floors))
    except (BadResult, BadFloors) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return UNUSABLE
    for met, line in lines:
        print(f"{'met   ' if met else 'FAILED'}  {line}")
    failed = sum(not met for met, _ in lines)
    print(f"{len(lines) - failed} of {len(lines)} floors met")
    return BELOW if failed else MET


if __name__ == "__main__":
    sys.exit(main())
