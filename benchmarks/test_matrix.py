"""Every client with every server: the optimised and the plain way on either side, with threads, and the stock pair.

The tables of the report. Over loopback, with whole blocks of a 27B model, in three states of the server's cache: none,
cold, warm (and no index of hashes, so that hashing is part of it). The two weightwire servers stay, each with a cache
of its own; the clients are processes of their own and take turns.

`GGML_RPC_LOAD_OPT=0` is the plain way, "old" below: hash everything over 10 MiB in line, one contiguous zero-filled
message per tensor, a server that receives it whole and copies.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.cached import CachedPeer, State, file_system
from harness.models import file_ranges, full_cache, whole_blocks, write_random
from harness.pushing import PushingPeer, Serving
from harness.rounds import PeerAbsent, Rounds, record, settle, side_by_side, split
from harness.stock_pair import StockPeer
from pytest_benchmark.fixture import BenchmarkFixture

SUBJECT = "new client, new server"
THREADS = (2, 4)


@pytest.fixture(scope="module")
def blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Whole blocks of a 27B model."""
    path = tmp_path_factory.mktemp("matrix") / "blocks.safetensors"
    write_random(path, dict(whole_blocks(request.config.getoption("--matrix-mib") << 20)))
    yield path
    path.unlink()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.bench
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("state", [State.NONE, State.COLD, State.WARM], ids=lambda state: state.value)
def test_matrix(
    benchmark: BenchmarkFixture,
    state: State,
    blocks: Path,
    stock_library: Path,
    stack: ExitStack,
    tmp_path: Path,
    rounds: int,
) -> None:
    cached, expected = state is not State.NONE, full_cache(blocks)
    options: dict[str, object] = {"cache": "auto" if cached else "never", "index": False}
    if state is State.COLD:
        options["index"] = str(tmp_path / "index" / "index.sqlite3")
    peers: dict[str, CachedPeer] = {}
    pairs: dict[str, PushingPeer | StockPeer] = {}
    rows: dict[str, dict[str, object]] = {}
    absent: dict[str, str] = {}
    (tmp_path / "index").mkdir()

    def add(pair: PushingPeer | StockPeer, directory: Path, client: str, server: str, threads: int | None) -> None:
        stack.callback(pair.close)
        pairs[pair.name] = pair
        peers[pair.name] = CachedPeer(pair, {directory: expected}, state, tmp_path / "index")
        rows[pair.name] = {"client": client, "server": server, "threads": threads}

    for server, plain_server in (("new", False), ("old", True)):
        directory = tmp_path / server
        directory.mkdir()
        try:
            serving = Serving(cache=directory if cached else None, plain=plain_server)
        except PeerAbsent as why:
            absent |= {f"{client} client, {server} server": str(why) for client in ("new", "old")}
            continue
        stack.callback(serving.close)
        for client, plain_client in (("new", False), ("old", True)):
            name = f"{client} client, {server} server"
            try:
                pair = PushingPeer(blocks, server=serving, plain=plain_client, name=name, options=options)
            except PeerAbsent as why:
                absent[name] = str(why)
                continue
            add(pair, directory, client, server, None)
        for threads in THREADS if cached else ():
            name = f"new client, {server} server, {threads} threads"
            pair = PushingPeer(blocks, server=serving, name=name, options=options | {"threads": threads})
            add(pair, directory, "new", server, threads)
    stock_cache = tmp_path / "stock"
    stock_cache.mkdir()
    stock = StockPeer(stock_library, blocks, file_ranges(blocks), cache=stock_cache if cached else None)
    stock.name = "stock client, stock server"
    add(stock, stock_cache, "stock", "stock", None)

    nbytes = sum(nbytes for _, nbytes in file_ranges(blocks))
    taken = Rounds(nbytes)

    def before(name: str) -> None:
        peers[name].prepare()
        settle(nbytes)

    for name, peer in peers.items():  # warm-up: page cache, allocators, the congestion window
        before(name)
        peer.round()
        peer.finish()
    for pair in pairs.values():
        pair.processor.clear()
        if isinstance(pair, PushingPeer):
            pair.profiles.clear()
            pair.optimized.clear()
    side_by_side(
        benchmark,
        SUBJECT,
        [name for name in peers if name != SUBJECT],
        rounds,
        before=before,
        run=lambda name: taken.add(name, peers[name].round()),
        after=lambda name: peers[name].finish(),
    )
    for name, row in rows.items():
        pair = pairs[name]
        row["seconds"] = taken.median(name)
        row["processor_seconds"] = statistics.median(pair.processor)
        # Nobody but weightwire's client says what its time went on.
        row["split_seconds"] = split(pair.profiles) if isinstance(pair, PushingPeer) else None
    record(
        benchmark,
        taken,
        SUBJECT,
        state=state.value,
        network="loopback",
        file_system=file_system(tmp_path),
        absent=absent,
        rows=rows,
    )
    assert {len(took) for took in taken.seconds.values()} == {rounds}
    for name, pair in pairs.items():
        if isinstance(pair, PushingPeer):
            assert set(pair.optimized) == {rows[name]["client"] == "new"}
