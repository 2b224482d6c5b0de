"""Host memory, and the base class of hooks."""

from __future__ import annotations

import gc

import pytest

from weightwire.server.destinations import Destination, HostMemory


class Recorder(Destination):
    """Keeps the bytes and the calls."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.data = bytearray(nbytes)
        self.calls: list[tuple[int, int]] = []

    def write(self, offset: int, view: memoryview) -> None:
        self.calls.append((offset, view.nbytes))
        self.data[offset : offset + view.nbytes] = view

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = self.data[offset : offset + view.nbytes]


def test_fill_goes_through_the_hook_in_order_once_per_byte() -> None:
    hook = Recorder(3 << 20)
    hook.fill(100, (2 << 20) + 7, 0xAB)
    assert hook.data == bytes(100) + b"\xab" * ((2 << 20) + 7) + bytes((1 << 20) - 107)
    assert [offset for offset, _ in hook.calls] == [100, 100 + (1 << 20), 100 + (2 << 20)]
    assert sum(nbytes for _, nbytes in hook.calls) == (2 << 20) + 7


def test_fill_of_nothing_does_nothing() -> None:
    hook = Recorder(10)
    hook.fill(10, 0, 1)
    assert hook.calls == []


def test_a_destination_cannot_be_negative_or_half_a_one() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        Recorder(-1)
    with pytest.raises(TypeError):
        Destination(1)  # type: ignore[abstract]


def test_memory_is_zero_and_takes_bytes() -> None:
    memory = HostMemory(10_000)
    memory.write(5, memoryview(b"hello"))
    back = bytearray(12)
    memory.read(3, memoryview(back))
    assert back == b"\0\0hello\0\0\0\0\0"
    memory.fill(4, 3, 0x41)
    assert bytes(memory.look(3, 6)) == b"\0AAAll"


def test_memory_whose_write_does_more_is_filled_through_it() -> None:
    class Watched(HostMemory):
        calls: list[tuple[int, int]]

        def write(self, offset: int, view: memoryview) -> None:
            self.calls.append((offset, view.nbytes))
            super().write(offset, view)

    memory = Watched(3 << 20)
    memory.calls = []
    memory.fill(7, 0, 1)
    assert memory.calls == []
    memory.fill(0, 3 << 20, 0)
    memory.fill(5, (1 << 20) + 1, 0xAB)
    assert memory.calls == [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, 1 << 20), (5, 1 << 20), (5 + (1 << 20), 1)]
    assert bytes(memory.look(4, (1 << 20) + 3)) == b"\0" + b"\xab" * ((1 << 20) + 1) + b"\0"


def test_memory_derived_for_something_else_still_fills_itself() -> None:
    class Counted(HostMemory):
        def close(self) -> None:
            super().close()

    memory = Counted(64 << 20)
    memory.fill(0, 64 << 20, 0)
    assert memory._pristine
    memory.fill(0, 10, 1)
    assert bytes(memory.look(0, 11)) == b"\1" * 10 + b"\0"


def test_filling_written_memory_with_zeros_really_does() -> None:
    memory = HostMemory(100)
    memory.fill(0, 100, 0)
    memory.write(50, memoryview(b"x"))
    memory.fill(0, 100, 0)
    assert bytes(memory.look(0, 100)) == bytes(100)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (0, 101), (100, 1), (1 << 64, 1)])
def test_outside_the_memory(offset: int, nbytes: int) -> None:
    memory = HostMemory(100)
    with pytest.raises(ValueError, match="not within"):
        memory.window(offset, nbytes)
    with pytest.raises(ValueError, match="not within"):
        memory.look(offset, nbytes)
    memory.write(0, memoryview(b"x"))
    if nbytes > 0:
        with pytest.raises(ValueError, match="not within"):
            memory.fill(offset, nbytes, 1)


def test_a_look_cannot_be_written_through() -> None:
    with pytest.raises(TypeError):
        HostMemory(10).look(0, 10)[0] = 1


def test_views_outlive_close_and_the_memory_goes_with_the_last() -> None:
    freed: list[str] = []
    memory = HostMemory(4096)
    memory.when_freed(lambda: freed.append("now"))
    memory.write(0, memoryview(b"still here"))
    view = memory.look(0, 10)
    memory.close()
    memory.close()
    gc.collect()
    assert not freed
    assert bytes(view) == b"still here"
    with pytest.raises(ValueError, match="given back"):
        memory.window(0, 1)
    with pytest.raises(ValueError, match="given back"):
        _ = memory.region
    del view
    gc.collect()
    assert freed == ["now"]


def test_more_memory_than_there_is() -> None:
    with pytest.raises(MemoryError):
        HostMemory(1 << 62)
