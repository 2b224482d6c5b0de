"""The order in which the peers of a benchmark take turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.rounds import ordered, side_by_side


class Pedantic:
    """What `side_by_side` uses of pytest-benchmark's fixture."""

    def pedantic(
        self,
        target: Callable[..., object],
        args: tuple[object, ...],
        setup: Callable[[], object],
        teardown: Callable[..., object],
        rounds: int,
    ) -> None:
        for _ in range(rounds):
            setup()
            target(*args)
            teardown(*args)


@pytest.mark.parametrize("others", [0, 1, 2, 5])
def test_each_round_has_every_peer_once(others: int) -> None:
    done: list[tuple[str, str]] = []
    peers = [f"peer {number}" for number in range(others)]
    side_by_side(
        Pedantic(),
        "subject",
        peers,
        6,
        before=lambda name: done.append(("before", name)),
        run=lambda name: done.append(("run", name)),
        after=lambda name: done.append(("after", name)),
    )
    size = 3 * (others + 1)
    assert len(done) == 6 * size
    for at in range(0, len(done), size):
        turns = done[at : at + size]
        assert [step for step, _ in turns] == ["before", "run", "after"] * (others + 1)
        assert {name for _, name in turns[::3]} == {"subject", *peers}
        for first in range(0, size, 3):
            assert len({name for _, name in turns[first : first + 3]}) == 1


def test_nobody_always_follows_the_same_one() -> None:
    peers = ["a", "b", "c", "d"]
    row = [name for turn in range(4) for name in ordered(peers, turn)]
    for peer in peers:
        before = {row[at - 1] for at in range(1, len(row)) if row[at] == peer}
        assert len(before) > 1
