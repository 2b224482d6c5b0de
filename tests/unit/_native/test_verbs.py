from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fakeverbs import LOC_LEN_ERR, LOC_PROT_ERR, RNR_RETRY_EXC_ERR, SUCCESS, FakeVerbs

from weightwire._native._verbs import (
    CompletionQueue,
    Context,
    Device,
    MemoryRegion,
    ProtectionDomain,
    QueuePair,
    devices,
)
from weightwire.errors import RdmaUnavailable, TransportError, VerbsError

LOCAL = bytes(10) + b"\xff\xff" + bytes((127, 0, 0, 1))


class Side:
    """One queue pair and what it is made of."""

    def __init__(self, context: Context, nbytes: int = 4096, *, sends: int = 4, receives: int = 4) -> None:
        self.context = context
        self.domain = ProtectionDomain(context)
        self.send_queue = CompletionQueue(context, 16)
        self.receive_queue = CompletionQueue(context, 16)
        self.memory = bytearray(nbytes)
        self.region = MemoryRegion(self.domain, self.memory)
        self.pair = QueuePair(self.domain, self.send_queue, self.receive_queue, sends=sends, receives=receives)

    def connect(self, other: Side) -> None:
        self.pair.to_init(1)
        other.pair.to_init(1)
        for one, peer in ((self, other), (other, self)):
            number = peer.pair.number
            one.pair.to_receive(port=1, gid_index=2, mtu=3, number=number, psn=number & 0xFFFFFF, gid=LOCAL)
        for one in (self, other):
            one.pair.to_send(one.pair.number & 0xFFFFFF)

    def close(self) -> None:
        for handle in (self.pair, self.region, self.send_queue, self.receive_queue, self.domain):
            handle.close()


@pytest.fixture
def sides(fake: FakeVerbs) -> Iterator[tuple[Side, Side]]:
    with Context(devices()[0]) as context:
        one, other = Side(context), Side(context)
        one.connect(other)
        yield one, other
        one.close()
        other.close()


