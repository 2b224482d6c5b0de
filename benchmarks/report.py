"""Write REPORT.md and its plots from results: benchmarks/report.py benchmarks/results/*.json

Everything in the report comes out of the files, which pytest --benchmark-json wrote (benchmarks/run.py makes all of
them). A number that is not there is not guessed: the table says "not measured". Wants the extra "bench" for the plots;
--no-plots does without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE))

import plots  # noqa: E402  (found through the path set above)
from harness.results import BadResult, Measured, Results, load, number  # noqa: E402

NOT_MEASURED = "not measured"
STATES = {"no cache": "No cache", "cold": "Cold cache", "warm": "Warm cache"}
ROWS = (
    ("stock", "stock", None),
    ("old", "old", None),
    ("old", "new", None),
    ("new", "old", None),
    ("new", "old", 2),
    ("new", "old", 4),
    ("new", "new", None),
    ("new", "new", 2),
    ("new", "new", 4),
)
#: Columns of the tables of loads, by the names of LoadProfile.
COLUMNS = {
    "span": "upload span",
    "read": "reading",
    "hash": "hashing",
    "ask": "asking",
    "staging": "staging",
    "wire": "wire",
    "wait": "stalls",
    "gap": "gaps",
}
#: Sections of ratios: title, and the benchmarks that belong there, in order. Those that are missing are named.
SECTIONS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (
        "Pushing 1 GiB over loopback, no cache",
        {
            "test_push_uncached[mix]": "876 tensors in a 27B model's proportions",
            "test_push_uncached[16 x 64 MiB]": "16 tensors of 64 MiB",
            "test_push_uncached[1 x 1 GiB]": "one tensor",
            "test_push_small_tensors": "20,000 tensors of 4 KiB (78 MiB)",
        },
    ),
    (
        "Through the cache, on a network of 2.5 Gbit/s",
        {
            "test_cache[blocks-shaped-no cache]": "no cache",
            "test_cache[blocks-shaped-cold]": "cold",
            "test_cache[blocks-shaped-warm]": "warm",
            "test_cache[blocks-shaped-warm, index]": "warm, with the index of hashes",
        },
    ),
    (
        "Through the cache, on loopback",
        {
            "test_cache[blocks-loopback-no cache]": "no cache",
            "test_cache[blocks-loopback-cold]": "cold",
            "test_cache[blocks-loopback-warm]": "warm",
            "test_cache[blocks-loopback-warm, index]": "warm, with the index of hashes",
        },
    ),
    (
        "Through the cache, 876 tensors in a 27B model's proportions",
        {
            "test_cache[mix-shaped-no cache]": "the mix at 2.5 Gbit/s, no cache",
            "test_cache[mix-shaped-cold]": "the mix at 2.5 Gbit/s, cold",
            "test_cache[mix-shaped-warm]": "the mix at 2.5 Gbit/s, warm",
            "test_cache[mix-shaped-warm, index]": "the mix at 2.5 Gbit/s, warm, with the index of hashes",
            "test_cache[mix-loopback-no cache]": "the mix on loopback, no cache",
            "test_cache[mix-loopback-cold]": "the mix on loopback, cold",
            "test_cache[mix-loopback-warm]": "the mix on loopback, warm",
            "test_cache[mix-loopback-warm, index]": "the mix on loopback, warm, with the index of hashes",
        },
    ),
    (
        "A model split over two servers",
        {
            "test_split[shaped-no cache]": "two servers at 2.5 Gbit/s, no cache",
            "test_split[shaped-cold]": "two servers at 2.5 Gbit/s, cold",
            "test_split[shaped-warm]": "two servers at 2.5 Gbit/s, warm",
            "test_split[shaped-warm, index]": "two servers at 2.5 Gbit/s, warm, with the index of hashes",
            "test_split[loopback-no cache]": "two servers on loopback, no cache",
            "test_split[loopback-cold]": "two servers on loopback, cold",
            "test_split[loopback-warm]": "two servers on loopback, warm",
            "test_split[loopback-warm, index]": "two servers on loopback, warm, with the index of hashes",
        },
    ),
    (
        "A server filling 1 GiB from its cache",
        {
            "test_hits[64 x 16 MiB-content]": "64 entries, size and hash checked",
            "test_hits[16 x 64 MiB-content]": "16 entries, size and hash checked",
            "test_hits[1 x 1 GiB-content]": "one entry, size and hash checked",
            "test_hits[64 x 16 MiB-size]": "64 entries, size checked",
            "test_hits[16 x 64 MiB-size]": "16 entries, size checked",
            "test_hits[1 x 1 GiB-size]": "one entry, size checked",
        },
    ),
    ("Seeding a cache directory, in memory", {"test_seeding": "128 MiB in 8 tensors"}),
    (
        "Hashing",
        {
            "test_one_buffer[64 MiB]": "one buffer of 64 MiB, the fastest way of this processor",
            "test_many_buffers[8 MiB]": "eight buffers of 8 MiB in one call",
            "test_two_threads": "two threads, 64 tensors of 16 MiB in memory",
            "test_two_threads_hash[blocks]": "two threads, whole blocks of a model in a file",
        },
    ),
    (
        "Profiling",
        {
            "test_in_the_core": "a call of the clock while profiling is off",
            "test_no_allocation[off]": "the clock's calls from Python, off",
            "test_no_allocation[on]": "the clock's calls from Python, on",
            "test_from_python[off]": "the clock from Python, off",
            "test_from_python[on]": "the clock from Python, on",
            "test_from_python[math.isfinite]": "a compiled function that returns a constant",
        },
    ),
    (
        "Opening and importing",
        {
            "test_gguf_open": "opening a GGUF with a vocabulary of 150,000",
            "test_import": "a process that imports weightwire",
        },
    ),
    (
        "RDMA, in an emulated guest with soft-RoCE (no network card: indicative only)",
        {
            "test_push_over_rdma[Linux 6.12]": "pushing 32 MiB, Linux 6.12",
            "test_registration[Linux 6.12-1 MiB]": "registering 1 MiB, Linux 6.12",
            "test_registration[Linux 6.12-16 MiB]": "registering 16 MiB, Linux 6.12",
        },
    ),
)
#: Sections of what is only measured if it is asked for by name: left out where nothing of them was.
ON_REQUEST = {"Through the cache, 876 tensors in a 27B model's proportions"}
#: Benchmarks without a fixed list of variants: by the beginning of their names, the section that they are added to.
MORE = {"test_one_buffer": "Hashing", "test_many_buffers": "Hashing", "test_ten_buffers_against_one": "Hashing"}
MORE |= dict.fromkeys(("test_push_over_rdma", "test_registration"), SECTIONS[-1][0])
MORE |= dict.fromkeys(("test_file_ranges", "test_both_hashes"), "Hashing")
MORE |= {"test_cache": "Through the cache, in other shapes"}
MORE |= {"test_split": "A model split over two servers"}
OTHERS = "Others"
MACHINE = {
    "cpu": "processor",
    "cores": "cores",
    "memory_bytes": "memory",
    "hypervisor": "virtual machine",
    "architecture": "architecture",
    "kernel": "kernel",
    "file_system": "file system of models and caches",
    "load_average_at_start": "load average when a file was begun",
}
VERSIONS = ("weightwire", "python", "numpy", "gguf", "torch", "iperf3", "stock_peer")

METHOD = """\
- Every peer of a comparison runs once in every round, on the same machine, in an order that changes. A ratio
  is the median over rounds that ran side by side; behind it are the quartiles. Above 1 the first is faster.
