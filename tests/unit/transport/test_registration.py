from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest
from support.fakeverbs import FakeVerbs

from weightwire._native import _verbs
from weightwire.errors import RegistrationError, VerbsError
from weightwire.transport import registration
from weightwire.transport.memory import HostRegion
from weightwire.transport.registration import CHUNK, RECEIVE_SLOTS, Attempt, locked_memory_limit, register_rings

KIB = 1024


class Budget:
    """A device that pins so many bytes and no more."""

    def __init__(self, nbytes: int, error: int = errno.ENOMEM) -> None:
        self.left = nbytes
        self.error = error
        self.asked: list[int] = []

    def register(self, nbytes: int) -> Budgeted:
        self.asked.append(nbytes)
        if nbytes > self.left:
            raise VerbsError("no", operation="ibv_reg_mr", errno=self.error)
        self.left -= nbytes
        return Budgeted(self, nbytes)


class Budgeted:
    def __init__(self, budget: Budget, nbytes: int) -> None:
        self.budget, self.nbytes = budget, nbytes

    def close(self) -> None:
        self.budget.left += self.nbytes
        self.nbytes = 0


def test_a_slot_is_what_a_stock_peer_holds() -> None:
    assert (CHUNK, RECEIVE_SLOTS) == (256 * KIB, 24)


@pytest.mark.parametrize(
    ("kib", "depth", "failed"),
    [
        (8192, 8, []),
        (8191, 4, ["receive"]),
        (7168, 4, ["receive"]),
        (7167, 2, ["receive", "receive"]),
        (6656, 2, ["receive", "receive"]),
        (6655, 1, ["receive", "receive", "receive"]),
        (6400, 1, ["receive", "receive", "receive"]),
    ],
)
def test_the_depth_that_a_limit_allows(kib: int, depth: int, failed: list[str]) -> None:
    budget = Budget(kib * KIB)
    rings = register_rings(budget.register)
    assert rings.send_slots == depth
    assert rings.degraded == bool(failed)
    assert rings.send.nbytes == depth * CHUNK
    assert rings.receive.nbytes == RECEIVE_SLOTS * CHUNK
    assert [attempt.failed for attempt in rings.attempts] == [*failed, ""]
    assert budget.left == kib * KIB - (depth + RECEIVE_SLOTS) * CHUNK, "a rung that failed kept something"


@pytest.mark.parametrize(("most", "rungs"), [(8, (8, 4, 2, 1)), (4, (4, 2, 1)), (1, (1,))])
def test_the_ladder_starts_at_the_depth_asked_for(most: int, rungs: tuple[int, ...]) -> None:
    budget = Budget(1 << 30)
    rings = register_rings(budget.register, depth=most)
    assert (rings.send_slots, rings.degraded, rings.send.nbytes) == (most, False, most * CHUNK)
    with pytest.raises(RegistrationError) as caught:
        register_rings(Budget(0).register, depth=most)
    assert tuple(attempt.send_slots for attempt in caught.value.attempts) == rungs


@pytest.mark.parametrize("limit", [8 << 20, None])
@pytest.mark.parametrize("kib", [6399, 2048, 300, 64, 0])
def test_past_the_last_rung(kib: int, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "locked_memory_limit", lambda: limit)
    budget = Budget(kib * KIB)
    with pytest.raises(RegistrationError) as caught:
        register_rings(budget.register)
    assert budget.left == kib * KIB
    fits = [slots * CHUNK <= kib * KIB for slots in (8, 4, 2, 1)]
    assert caught.value.attempts == tuple(
        Attempt(slots, 24, "receive" if fit else "send", errno.ENOMEM)
        for slots, fit in zip((8, 4, 2, 1), fits, strict=True)
    )
    assert caught.value.errno == errno.ENOMEM
    assert "6400 KiB" in caught.value.detail
    if limit is None:
        assert "no rings fit without a limit of locked memory" in caught.value.detail
        assert "no limit binds" in caught.value.hint
        assert "raise" not in caught.value.hint
    else:
        assert "no rings fit within 8192 KiB of locked memory" in caught.value.detail
        assert "ulimit -l" in caught.value.hint


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.EPERM, errno.ENODEV])
def test_only_want_of_memory_is_tried_again(code: int) -> None:
    budget = Budget(3 * CHUNK * 8, error=code)
    with pytest.raises(RegistrationError) as caught:
        register_rings(budget.register)
    assert budget.asked == [8 * CHUNK, 24 * CHUNK][: len(budget.asked)]
    assert caught.value.attempts == (Attempt(8, 24, "receive", code),)
    assert caught.value.errno == code
    assert budget.left == 3 * CHUNK * 8


def test_an_interrupt_gives_the_send_ring_back() -> None:
    budget = Budget(1 << 30)

    def interrupted(nbytes: int) -> Budgeted:
        if nbytes == RECEIVE_SLOTS * CHUNK:
            raise KeyboardInterrupt
        return budget.register(nbytes)

    with pytest.raises(KeyboardInterrupt):
        register_rings(interrupted)
    assert budget.left == 1 << 30


@pytest.mark.parametrize(("kib", "depth"), [(8192, 8), (7168, 4), (6656, 2), (6400, 1), (6399, 0)])
def test_on_a_device(fake: FakeVerbs, kib: int, depth: int) -> None:
    fake.set("budget", kib * KIB)
    with _verbs.Context(_verbs.devices()[0]) as context, _verbs.ProtectionDomain(context) as domain:

        def register(nbytes: int) -> _verbs.MemoryRegion:
            return _verbs.MemoryRegion(domain, HostRegion(nbytes))

        if not depth:
            with pytest.raises(RegistrationError):
                register_rings(register)
        else:
            rings = register_rings(register)
            assert rings.send_slots == depth
            assert fake.get("pinned") == (depth + RECEIVE_SLOTS) * CHUNK
            rings.send.close()
            rings.receive.close()
        assert fake.get("pinned") == 0


def test_attempts_as_data_and_words() -> None:
    attempt = Attempt(8, 24, "receive", errno.ENOMEM)
    assert attempt.as_dict() == {"send_slots": 8, "receive_slots": 24, "failed": "receive", "errno": errno.ENOMEM}
    assert str(attempt) == "8 + 24 slots: the receive ring failed (ENOMEM)"
    assert str(Attempt(4, 24)) == "4 + 24 slots: registered"


IPC_LOCK = 1 << 14
EVERYONE = "         0          0 4294967295\n"


@pytest.mark.parametrize(
    ("capabilities", "users", "bound"),
    [
        (IPC_LOCK, EVERYONE, False),
        ((1 << 41) - 1, EVERYONE, False),
        ((1 << 41) - 1 - IPC_LOCK, EVERYONE, True),
        (0, EVERYONE, True),
        (IPC_LOCK, "0 1000 1\n", True),
    ],
)
def test_who_the_limit_binds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: int, users: str, bound: bool
) -> None:
    (tmp_path / "status").write_text(f"Name:\tx\nCapPrm:\t{0:016x}\nCapEff:\t{capabilities:016x}\n")
    (tmp_path / "uid_map").write_text(users)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 1 << 30))
    assert locked_memory_limit(tmp_path) == (8 << 20 if bound else None)


def test_no_limit_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert locked_memory_limit(tmp_path) is None


def test_a_process_that_cannot_be_looked_at_is_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert locked_memory_limit(tmp_path / "gone") == 65536
