"""What a push puts on the wire, byte for byte, in every version's shape."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scripted import Message, ScriptedServer, StandIn

from weightwire import connect, fnv1a64
from weightwire.client import PushResult
from weightwire.client.channel import Channel

VERSIONS = [(1, 0, 0), (2, 0, 0), (3, 0, 0), (3, 6, 1), (5, 0, 0), (6, 0, 0), (7, 0, 0), (8, 0, 0)]
MIB = 1 << 20
F32, Q4_0, Q4_K, I8, MXFP4 = 0, 2, 12, 24, 39

versions = pytest.mark.parametrize("version", VERSIONS, ids=[".".join(map(str, v)) for v in VERSIONS])


def payload_of(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def gguf(path: Path, tensors: list[tuple[str, int, tuple[int, ...], bytes]]) -> Path:
    """Write a GGUF file by hand: version 3, alignment 32, no metadata."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0)
    offset = 0
    body = b""
    for name, kind, ne, data in tensors:
        text = name.encode()
        head += struct.pack("<Q", len(text)) + text + struct.pack("<I", len(ne)) + struct.pack(f"<{len(ne)}Q", *ne)
        head += struct.pack("<IQ", kind, offset)
        body += data + bytes(-len(data) % 32)
        offset = len(body)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def tensor(
    name: str, kind: int, ne: tuple[int, int, int, int], nb: tuple[int, int, int, int], buffer: int, data: int
) -> bytes:
    """rpc_tensor by hand, from section 2 of the protocol."""
    out = bytearray(296)
    struct.pack_into("<QIQ4I4I", out, 0, 1, kind, buffer, *ne, *nb)
    struct.pack_into("<Q64s", out, 220, data, name.encode())
    return bytes(out)