def test_bytes_move(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.memory[100:105] = b"hello"
    other.pair.post_receive(other.region, 1000, 64, id=7)
    one.pair.post_send(one.region, 100, 5, id=9)
    assert one.send_queue.poll() == [(9, SUCCESS, 0, 0, False)]
    assert other.receive_queue.poll() == [(7, SUCCESS, 0, 5, True)]
    assert other.receive_queue.poll() == []
    assert other.memory[1000:1006] == b"hello\0"


def test_a_send_nobody_waits_for_waits(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.pair.post_send(one.region, 0, 10)
    assert one.send_queue.poll() == []
    other.pair.post_receive(other.region, 0, 10)
    assert [done[1] for done in one.send_queue.poll()] == [SUCCESS]


@pytest.mark.parametrize(("room", "status"), [(9, LOC_LEN_ERR), (10, SUCCESS)])
def test_a_receive_that_is_too_small(sides: tuple[Side, Side], room: int, status: int) -> None:
    one, other = sides
    other.pair.post_receive(other.region, 0, room, id=3)
    one.pair.post_send(one.region, 0, 10)
    ((id, got, vendor, nbytes, received),) = other.receive_queue.poll()
    assert (id, got) == (3, status)
    if status != SUCCESS:
        assert (nbytes, received) == (0, False)
        assert vendor != 0
        assert other.receive_queue.text(got) == "local length error"


def test_what_the_device_may_not_write(fake: FakeVerbs) -> None:
    context = Context(devices()[0])
    one, other = Side(context), Side(context)
    one.connect(other)
    readable = MemoryRegion(other.domain, b"x" * 64, writable=False)
    other.pair.post_receive(readable, 0, 64)
    one.pair.post_send(one.region, 0, 10)
    assert [done[1] for done in other.receive_queue.poll()] == [LOC_PROT_ERR]


def test_a_region_outlives_neither_its_domain_nor_its_use(fake: FakeVerbs) -> None:
    context = Context(devices()[0])
    domain = ProtectionDomain(context)
    region = MemoryRegion(domain, bytearray(4096))
    domain.close()
    context.close()
    assert domain.closed
    assert fake.handles() == {"contexts": 1, "pds": 1, "mrs": 1, "pinned": 4096}
    with pytest.raises(VerbsError, match="is closed"):
        MemoryRegion(domain, bytearray(10))
    region.close()
    assert fake.handles() == {}


def test_everything_closes_in_any_order(fake: FakeVerbs) -> None:
    context = Context(devices()[0])
    side = Side(context)
    for handle in (context, side.domain, side.send_queue, side.region, side.receive_queue, side.pair):
        assert fake.handles()
        handle.close()
        handle.close()
    assert fake.handles() == {}


def test_everything_goes_with_its_last_reference(fake: FakeVerbs) -> None:
    side = Side(Context(devices()[0]))
    pair = side.pair
    del side
    assert fake.handles() == {"contexts": 1, "pds": 1, "cqs": 2, "channels": 2, "qps": 1}
    del pair
    assert fake.handles() == {}


def test_a_context_manager_closes(fake: FakeVerbs) -> None:
    with Context(devices()[0]) as context, ProtectionDomain(context) as domain, MemoryRegion(domain, bytearray(64)):
        assert fake.get("mrs") == 1
    assert fake.handles() == {}


def test_the_buffer_is_held_as_long_as_it_is_pinned(fake: FakeVerbs) -> None:
    with Context(devices()[0]) as context, ProtectionDomain(context) as domain:
        memory = bytearray(64)
        region = MemoryRegion(domain, memory)
        assert region.nbytes == 64
        with pytest.raises(BufferError):
            memory.clear()
        region.close()
        assert region.nbytes == 0
        memory.clear()


@pytest.mark.parametrize(
    ("fault", "operation", "code"),
    [
        ("open_device:EIO", "ibv_open_device", errno.EIO),
        ("alloc_pd:ENOMEM", "ibv_alloc_pd", errno.ENOMEM),
        ("create_comp_channel:EPERM", "ibv_create_comp_channel", errno.EPERM),
        ("create_cq:EINVAL", "ibv_create_cq", errno.EINVAL),
        ("reg_mr:ENOMEM", "ibv_reg_mr", errno.ENOMEM),
        ("create_qp:ENOMEM", "ibv_create_qp", errno.ENOMEM),
    ],
)
def test_a_call_that_fails(fake: FakeVerbs, fault: str, operation: str, code: int) -> None:
    fake.fault(fault)
    with pytest.raises(VerbsError) as caught:
        Side(Context(devices()[0]))
    assert isinstance(caught.value, TransportError)
    assert (caught.value.operation, caught.value.errno) == (operation, code)
    assert os.strerror(code) in str(caught.value)


@pytest.mark.parametrize("state", ["INIT", "RTR", "RTS"])
def test_a_step_that_is_refused(fake: FakeVerbs, state: str) -> None:
    context = Context(devices()[0])
    one, other = Side(context), Side(context)
    fake.fault(f"modify_qp:{state}:ETIMEDOUT")
    with pytest.raises(VerbsError) as caught:
        one.connect(other)
    assert (caught.value.operation, caught.value.errno) == (f"ibv_modify_qp to {state}", errno.ETIMEDOUT)


def test_inline_refused_is_asked_for_no_more(fake: FakeVerbs) -> None:
    context = Context(devices()[0])
    assert Side(context).pair.inline == 256
    fake.set("max_inline", 0)
    assert Side(context).pair.inline == 0
    fake.fault("create_qp:PLAIN:EIO")
    with pytest.raises(VerbsError) as caught:
        Side(context)
    assert caught.value.errno == errno.EIO


def test_more_than_the_queue_holds(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    for _ in range(4):
        one.pair.post_send(one.region, 0, 1)
    with pytest.raises(VerbsError) as caught:
        one.pair.post_send(one.region, 0, 1)
    assert (caught.value.operation, caught.value.errno) == ("ibv_post_send", errno.ENOMEM)


def test_a_pair_in_error_flushes(sides: tuple[Side, Side]) -> None:
    one, other = sides
    other.pair.post_receive(other.region, 0, 10)
    other.pair.to_error()
    assert [done[1] for done in other.receive_queue.poll()] == [5]
    one.pair.post_send(one.region, 0, 1)
    assert [one.send_queue.text(done[1]) for done in one.send_queue.poll()] == ["transport retry counter exceeded"]


def test_the_stand_in_knows_rnr(fake: FakeVerbs, sides: tuple[Side, Side]) -> None:
    one, _ = sides
    one.pair.post_send(one.region, 0, 1)
    fake.fail_pair(one.pair.number, RNR_RETRY_EXC_ERR)
    assert [done[1] for done in one.send_queue.poll()] == [RNR_RETRY_EXC_ERR]


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 4097), (4097, 0), (4096, 1), (2**63, 1)])
def test_outside_the_region(sides: tuple[Side, Side], offset: int, nbytes: int) -> None:
    one, _ = sides
    for post in (one.pair.post_send, one.pair.post_receive):
        with pytest.raises(ValueError, match="outside a region"):
            post(one.region, offset, nbytes)


