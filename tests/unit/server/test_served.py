"""Served tensors and their registry."""

from __future__ import annotations

import gc
import logging
import threading

import numpy as np
import pytest

from weightwire.errors import ConfigError
from weightwire.server import Server
from weightwire.server.buffers import Block
from weightwire.server.capacity import Capacity
from weightwire.server.destinations import Destination, HostMemory
from weightwire.server.served import Registry, ServedTensor
from weightwire.wire import RpcTensor, weight_tensor
from weightwire.wire.types import TYPES, contiguous_nbytes

PLAIN = {"f32": "<f4", "f16": "<f2", "f64": "<f8", "i8": "|i1", "i16": "<i2", "i32": "<i4", "i64": "<i8"}
CODES = {entry.name: code for code, entry in TYPES.items()}


class Remote(Destination):
    """Memory that is not the host's: every access is a call."""

    closed = 0

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.data = bytearray(nbytes)

    def write(self, offset: int, view: memoryview) -> None:
        self.data[offset : offset + view.nbytes] = view

    def read(self, offset: int, view: memoryview) -> None:
        view[:] = self.data[offset : offset + view.nbytes]

    def close(self) -> None:
        self.closed += 1


def block_of(destination: Destination) -> Block:
    return Block(destination, destination.nbytes, Capacity(1 << 30), None)


def served(name: str = "x", block: Block | None = None) -> ServedTensor:
    block = block or block_of(HostMemory(64))
    return ServedTensor(weight_tensor(name, 24, (64,), 64, buffer=1, data=0), block, 0, 64)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_types_are_arrays_without_a_copy(name: str) -> None:
    expected = np.arange(2 * 3 * 5, dtype=PLAIN[name]).reshape(2, 3, 5)
    memory = HostMemory(4096)
    memory.write(64, memoryview(expected.tobytes()))
    tensor = weight_tensor("w", CODES[name], (5, 3, 2), expected.nbytes, buffer=1, data=64)
    found = ServedTensor(tensor, block_of(memory), 64, expected.nbytes)
    assert (found.name, found.type_name, found.type_code) == ("w", name, CODES[name])
    assert found.ne == (5, 3, 2)
    assert found.shape == (2, 3, 5)
    assert found.nbytes == expected.nbytes
    array = found.numpy()
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)
    assert not array.flags.writeable
    memory.write(64, memoryview(bytes(8)))
    assert array.reshape(-1).view(np.uint8)[:8].tolist() == [0] * 8  # the memory itself, not a copy


@pytest.mark.parametrize("name", sorted(set(CODES) - set(PLAIN)))
def test_other_types_are_bytes(name: str) -> None:
    entry = TYPES[CODES[name]]
    ne = (entry.block * 2, 3)
    nbytes = contiguous_nbytes(entry.code, ne)
    memory = HostMemory(nbytes)
    memory.write(0, memoryview(bytes(index % 251 for index in range(nbytes))))
    found = ServedTensor(weight_tensor("q", entry.code, ne, nbytes, buffer=1, data=0), block_of(memory), 0, nbytes)
    assert bytes(found.view()) == bytes(index % 251 for index in range(nbytes))
    with pytest.raises(TypeError, match=f"'q' is {entry.name}"):
        found.numpy()


def test_strides_are_kept() -> None:
    base = np.arange(24, dtype="<f4").reshape(4, 6)
    memory = HostMemory(base.nbytes)
    memory.write(0, memoryview(base.tobytes()))
    # The left three columns of every row.
    tensor = RpcTensor(id=1, type=0, buffer=1, ne=(3, 4, 1, 1), nb=(4, 24, 96, 96), data=0, name=b"view")
    found = ServedTensor(tensor, block_of(memory), 0, tensor.nbytes)
    np.testing.assert_array_equal(found.numpy(), base[:, :3])


def test_no_elements() -> None:
    tensor = RpcTensor(id=1, type=0, buffer=1, ne=(0, 3, 1, 1), nb=(4, 0, 0, 0), name=b"none")
    found = ServedTensor(tensor, None, 0, 0)
    assert found.numpy().shape == found.shape == (3, 0)
    assert bytes(found.view()) == b""


def test_a_scalar_has_one_dimension() -> None:
    assert ServedTensor(weight_tensor("s", 0, (1,), 4, buffer=1, data=0), block_of(HostMemory(4)), 0, 4).shape == (1,)


def test_memory_elsewhere_is_read_back_through_its_hook() -> None:
    remote = Remote(64)
    block = block_of(remote)
    found = served(block=block)
    remote.write(3, memoryview(b"abc"))
    assert bytes(found.view()) == bytes(3) + b"abc" + bytes(58)
    with pytest.raises(TypeError):
        found.view()[0] = 1
    assert found.numpy()[3] == ord("a")
    block.drop()
    with pytest.raises(ValueError, match="'x' has been closed"):
        found.view()


def test_memory_with_another_read_is_not_bypassed() -> None:
    class Inverted(HostMemory):
        def read(self, offset: int, view: memoryview) -> None:
            super().read(offset, view)
            view[:] = bytes(byte ^ 0xFF for byte in view)

    assert bytes(served(block=block_of(Inverted(64))).view()) == b"\xff" * 64


def test_an_array_keeps_its_memory_alive() -> None:
    freed: list[int] = []
    memory = HostMemory(64)
    memory.when_freed(lambda: freed.append(1))
    block = block_of(memory)
    array = served(block=block).numpy()
    block.drop()
    del memory, block
    gc.collect()
    assert not freed
    assert array.sum() == 0
    del array
    gc.collect()
    assert freed