- Times are seconds, medians of the rounds. They say something about this machine only.
- *Upload span* lasts from the first tensor to the answer that proves that the last byte has arrived; *reading* files,
  *hashing*, *asking* the cache, *staging* (copies on the way), *wire* (moving bytes), *stalls* (waiting until the other
  end moves) and *gaps* are parts of it, told by the client's `LoadProfile`. *Wall* is all of it, connecting included.
- *New* is weightwire, *old* is the plain way to load (`GGML_RPC_LOAD_OPT=0`): the same bytes on the wire, everything
  over 10 MiB hashed in line, one contiguous message per tensor, received whole and copied. *Stock* is the ggml RPC
  client and server as released, built with `-DGGML_NATIVE=OFF` (not for this processor alone; nothing is computed
  here); they do not say what their time went on.
- *Threads* hash ahead for the cache: unset is one for each core, at most eight. Two and four are measured with new
  clients alone, where there is a cache: a stock client has no such setting, and the old one hashes in line.
- *Split over two servers*, the first half of a model's layers is for one, the second for the other, each behind a link
  of its own. The stock client loads as llama.cpp does, one server after the other on one thread; weightwire's loads
  both at once, and so do the bare socket pairs.
- What was not measured says so. docs/performance.md has how each benchmark works."""


def write(results: Results, root: Path, *, with_plots: bool) -> str:
    """The report's text; its plots go to ``root``/plots. Raises ImportError if there is no matplotlib for them."""
    parts = [
        "# Measurements",
        "Generated by `benchmarks/report.py` from JSON of the benchmarks; do not edit. "
        "`python benchmarks/run.py` makes both anew.",
        "## Method",
        METHOD,
        "## Machine and versions",
        *_machines(results),
        "## Every client with every server",
        _about_matrix(results),
    ]
    for state, title in STATES.items():
        measured = results.benchmarks.get(f"test_matrix[{state}]")
        parts += [f"### {title}", _matrix(measured, state)]
        if with_plots and measured is not None:
            name = f"split-{state.replace(' ', '-')}.png"
            plots.split_plot(root / "plots" / name, f"{title}: what a load's time goes on", _bars(measured))
            parts.append(f"![The split of each load]({'plots/' + name})")
    bars: list[tuple[str, float, tuple[float, float] | None]] = []
    for title, rows in _sections(results).items():
        parts += [f"## {title}", _ratios(results, rows), *_splits(results, rows)]
        where = title.partition(", on ")[2]  # what is measured in several places has the same label in each
        for name, label in rows.items():
            label = f"{label}, on {where}" if where else label
            found = results.benchmarks.get(name)
            for ratio in found.ratios if found is not None and title != OTHERS else ():
                bars.append((f"{label}: {ratio.subject} / {ratio.peer}", ratio.median, ratio.quartiles))
    if with_plots and bars:
        plots.ratio_plot(root / "plots" / "ratios.png", "Times as fast as the peer", bars)
        parts.append("![All ratios](plots/ratios.png)")
    parts += ["## Peers that were not there", _absent(results)]
    return "\n\n".join(parts) + "\n"