def test_closed_things_say_so(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    one.region.close()
    with pytest.raises(VerbsError, match="the MemoryRegion is closed"):
        one.pair.post_send(one.region, 0, 1)
    one.pair.close()
    with pytest.raises(VerbsError, match="the QueuePair is closed"):
        one.pair.to_error()
    one.send_queue.close()
    with pytest.raises(VerbsError, match="the CompletionQueue is closed"):
        one.send_queue.poll()
    assert one.send_queue.fileno() == -1


def test_bad_arguments(fake: FakeVerbs) -> None:
    with pytest.raises(TypeError, match="devices"):
        Device()
    with Context(devices()[0]) as context, ProtectionDomain(context) as domain:
        with pytest.raises(TypeError, match="writable"):
            MemoryRegion(domain, b"read-only")
        with pytest.raises(ValueError, match="contiguous"):
            MemoryRegion(domain, memoryview(bytes(64))[::2], writable=False)
        with pytest.raises(ValueError, match="empty"):
            MemoryRegion(domain, bytearray())
        with pytest.raises(TypeError):
            MemoryRegion(None, bytearray(1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="made once"):
            domain.__init__(context)  # type: ignore[misc]
        side = Side(context)
        side.pair.to_init(1)
        for gid, index in ((LOCAL[1:], 2), (LOCAL, 256), (LOCAL, -1)):
            with pytest.raises(ValueError, match="16 bytes"):
                side.pair.to_receive(port=1, gid_index=index, mtu=3, number=1, psn=1, gid=gid)


def test_a_device_that_has_gone(fake: FakeVerbs) -> None:
    fake.set("devices", 2)
    second = devices()[1]
    fake.set("devices", 1)
    with pytest.raises(VerbsError) as caught:
        Context(second)
    assert caught.value.errno == errno.ENODEV


@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_all_devices_are_found(fake: FakeVerbs, count: int) -> None:
    fake.set("devices", count)
    assert [device.name for device in devices()] == [f"fake{number}" for number in range(count)]


def wait_until_inside(fake: FakeVerbs) -> None:
    deadline = time.monotonic() + 60
    while not fake.get("inside"):
        assert time.monotonic() < deadline, "the call never came"
        time.sleep(0.001)


@pytest.mark.parametrize("ask", [lambda context: context.port(1)[0], lambda context: context.port_count])
def test_a_device_closed_while_it_is_asked(fake: FakeVerbs, ask: Callable[[Context], int]) -> None:
    context = Context(devices()[0])
    expected = ask(context)
    fake.set("hold", 1)
    with ThreadPoolExecutor(1) as pool:
        try:
            asking = pool.submit(ask, context)
            wait_until_inside(fake)
            context.close()
            assert fake.handles() == {"contexts": 1}, "it is in use"
        finally:
            fake.set("hold", 0)
        assert asking.result(60) == expected
    assert fake.handles() == {}


@pytest.mark.parametrize("step", ["to_init", "to_receive", "to_send", "to_error"])
def test_a_pair_closed_while_it_is_changed(fake: FakeVerbs, step: str) -> None:
    with Context(devices()[0]) as context:
        one, other = Side(context), Side(context)
        number = other.pair.number
        steps: dict[str, Callable[[], None]] = {
            "to_init": lambda: one.pair.to_init(1),
            "to_receive": lambda: one.pair.to_receive(port=1, gid_index=2, mtu=3, number=number, psn=1, gid=LOCAL),
            "to_send": lambda: one.pair.to_send(1),
            "to_error": lambda: one.pair.to_error(),
        }
        for before in list(steps)[: list(steps).index(step)]:
            steps[before]()
        fake.set("hold", 1)
        with ThreadPoolExecutor(1) as pool:
            try:
                changing = pool.submit(steps[step])
                wait_until_inside(fake)
                one.pair.close()
                assert fake.get("qps") == 2, "it is in use"
            finally:
                fake.set("hold", 0)
            changing.result(60)
        assert fake.get("qps") == 1
        one.close()
        other.close()


@pytest.mark.parametrize("port", [-1, 257])
def test_a_port_that_no_device_can_have(fake: FakeVerbs, port: int) -> None:
    with Context(devices()[0]) as context:
        side = Side(context)
        for ask in (lambda: context.port(port), lambda: context.gid(port, 2), lambda: side.pair.to_init(port)):
            with pytest.raises(VerbsError) as caught:
                ask()
            assert caught.value.errno == errno.EINVAL
        fake.fault("query_gid_ex:EOPNOTSUPP")
        with pytest.raises(VerbsError):
            context.gid(port, 2)
        side.pair.to_init(1)
        with pytest.raises(VerbsError):
            side.pair.to_receive(port=port, gid_index=2, mtu=3, number=1, psn=1, gid=LOCAL)
        side.close()


def test_a_queue_that_was_never_made_knows_what_a_status_means(fake: FakeVerbs) -> None:
    assert CompletionQueue.__new__(CompletionQueue).text(LOC_LEN_ERR) == "local length error"


def run_python(text: str, library: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WEIGHTWIRE_LIBIBVERBS": library}
    return subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


ASK = """
from weightwire.errors import RdmaUnavailable
from weightwire._native import _verbs
for _ in range(2):
    try:
        print(_verbs.devices())
    except RdmaUnavailable as error:
        print(error.operation, error)
"""


def test_without_the_library(tmp_path: Path) -> None:
    done = run_python(ASK, str(tmp_path / "none.so"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("dlopen libibverbs cannot be used") and "none.so" in line for line in lines)


def test_a_library_that_lacks_a_function(tmp_path: Path) -> None:
    import _ctypes

    done = run_python(ASK, _ctypes.__file__)
    assert done.returncode == 0, done.stderr
    assert "has no ibv_get_device_list" in done.stdout


def test_opened_by_many_threads_at_once(fake_library: FakeVerbs) -> None:
    done = run_python(
        "import threading\nfrom weightwire._native import _verbs\nfound = []\nstart = threading.Barrier(8)\n"
        "def look():\n    start.wait()\n    found.append(len(_verbs.devices()))\n"
        "threads = [threading.Thread(target=look) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n[thread.join() for thread in threads]\nprint(found)\n",
        str(fake_library.library),
    )
    assert done.stdout == f"{[1] * 8}\n", done.stderr


FORK = """
import os, signal, threading, time
from weightwire._native import _verbs
begun, begin = os.pipe()
os.environ["FAKE_VERBS_BEGUN"] = str(begin)
opening = threading.Thread(target=_verbs.devices)
opening.start()
os.read(begun, 1)
child = os.fork()
if child == 0:
    os._exit(len(_verbs.devices()))
opening.join()
deadline = time.monotonic() + 30
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
    time.sleep(0.01)
if ended == (0, 0):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "it waits for ever")
"""


def test_a_fork_while_another_thread_opens_the_library(fake_library: FakeVerbs) -> None:
    done = run_python(FORK, str(fake_library.library))
    assert done.stdout == "1\n", done.stderr


def test_importing_opens_nothing() -> None:
    done = run_python(
        "import weightwire, weightwire.rdma, weightwire._native._verbs, weightwire._native._link\n"
        "print([line for line in open('/proc/self/maps') if 'ibverbs' in line])\n",
        "/nonexistent/libibverbs.so.1",
    )
    assert done.stdout == "[]\n", done.stderr


def test_unavailable_is_a_transport_error() -> None:
    error = RdmaUnavailable("RDMA cannot be used: no device", reason="no device")
    assert isinstance(error, TransportError)
    assert error.reason == "no device"
    assert RdmaUnavailable("words").reason == "words"