class TestRegistry:
    """By name."""

    def test_is_a_live_read_only_mapping(self) -> None:
        registry = Registry(keep=False, on_tensor=None)
        names = registry.tensors
        assert len(names) == 0
        assert "x" not in names
        one = served("x")
        registry.add(one)
        registry.add(served("y"))
        assert names["x"] is one
        assert list(names) == ["x", "y"]
        assert dict(names)["x"] is one
        assert names.get("z") is None
        assert 5 not in names  # type: ignore[comparison-overlap]
        with pytest.raises(KeyError, match="z"):
            names["z"]
        with pytest.raises(TypeError):
            names["x"] = one  # type: ignore[index]
        registry.remove(one)
        registry.remove(one)
        assert list(names) == ["y"]
        registry.close()
        assert not names
        late = served("late")
        registry.add(late)
        assert not names
        registry.remove(late)

    def test_the_last_of_one_name_is_found_and_then_the_one_before(self) -> None:
        registry = Registry(keep=False, on_tensor=None)
        first, second = served(), served()
        registry.add(first)
        registry.add(second)
        assert registry.tensors["x"] is second
        registry.remove(second)
        assert registry.tensors["x"] is first

    def test_kept_ones_are_replaced_and_let_go(self) -> None:
        registry = Registry(keep=True, on_tensor=None)
        old, new = Remote(64), Remote(64)
        blocks = [block_of(old), block_of(new)]
        for block in blocks:
            registry.add(served(block=block))
            block.drop()  # its client has gone
        assert (old.closed, new.closed) == (1, 0)
        assert registry.forget("x")
        assert not registry.forget("x")
        assert (old.closed, new.closed) == (1, 1)

    def test_nameless_tensors_are_announced_only(self) -> None:
        told: list[ServedTensor] = []
        registry = Registry(keep=False, on_tensor=told.append)
        nameless = served("")
        registry.add(nameless)
        assert told == [nameless]
        assert not registry.tensors
        registry.remove(nameless)

    @pytest.mark.parametrize("name", ["blk.0." + "long" * 20, "ü" * 40, "x" * 62 + "é"])
    def test_a_long_name_is_found_as_its_client_calls_it(self, name: str) -> None:
        registry = Registry(keep=False, on_tensor=None)
        one = served(name)
        assert len(one.name.encode()) <= 63
        registry.add(one)
        assert registry.tensors[name] is registry.tensors[one.name] is one
        assert name in registry.tensors
        assert name + "x" not in registry.tensors
        assert list(registry.tensors) == [one.name]
        assert registry.forget(name)
        assert not registry.tensors

    def test_a_name_that_grows_in_decoding_is_found(self) -> None:
        registry = Registry(keep=False, on_tensor=None)
        tensor = RpcTensor(id=1, type=24, buffer=1, ne=(64, 1, 1, 1), nb=(1, 64, 64, 64), name=b"\xff" * 60)
        one = ServedTensor(tensor, block_of(HostMemory(64)), 0, 64)
        registry.add(one)
        assert len(one.name.encode()) > 63
        assert registry.tensors[one.name] is one

    def test_a_great_many_of_one_name_are_taken_out_quickly(self) -> None:
        registry = Registry(keep=False, on_tensor=None)
        block = block_of(HostMemory(64))
        many = [served("x", block) for _ in range(50_000)]
        for one in many:
            registry.add(one)
        for one in reversed(many):  # quadratic, this took minutes
            registry.remove(one)
        assert not registry.tensors

    def test_a_failing_callback_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        def fail(tensor: ServedTensor) -> None:
            raise RuntimeError("no thanks")

        registry = Registry(keep=False, on_tensor=fail)
        registry.add(served())
        assert "x" in registry.tensors
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert "no thanks" in caplog.text

    def test_a_callback_may_use_the_registry(self) -> None:
        registry: Registry = Registry(keep=True, on_tensor=lambda tensor: registry.forget(tensor.name))
        registry.add(served())
        assert not registry.tensors

    def test_iterating_while_others_add_and_remove(self) -> None:
        registry = Registry(keep=False, on_tensor=None)
        block = block_of(HostMemory(64))
        stop = threading.Event()
        failures: list[Exception] = []

        def churn(prefix: str) -> None:
            while not stop.is_set():
                batch = [served(f"{prefix}{index}", block) for index in range(20)]
                for one in batch:
                    registry.add(one)
                for one in batch:
                    registry.remove(one)

        threads = [threading.Thread(target=churn, args=(prefix,)) for prefix in "ab"]
        for thread in threads:
            thread.start()
        try:
            for _ in range(500):
                for name in registry.tensors:
                    registry.tensors.get(name)
        except Exception as error:
            failures.append(error)
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert not registry.tensors


def test_what_is_no_name() -> None:
    with Server(port=0) as server:
        for name in (5, None, b"x"):
            with pytest.raises(KeyError):
                server.tensors[name]  # type: ignore[index]
            assert server.tensors.get(name) is None  # type: ignore[call-overload]
            with pytest.raises(ConfigError, match="no tensor's name"):
                server.forget(name)  # type: ignore[arg-type]
        for lone in ("\ud800", "\ud800" * 100):
            assert lone not in server.tensors
            assert not server.forget(lone)
