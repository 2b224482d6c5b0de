"""A client's buffers: bounds, which tensors lie where, and when memory goes back."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.leaks import eventually

from weightwire.server import buffers as module
from weightwire.server import capacity as capacity_module
from weightwire.server import served as served_module
from weightwire.server.buffers import Buffer, BufferTable, Located
from weightwire.server.capacity import Capacity, Tally
from weightwire.server.destinations import Destination, HostMemory
from weightwire.server.errors import BadRequest
from weightwire.server.populate import PopulateJob, Populator
from weightwire.server.served import Registry, ServedTensor
from weightwire.wire import weight_tensor

TOTAL = 1 << 20


class Forgetful(Destination):
    """Does not call the __init__ of its base."""

    def __init__(self) -> None:
        pass

    def write(self, offset: int, view: memoryview) -> None: ...

    def read(self, offset: int, view: memoryview) -> None: ...


class Setup:
    """A table with everything it needs."""

    def __init__(self, *, keep: bool = False) -> None:
        self.capacity = Capacity(TOTAL)
        self.told: list[str] = []
        self.registry = Registry(keep=keep, on_tensor=lambda tensor: self.told.append(tensor.name))
        self.populator = Populator()
        self.table = self.another_client()

    def another_client(self, destination: object = None) -> BufferTable:
        return BufferTable(
            capacity=self.capacity,
            registry=self.registry,
            populator=self.populator,
            destination=destination or (lambda nbytes, device: HostMemory(nbytes)),  # type: ignore[arg-type]
        )

    def buffer(self, nbytes: int = 4096) -> Buffer:
        made = self.table.allocate(nbytes, 0)
        assert made is not None
        return made

    def located(self, buffer: Buffer, name: str, start: int, nbytes: int) -> Located:
        return self.table.locate(
            weight_tensor(name, 24, (nbytes,), nbytes, buffer=buffer.handle, data=buffer.base + start)
        )

    def push(self, buffer: Buffer, name: str, start: int, nbytes: int) -> None:
        located = self.located(buffer, name, start, nbytes)
        buffer.wrote(buffer.begin(located), located, 0, nbytes)

    @property
    def names(self) -> list[str]:
        return sorted(self.registry.tensors)


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.populator.close()


@pytest.fixture
def keeping() -> Iterator[Setup]:
    made = Setup(keep=True)
    yield made
    made.populator.close()


def test_capacity_is_shared_and_comes_back_when_memory_is_really_freed(setup: Setup) -> None:
    first = setup.buffer(TOTAL // 2)
    other = setup.another_client()
    assert other.allocate(TOTAL // 2 + 1, 0) is None
    second = other.allocate(TOTAL // 2, 0)
    assert second is not None
    assert setup.capacity.free == 0
    setup.push(first, "held", 0, 64)
    array = setup.registry.tensors["held"].numpy()
    setup.table.free(first.handle)
    del first
    gc.collect()
    assert setup.capacity.free == 0  # an array still shows it
    del array
    gc.collect()
    # A step of the populator that was on its way keeps the memory until it ends.
    assert eventually(lambda: setup.capacity.free == TOTAL // 2)
    other.free_all()
    del second
    gc.collect()
    assert eventually(lambda: setup.capacity.free == TOTAL)


def test_memory_that_is_just_being_populated_can_be_had_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go = threading.Event(), threading.Event()
    real = PopulateJob.step

    def held(job: PopulateJob) -> bool:
        region = job._region
        inside.set()
        assert go.wait(20)
        return real(job) and region is not None

    monkeypatch.setattr(PopulateJob, "step", held)
    first = setup.buffer(TOTAL)
    assert inside.wait(20)
    setup.table.free(first.handle)
    del first
    threading.Timer(0.1, go.set).start()
    assert setup.table.allocate(TOTAL, 0) is not None


def test_handles_are_nobody_elses(setup: Setup) -> None:
    buffer = setup.buffer()
    with pytest.raises(BadRequest, match="no buffer"):
        setup.another_client().get(buffer.handle)


def test_handles_and_addresses_say_nothing_about_memory(setup: Setup) -> None:
    import numpy as np

    buffer = setup.buffer()
    assert buffer.memory.direct is not None
    real = np.frombuffer(buffer.memory.direct.look(0, 1), np.uint8).ctypes.data
    assert real not in (buffer.base, buffer.handle)
    assert abs(real - buffer.base) >= 4096


def test_an_empty_buffer(setup: Setup) -> None:
    buffer = setup.buffer(0)
    assert buffer.handle
    assert (buffer.base, buffer.nbytes) == (0, 0)
    assert eventually(lambda: setup.capacity.free == TOTAL)
    with pytest.raises(BadRequest, match="not within"):
        setup.located(buffer, "x", 0, 1)
    setup.push(buffer, "none", 0, 0)
    assert setup.told == ["none"]
    setup.table.free(buffer.handle)
    assert not setup.names


@pytest.mark.parametrize(
    "failure", [MemoryError(), OSError(12, "no"), ValueError("a bug in the hook"), OverflowError()]
)
def test_a_destination_that_cannot_be_made_is_a_refusal(setup: Setup, failure: Exception) -> None:
    def make(nbytes: int, device: int) -> Destination:
        raise failure

    table = setup.another_client(make)
    assert table.allocate(100, 0) is None
    assert eventually(lambda: setup.capacity.free == TOTAL)
    assert len(table) == 0


def test_a_destination_that_is_too_small_is_a_refusal(setup: Setup) -> None:
    table = setup.another_client(lambda nbytes, device: HostMemory(nbytes - 1))
    assert table.allocate(100, 0) is None
    gc.collect()
    assert eventually(lambda: setup.capacity.free == TOTAL)


def test_a_failing_close_is_logged_and_frees_all_the_same(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(Destination):
        def write(self, offset: int, view: memoryview) -> None: ...

        def read(self, offset: int, view: memoryview) -> None: ...

        def close(self) -> None:
            raise RuntimeError("will not")

    table = setup.another_client(lambda nbytes, device: Stubborn(nbytes))
    buffer = table.allocate(100, 0)
    assert buffer is not None
    table.free(buffer.handle)
    assert eventually(lambda: setup.capacity.free == TOTAL)
    assert "will not" in caplog.text


def test_a_client_cannot_hold_buffers_without_end(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLIENT_BUFFERS", 3)
    handles = [setup.buffer(1).handle for _ in range(3)]
    assert setup.table.allocate(1, 0) is None
    setup.table.free(handles[0])
    assert setup.table.allocate(1, 0) is not None


def test_a_tensor_is_complete_when_every_byte_has_come(setup: Setup) -> None:
    buffer = setup.buffer()
    located = setup.located(buffer, "w", 128, 100)
    for start, end in ((0, 40), (60, 100), (30, 59)):
        buffer.wrote(buffer.begin(located), located, start, end - start)
        assert not setup.names
    buffer.wrote(buffer.begin(located), located, 59, 1)
    assert setup.names == setup.told == ["w"]
    buffer.wrote(buffer.begin(located), located, 0, 100)
    assert setup.told == ["w"]  # once


def test_rows_count(setup: Setup) -> None:
    buffer = setup.buffer()
    located = setup.located(buffer, "w", 0, 100)
    for offset in (0, 5):
        assert not setup.names
        buffer.wrote_rows(buffer.begin(located), located, offset, 5, 10, 10)
    assert setup.names == ["w"]


def test_what_overlaps_is_replaced_from_the_first_byte_on(setup: Setup) -> None:
    buffer = setup.buffer()
    for name, start in (("a", 0), ("b", 100), ("c", 200), ("d", 300)):
        setup.push(buffer, name, start, 100)
    located = setup.located(buffer, "over", 150, 100)
    placed = buffer.begin(located)
    assert setup.names == ["a", "d"]
    buffer.wrote(placed, located, 0, 100)
    assert setup.names == ["a", "d", "over"]


@pytest.mark.parametrize("change", [{"type": 0, "ne": (25, 1, 1, 1), "nb": (4, 100, 100, 100)}, {"name": b"new"}])
def test_the_same_place_with_another_name_or_type_is_another_tensor(setup: Setup, change: dict[str, object]) -> None:
    buffer = setup.buffer()
    setup.push(buffer, "old", 0, 100)
    first = setup.registry.tensors["old"]
    located = setup.located(buffer, "old", 0, 100)
    changed = setup.table.locate(dataclasses.replace(located.tensor, **change))  # type: ignore[arg-type]
    buffer.wrote(buffer.begin(changed), changed, 0, 100)
    assert len(setup.told) == 2
    assert first not in setup.registry.tensors.values()


def test_a_spoiled_tensor_is_gone_until_written_whole(setup: Setup) -> None:
    buffer = setup.buffer()
    setup.push(buffer, "w", 0, 100)
    located = setup.located(buffer, "w", 0, 100)
    buffer.spoil(buffer.begin(located))
    assert not setup.names
    buffer.wrote(buffer.begin(located), located, 0, 99)
    assert not setup.names
    buffer.wrote(buffer.begin(located), located, 99, 1)
    assert setup.names == ["w"]


def test_freeing_ends_tensors_of_a_connection(setup: Setup) -> None:
    one, two = setup.buffer(), setup.buffer()
    setup.push(one, "a", 0, 10)
    setup.push(two, "b", 0, 10)
    setup.table.free(one.handle)
    assert setup.names == ["b"]
    setup.table.free_all()
    assert not setup.names


def test_freeing_keeps_tensors_of_a_process(keeping: Setup) -> None:
    buffer = keeping.buffer()
    assert buffer.memory.direct is not None
    buffer.memory.direct.write(0, memoryview(b"0123456789"))
    keeping.push(buffer, "a", 0, 10)
    keeping.push(buffer, "b", 16, 10)
    keeping.table.free_all()
    del buffer
    gc.collect()
    assert keeping.names == ["a", "b"]
    assert bytes(keeping.registry.tensors["a"].view()) == b"0123456789"
    assert eventually(lambda: keeping.capacity.free == TOTAL - 4096)
    # Pushed again: the new one takes the name when it is complete, and the last reference frees the memory.
    again = keeping.buffer()
    keeping.push(again, "a", 0, 10)
    assert keeping.registry.forget("b")
    gc.collect()
    assert eventually(lambda: keeping.capacity.free == TOTAL - 4096)
    assert keeping.names == ["a"]


def test_a_forgotten_tensor_counts_as_new_when_written_again(keeping: Setup) -> None:
    buffer = keeping.buffer()
    keeping.push(buffer, "a", 0, 10)
    keeping.registry.forget("a")
    located = keeping.located(buffer, "a", 0, 10)
    buffer.wrote(buffer.begin(located), located, 0, 5)
    assert not keeping.names
    buffer.wrote(buffer.begin(located), located, 5, 5)
    assert keeping.names == ["a"]
    assert keeping.told == ["a", "a"]


def test_clearing_ends_the_tensors_in_a_buffer(keeping: Setup) -> None:
    buffer = keeping.buffer()
    keeping.push(buffer, "a", 0, 10)
    buffer.forget_all()
    assert not keeping.names


def test_more_tensors_than_are_remembered(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    setup.registry.remembered = Tally(3)
    buffer = setup.buffer()
    for index in range(5):
        setup.push(buffer, str(index), index * 10, 10)
    assert setup.names == ["0", "1", "2"]
    assert len(caplog.records) == 1
    setup.push(buffer, "over all", 0, 50)
    assert setup.names == ["over all"]
    setup.push(buffer, "more", 50, 10)
    assert setup.names == ["more", "over all"]


def test_more_tensors_than_are_listed_whoever_pushed_them(
    keeping: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served_module, "MAX_TENSORS", 3)
    for client in range(3):
        table = keeping.another_client()
        buffer = table.allocate(0, 0)  # tensors without a byte cost no memory of anybody's
        assert buffer is not None
        for index in range(2):
            tensor = weight_tensor(f"{client}.{index}", 24, (0,), 0, buffer=buffer.handle, data=0)
            located = table.locate(tensor)
            buffer.wrote(buffer.begin(located), located, 0, 0)
        table.free_all()
    assert keeping.names == ["0.0", "0.1", "1.0"]
    assert len(keeping.told) == 6
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2  # one per client
    assert keeping.registry.forget("0.0")
    keeping.push(keeping.buffer(), "again", 0, 10)
    assert keeping.names == ["0.1", "1.0", "again"]
    assert keeping.registry.remembered.free == keeping.registry.remembered.total - 1


def test_nameless_tensors_keep_no_memory_when_their_client_leaves(keeping: Setup) -> None:
    buffer = keeping.buffer()
    keeping.push(buffer, "", 0, 10)
    keeping.push(buffer, "", 0, 10)
    assert keeping.told == [""]
    del buffer
    keeping.table.free_all()
    gc.collect()
    assert eventually(lambda: keeping.capacity.free == TOTAL)


@pytest.mark.parametrize(
    ("unusable", "said"),
    [
        (lambda nbytes, device: None, "of type NoneType, which is not derived"),
        (lambda nbytes, device: bytearray(nbytes), "of type bytearray, which is not derived"),
        (lambda nbytes, device: Forgetful(), "Forgetful has no nbytes; its __init__ must call"),
    ],
)
def test_a_factory_that_gives_no_destination(
    setup: Setup, caplog: pytest.LogCaptureFixture, unusable: Callable[[int, int], Any], said: str
) -> None:
    table = setup.another_client(unusable)
    for _ in range(3):
        assert table.allocate(100, 0) is None
    assert eventually(lambda: setup.capacity.free == TOTAL)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert said in caplog.text


def test_whatever_a_factory_raises_the_capacity_comes_back(setup: Setup) -> None:
    def leave(nbytes: int, device: int) -> Destination:
        raise SystemExit(3)

    table = setup.another_client(leave)
    with pytest.raises(SystemExit):
        table.allocate(100, 0)
    assert eventually(lambda: setup.capacity.free == TOTAL)
    assert len(table) == 0


def test_a_populator_that_fails_is_a_refusal(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(region: object) -> None:
        raise MemoryError

    monkeypatch.setattr(setup.populator, "add", fail)
    assert setup.table.allocate(100, 0) is None
    gc.collect()
    assert eventually(lambda: setup.capacity.free == TOTAL)


def test_buffers_of_all_clients_together_are_bounded(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "MAX_BUFFERS", 4)
    setup.capacity = Capacity(TOTAL)
    tables = [setup.another_client(), setup.another_client()]
    made = [table.allocate(nbytes, 0) for table in tables for nbytes in (0, 1)]
    assert all(made)
    assert tables[0].allocate(1, 0) is None
    assert tables[1].allocate(0, 0) is None
    assert made[0] is not None
    tables[0].free(made[0].handle)
    assert tables[1].allocate(0, 0) is not None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from("abc")), max_size=25))
def test_listed_tensors_never_overlap(steps: list[tuple[int, int, str]]) -> None:
    setup = Setup()
    buffer = setup.buffer(64)
    live: dict[tuple[int, int], str] = {}
    for start, nbytes, name in steps:
        setup.push(buffer, name, start, nbytes)
        span = (start, start + nbytes)
        live = {
            other: label
            for other, label in live.items()
            if other[1] <= span[0] or span[1] <= other[0] or (other == span and label == name)
        }
        live[span] = name
        assert set(setup.names) == set(live.values())
        listed: list[ServedTensor] = [one for same in setup.registry._by_name.values() for one in same]
        assert sorted((one._offset, one._offset + one.nbytes) for one in listed) == sorted(live)
    setup.table.free_all()
    assert not setup.names
    setup.populator.close()