def _machines(results: Results) -> Iterator[str]:
    """One table for all files: what differs between them is listed."""

    def values(name: str, missing: str) -> str:
        found = [_value(name, machine[name]) for machine in results.machines if name in machine]
        return ", ".join(dict.fromkeys(found)) or missing

    rows = [(label, values(name, NOT_MEASURED)) for name, label in MACHINE.items()]
    rows += [(f"version of {name.replace('_', ' ')}", values(name, NOT_MEASURED)) for name in VERSIONS]
    rows.append(("measured", ", ".join(dict.fromkeys(results.dates)) or NOT_MEASURED))
    rows.append(("commit", ", ".join(dict.fromkeys(results.commits)) or NOT_MEASURED))
    yield _table(("what", "value"), rows)


def _value(name: str, value: object) -> str:
    if name == "memory_bytes":
        found = number(value)
        return NOT_MEASURED if found is None else f"{found / 2**30:.1f} GiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _about_matrix(results: Results) -> str:
    found = [results.benchmarks[name] for name in results.benchmarks if name.startswith("test_matrix")]
    sizes = {value for each in found if (value := number(each.facts.get("bytes"))) is not None}
    rounds = {value for each in found if (value := number(each.facts.get("rounds"))) is not None}
    if not sizes or not rounds:
        return f"Whole blocks of a 27B model over loopback: {NOT_MEASURED}."
    size = ", ".join(f"{value / 2**30:.2f} GiB" for value in sorted(sizes))
    count = ", ".join(f"{value:.0f}" for value in sorted(rounds))
    return f"Whole blocks of a 27B model, {size}, over loopback; {count} rounds. Seconds."


def _matrix(measured: Measured | None, state: str) -> str:
    head = ("client", "server", "threads", *COLUMNS.values(), "wall", "new, new is so many times as fast")
    rows: list[tuple[str, ...]] = []
    kept = [] if measured is None else list(measured.facts.get("rows", {}).items())
    times = {} if measured is None else {ratio.peer: ratio for ratio in measured.ratios}
    for client, server, threads in ROWS:
        if threads is not None and state == "no cache":
            continue  # nothing is hashed
        name, row = next(
            ((name, row) for name, row in kept if _which(row) == (client, server, threads)), ("", dict[str, Any]())
        )
        parts = row.get("split_seconds") or {}
        ratio = times.get(name)
        if ratio is not None:
            compared = _times(ratio.median, ratio.quartiles)
        else:
            compared = "1" if name and (client, server, threads) == ("new", "new", None) else NOT_MEASURED
        rows.append(
            (
                client,
                server,
                "unset" if threads is None else str(threads),
                *(_seconds(parts.get(column)) for column in COLUMNS),
                _seconds(row.get("seconds")),
                compared,
            )
        )
    return _table(head, rows)


def _which(row: Mapping[str, Any]) -> tuple[object, object, object]:
    return row.get("client"), row.get("server"), row.get("threads")


def _bars(measured: Measured) -> list[tuple[str, float, Mapping[str, float] | None]]:
    bars = []
    for client, server, threads in ROWS:
        for row in measured.facts.get("rows", {}).values():
            wall = number(row.get("seconds"))
            if _which(row) == (client, server, threads) and wall is not None:
                label = f"{client} → {server}" + ("" if threads is None else f", {threads} threads")
                bars.append((label, wall, row.get("split_seconds")))
    return bars


