"""The report's plots, PNG, by matplotlib: the extra "bench"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Stages in the order in which they are stacked, by the names of LoadProfile, and what the report calls them.
STAGES = {
    "read": "reading",
    "hash": "hashing",
    "ask": "asking",
    "staging": "staging",
    "wire": "wire",
    "wait": "stalls",
    "gap": "gaps",
}
_COLOURS = ("#8c9fb1", "#d1605e", "#e7ca60", "#b07aa2", "#4c78a8", "#f1a243", "#bab0ac")


def _pyplot() -> Any:
    """matplotlib without a display. Raises ImportError where it is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def split_plot(path: Path, title: str, rows: Sequence[tuple[str, float, Mapping[str, float] | None]]) -> None:
    """One bar for each of ``rows`` (label, wall seconds, seconds of each stage if known), stacked by stage."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.42 * len(rows)), layout="constrained")
    labels = [label for label, _, _ in rows]
    left = [0.0] * len(rows)
    for (stage, name), colour in zip(STAGES.items(), _COLOURS, strict=True):
        widths = [(parts or {}).get(stage, 0.0) for _, _, parts in rows]
        if any(widths):
            axes.barh(labels, widths, left=left, color=colour, label=name)
            left = [at + width for at, width in zip(left, widths, strict=True)]
    rest = [max(wall - at, 0.0) for (_, wall, _), at in zip(rows, left, strict=True)]
    axes.barh(labels, rest, left=left, color="white", edgecolor="#808080", hatch="///", label="outside, or not known")
    axes.invert_yaxis()
    axes.set_xlabel("seconds, median of the rounds")
    axes.set_title(title, fontsize="medium")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    _save(figure, path)


def ratio_plot(path: Path, title: str, bars: Sequence[tuple[str, float, tuple[float, float] | None]]) -> None:
    """One bar for each ratio (label, median, quartiles if known), on a logarithmic scale around 1."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(bars)), layout="constrained")
    for place, (_, median, spread) in enumerate(bars):
        axes.barh(place, median - 1, left=1, color="#4c78a8" if median >= 1 else "#d1605e")
        if spread is not None:
            axes.plot(spread, (place, place), color="black", linewidth=1, marker="|")
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize="small")
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(y=0.5 / max(len(bars), 1))
    axes.invert_yaxis()
    axes.set_xlabel("times as fast: median, quartiles")
    axes.set_title(title, fontsize="medium")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    # No version in it, so that the same numbers give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    _pyplot().close(figure)