def run(stand_in: StandIn, model: object, **options: object) -> PushResult:
    scripts = [stand_in] * (2 if stand_in.version[0] < 4 else 1)
    with ScriptedServer(*scripts) as server, connect(server.endpoint, timeout=20) as connection:
        return connection.push(model, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("probe", [None, True, False])
@versions
def test_every_message(version: tuple[int, int, int], probe: bool | None, tmp_path: Path) -> None:
    small, odd, whole, large = (
        payload_of(n, s) for n, s in ((4 * 12, 1), (18 * 3 * 2, 2), (144 * 2 * 2, 3), (12 * MIB, 4))
    )
    path = gguf(
        tmp_path / "model.gguf",
        [
            ("norm", F32, (4, 3), small),
            ("odd", Q4_0, (96, 2), odd),  # 96 % 512: padded by some servers
            ("whole", Q4_K, (512, 2), whole),
            ("large", I8, (4096, 3072), large),
        ],
    )
    server = StandIn(version, alignment=128, padding=64)
    run(server, path, cache="always", probe=probe)

    device = struct.pack("<I", 0) if version >= (3,) else b""
    handle, base = 0x1000, 1 << 40
    hole = bytes(10 * 296) if version >= (3, 6) else b""
    flag = [b"", b""] if version < (7,) else [b"\0", b"\1"]
    # odd has 108 bytes and takes 172, so whole starts at 128 + 256.
    norm = tensor("norm", F32, (4, 3, 1, 1), (4, 16, 48, 48), handle, base)
    quant = ("odd", Q4_0, (96, 2, 1, 1), (18, 54, 108, 108))
    k = tensor("whole", Q4_K, (512, 2, 1, 1), (144, 288, 576, 576), handle, base + 384)
    big = tensor("large", I8, (4096, 3072, 1, 1), (1, 4096, 12 * MIB, 12 * MIB), handle, base + 1024)
    zero = struct.pack("<Q", 0)
    edge, last = bytes(255 - byte for byte in large), struct.pack("<Q", 12 * MIB - 128)
    poison = [Message(6, big + flag[0] + last + edge[-128:]), Message(6, big + flag[0] + zero + edge[:128])]
    looks = [Message(8, big + at + struct.pack("<Q", 128)) for at in (last, zero)]
    expected = [
        *([Message(15, b"")] if version >= (3,) else []),
        Message(1, device),
        Message(2, device),
        Message(13, device + tensor(*quant, 0, 0) + hole),
        Message(0, device + struct.pack("<Q", 1024 + 12 * MIB)),
        Message(3, struct.pack("<Q", handle)),
        Message(12, tensor(*quant, handle, base + 128)),
        *(poison if probe is not False else []),
        Message(7, big + zero + struct.pack("<Q", fnv1a64(large))),
        *(looks if probe is not False else []),
        Message(6, norm + flag[0] + zero + small),
        Message(6, tensor(*quant, handle, base + 128) + flag[0] + zero + odd),
        Message(6, k + flag[0] + zero + whole),
        Message(6, big + flag[1] + zero + large),
        Message(1, device),
    ]
    assert [m.command for m in server.requests] == [m.command for m in expected]
    for at, (got, wanted) in enumerate(zip(server.requests, expected, strict=True)):
        assert got == wanted, f"message {at}"


@versions
def test_bytes_arrive_and_are_read_back(version: tuple[int, int, int], tmp_path: Path) -> None:
    """Small and large, from files and from memory, across several buffers, with verify."""
    sizes = [4, 65_535, 65_536, 65_537, 3 * MIB, 10 * MIB, 10 * MIB + 4, 0, 8]
    data = {f"t{i}": np.frombuffer(payload_of(n // 4 * 4, i), "<i4") for i, n in enumerate(sizes)}
    path = gguf(tmp_path / "m.gguf", [(n, 26, a.shape, a.tobytes()) for n, a in data.items() if a.size])
    for model in (data, path):
        server = StandIn(version, alignment=32, max_size=12 * MIB)
        result = run(server, model, cache="always", verify=True)
        assert result.summary.verified
        assert len(server.buffers) == 3
        assert result.summary.misses == 1
        for name, remote in result.items():
            memory = server.buffers[remote.buffer.handle]
            assert bytes(memory[remote.offset : remote.offset + remote.nbytes]) == data[name].tobytes()


def test_small_tensors_are_never_sent_with_a_wrong_neighbour(tmp_path: Path) -> None:
    """Many small tensors out of one window, large ones between, in the file's order and not that of the names."""
    rng = np.random.default_rng(5)
    entries = []
    for index in range(900):
        nbytes = int(rng.choice([4, 100, 5_000, 60_000, 70_000, 300_000], p=[0.3, 0.3, 0.2, 0.1, 0.05, 0.05]))
        entries.append((f"z{rng.integers(1 << 30)}.{index}", I8, (nbytes,), rng.bytes(nbytes)))
    server = StandIn()
    result = run(server, gguf(tmp_path / "m.gguf", entries))
    assert [m.payload[228:292].rstrip(b"\0").decode() for m in server.of(6)] == [name for name, *_ in entries]
    for message, (_, _, _, data) in zip(server.of(6), entries, strict=True):
        assert message.payload[305:] == data
    assert list(result) == [name for name, *_ in entries]


def test_a_type_the_version_may_not_know_goes_as_bytes(tmp_path: Path) -> None:
    data = payload_of(17 * 6, 1)
    path = gguf(tmp_path / "m.gguf", [("w", MXFP4, (96, 2), data)])
    old, new = StandIn((2, 0, 0)), StandIn((3, 0, 0))
    for server in (old, new):
        result = run(server, path, verify=True)
        assert result["w"].type_code == MXFP4
    assert struct.unpack_from("<I", old.of(6)[0].payload, 8) == (I8,)
    assert struct.unpack_from("<I", new.of(6)[0].payload, 8) == (MXFP4,)
    assert 12 not in old.commands, "bytes have no rows to pad"
    assert 12 in new.commands


def test_rows_of_512_are_neither_asked_about_nor_initialised(tmp_path: Path) -> None:
    server = StandIn()
    run(
        server, gguf(tmp_path / "m.gguf", [("w", Q4_K, (1024, 2), payload_of(144 * 8, 1)), ("v", F32, (3,), bytes(12))])
    )
    assert 12 not in server.commands
    assert 13 not in server.commands


@pytest.mark.parametrize(
    ("flags", "cache", "asks"),
    [(0, "auto", 0), (1, "auto", 1), (0, "always", 1), (1, "never", 0), (2, "auto", 0)],
)
def test_when_the_cache_is_asked(flags: int, cache: str, asks: int) -> None:
    server = StandIn(flags=flags)
    result = run(
        server,
        {"w": np.zeros(10 * MIB + 1, np.uint8), "at the limit": np.zeros(10 * MIB, np.uint8)},
        cache=cache,
        probe=False,
    )
    assert len(server.of(7)) == asks
    assert [m.payload[296] for m in server.of(6)] == [asks, 0]
    assert result.summary.misses == asks


@versions
def test_hits_are_not_sent(version: tuple[int, int, int]) -> None:
    arrays = {f"w{i}": np.frombuffer(payload_of(11 * MIB, i), np.uint8) for i in range(11)}
    arrays["small"] = np.arange(5, dtype=np.uint8)
    have = {name: array.tobytes() for name, array in arrays.items() if name in ("w0", "w3", "w4", "w9")}
    server = StandIn(version, cache={fnv1a64(data): data for data in have.values()})
    seen: list[tuple[str, int, int]] = []
    result = run(server, arrays, cache="always", verify=True, probe=False, progress=lambda *call: seen.append(call))
    summary = result.summary
    assert (summary.hits, summary.misses) == (4, 7)
    assert summary.sent == 7 * 11 * MIB + 5
    assert summary.profile.bytes_saved == 4 * 11 * MIB
    assert len(server.of(6)) == 8
    assert [m.payload[228:236].rstrip(b"\0").decode() for m in server.of(7)] == [f"w{i}" for i in range(11)]
    assert [name for name, *_ in seen] == [*arrays, *arrays], "hits in their turn, then each as it is verified"
    assert seen[-1][1:] == (summary.bytes, summary.bytes)


def test_no_bytes_follow_a_question_before_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hashes entries takes no bytes: seen from a send, several hits in a row would be one long stall."""
    waiting: list[int] = []
    begin, send = Channel.begin, Channel.send

    def watched_begin(channel: Channel, *parts: Any) -> None:
        waiting.append(channel.outstanding)
        begin(channel, *parts)

    def watched_send(channel: Channel, *parts: Any) -> None:
        if len(parts[0]) < 442 and parts[0][0] == 6:  # no probe, which is one part
            waiting.append(channel.outstanding)
        send(channel, *parts)

    arrays: dict[str, object] = {}
    for i in range(10):
        arrays[f"w{i}"] = np.frombuffer(payload_of(11 * MIB, i), np.uint8)
        arrays[f"s{i}"] = np.full(5, i, np.uint8)
    have = [bytes(arrays[f"w{i}"]) for i in (1, 2, 3, 5, 6, 8)]  # type: ignore[call-overload]
    server = StandIn((7, 0, 0), cache={fnv1a64(data): data for data in have})
    monkeypatch.setattr(Channel, "begin", watched_begin)
    monkeypatch.setattr(Channel, "send", watched_send)
    summary = run(server, arrays, cache="always").summary
    assert (summary.hits, summary.misses) == (6, 4)
    assert len(waiting) == 4 + 4, "what is small waits for the next miss, and the last for the end"
    assert not any(waiting)


def test_doubles_are_sent_once() -> None:
    """Equal tensors that are asked for together: the first is sent, the others come out of the cache it went into."""
    same = np.frombuffer(payload_of(11 * MIB, 1), np.uint8)
    server = StandIn(flags=1)
    result = run(server, dict.fromkeys("abcdef", same), verify=True)
    assert len(server.of(6)) == 1
    assert (result.summary.hits, result.summary.misses) == (5, 1)


def test_include_and_long_names() -> None:
    long = "x" * 80
    arrays = {"a.1": np.zeros(3, "f4"), "b.1": np.ones(3, "f4"), long: np.ones(2, "f8")}
    server = StandIn()
    result = run(server, arrays, include=r"\.1$|^x")
    assert list(result) == ["a.1", "b.1", long]
    names = [m.payload[228:292].rstrip(b"\0").decode() for m in server.of(6)]
    assert names[:2] == ["a.1", "b.1"]
    assert names[2].startswith("x" * 46 + "~")
    assert list(run(StandIn(), arrays, include="^b")) == ["b.1"]


def test_empty_tensors_are_in_the_mapping_and_not_on_the_wire() -> None:
    seen: list[tuple[str, int, int]] = []
    server = StandIn()
    arrays = {"e1": np.empty((0, 4), "f4"), "w": np.ones(4, "f4"), "e2": np.empty(0, "f4")}
    result = run(server, arrays, verify=True, progress=lambda *call: seen.append(call))
    assert len(server.of(6)) == 1
    assert list(result) == ["e1", "w", "e2"]
    assert seen == [("e1", 0, 16), ("w", 16, 16), ("e2", 16, 16), ("w", 16, 16)], "sent, then verified"


def test_nothing_but_empty_tensors() -> None:
    server = StandIn()
    result = run(server, {"e": np.empty((0, 4), "f4")}, verify=True)
    assert result["e"].nbytes == 0
    assert not server.of(6)


@versions
def test_buffers_are_freed_in_every_version(version: tuple[int, int, int]) -> None:
    server = StandIn(version)
    scripts = [server] * (2 if version[0] < 4 else 1)
    with ScriptedServer(*scripts) as scripted, connect(scripted.endpoint, timeout=20) as connection:
        first = connection.push({"w": np.ones(9, "f4")})
        second = connection.push({"w": np.ones(9, "f4")})
        first["w"].buffer.free()
        first["w"].buffer.free()
        assert second["w"].numpy().tolist() == [1.0] * 9
        connection.barrier()
        assert server.freed == [first["w"].buffer.handle]