def _sections(results: Results) -> dict[str, dict[str, str]]:
    """Benchmarks by section, those that the results have besides the expected ones included."""
    sections = {
        title: dict(rows)
        for title, rows in SECTIONS
        if title not in ON_REQUEST or not results.benchmarks.keys().isdisjoint(rows)
    }
    expected = {name for rows in sections.values() for name in rows}
    for name in results.benchmarks:
        if name not in expected and not name.startswith("test_matrix["):
            title = MORE.get(name.split("[")[0], OTHERS)
            sections.setdefault(title, {})[name] = name
    return sections


def _ratios(results: Results, benchmarks: Mapping[str, str]) -> str:
    head = ("what", "who", "beside", "times as fast (quartiles)", "median seconds", "rounds")
    rows: list[tuple[str, ...]] = []
    for name, label in benchmarks.items():
        measured = results.benchmarks.get(name)
        found = [] if measured is None else measured.ratios
        if measured is not None and not found and not {"allocated_bytes", "calls_per_s"}.isdisjoint(measured.facts):
            continue  # nothing that is beside anything
        if measured is None or not found:
            rows.append((label, *[NOT_MEASURED] * (len(head) - 1)))
            continue
        medians, rounds = measured.facts.get("median_seconds", {}), number(measured.facts.get("rounds"))
        for ratio in found:
            both = f"{_seconds(medians.get(ratio.subject))} / {_seconds(medians.get(ratio.peer))}"
            count = NOT_MEASURED if rounds is None else f"{rounds:.0f}"
            times = _times(ratio.median, ratio.quartiles)
            rows.append((label, ratio.subject, ratio.peer, times, both, count))
    return _table(head, rows)


def _splits(results: Results, benchmarks: Mapping[str, str]) -> Iterator[str]:
    """What the time of weightwire's loads went on, and the memory that calls took: for benchmarks that kept it."""
    rows, lines = [], []
    for name, label in benchmarks.items():
        facts = results.benchmarks[name].facts if name in results.benchmarks else {}
        parts = {label: facts["split_seconds"]} if "split_seconds" in facts else {}
        parts |= {f"{label}, {server}": each for server, each in facts.get("split_seconds_by_server", {}).items()}
        rows += [(part, *(_seconds(each.get(column)) for column in COLUMNS)) for part, each in parts.items()]
        allocated, calls = number(facts.get("allocated_bytes")), number(facts.get("calls"))
        if allocated is not None and calls is not None:
            lines.append(f"- {label}: {allocated:.0f} bytes allocated at the peak of {calls:.0f} calls.")
        if (rate := number(facts.get("calls_per_s"))) is not None:
            lines.append(f"- {label}: {rate / 1e6:.1f} million calls a second.")
    if rows:
        yield "weightwire's upload span and its parts, medians, seconds:"
        yield _table(("what", *COLUMNS.values()), rows)
    if lines:
        yield "\n".join(lines)


def _absent(results: Results) -> str:
    rows = [
        (f"`{name}`", peer, why)
        for name, measured in results.benchmarks.items()
        for peer, why in measured.absent.items()
    ]
    return _table(("benchmark", "peer", "why"), rows) if rows else "None that was looked for."


def _seconds(value: object) -> str:
    found = number(value)
    if found is None:
        return NOT_MEASURED
    if 0 < found < 0.5e-6:
        return f"{found * 1e9:.1f} ns"
    return f"{found:.3f}" if found >= 0.0005 or found == 0 else f"{found * 1e6:.0f} µs"


def _times(median: float, spread: tuple[float, float] | None) -> str:
    text = f"{median:.2f}"
    return text if spread is None else f"{text} ({spread[0]:.2f} – {spread[1]:.2f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and return the exit code: 0, 2 for files that cannot be used, 3 where there is no matplotlib."""
    parser = argparse.ArgumentParser(description="Write REPORT.md and its plots from results.")
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULT.json", help="of pytest --benchmark-json")
    parser.add_argument("--out", type=Path, default=_HERE, metavar="DIR", help="where REPORT.md and plots/ go")
    parser.add_argument("--no-plots", action="store_true", help="the tables only")
    options = parser.parse_args(arguments)
    try:
        if not options.results:
            raise BadResult("there is no result to report; benchmarks/run.py makes them")
        text = write(load(options.results), options.out, with_plots=not options.no_plots)
    except BadResult as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"report.py: no plots: {error}; pip install '.[bench]', or give --no-plots", file=sys.stderr)
        return 3
    (options.out / "REPORT.md").write_text(text)
    print(options.out / "REPORT.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
