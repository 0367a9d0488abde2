"""How are measured results drawn, so that one look compares the contenders?

Each comparison becomes bars and each curve lines, as SVG (for the documentation) and PNG (for
pages that show no SVG). matplotlib is the ``bench`` extra's.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from benchmarks.measure import NOISY, Comparison, Curve

__all__ = ["draw_bars", "draw_lines", "file_name"]

OURS, PEERS, FLOOR = "#0f6cbd", "#9aa5b1", "#3b4754"
LINES = ("#c2620e", "#6b7280", "#2e7d32", "#8e24aa", "#b71c1c")
"""Colours of the others' lines, none of which is like ours."""


def file_name(title: str) -> str:
    """Return a title as a file's name: lower case, words joined by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def draw_bars(comparison: Comparison, folder: Path) -> None:
    """Draw a comparison as one bar per contender, with its spread."""
    figure, axes = _figure(height=1.0 + 0.42 * len(comparison.rows))
    names = list(comparison.rows)
    rows = [comparison.rows[name] for name in names]
    medians = [row.median for row in rows]
    below = [row.median - row.low for row in rows]
    above = [row.high - row.median for row in rows]
    colors = [_color(name, comparison.floor) for name in names]
    axes.barh(names, medians, xerr=[below, above], color=colors, ecolor="#00000066", height=0.66)
    for place, row in enumerate(rows):
        ratio = "" if row.ratio is None else f"  ({row.ratio:.2f} x)"
        axes.annotate(
            f"{row.median:.3g}{ratio}",
            (row.high, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.invert_yaxis()
    axes.margins(x=0.28)
    axes.set_xlim(left=0)
    axes.set_xlabel(_in_words(comparison.unit))
    _save(figure, axes, comparison, folder)


def draw_lines(curve: Curve, folder: Path) -> None:
    """Draw a curve for each contender, on logarithmic axes where the numbers span decades."""
    figure, axes = _figure(height=3.4)
    others = itertools.cycle(LINES)
    for name, points in curve.points.items():
        xs = [x for x, _ in points]
        rows = [row for _, row in points]
        color = OURS if _is_ours(name) else next(others)
        (line,) = axes.plot(xs, [row.median for row in rows], marker="o", label=name, color=color)
        axes.fill_between(
            xs,
            [row.low for row in rows],
            [row.high for row in rows],
            alpha=0.15,
            color=line.get_color(),
        )
    pairs = [pair for points in curve.points.values() for pair in points]
    if _spans_decades([x for x, _ in pairs], 200):
        axes.set_xscale("log")
    if _spans_decades([row.median for _, row in pairs], 30):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(curve.x_label)
    axes.set_ylabel(_in_words(curve.unit))
    axes.legend(frameon=False)
    _save(figure, axes, curve, folder)


def _in_words(unit: str) -> str:
    return {"s": "seconds", "ms": "milliseconds"}.get(unit, unit)


def _is_ours(name: str) -> bool:
    return "ddp_utils" in name


def _color(name: str, floor: str | None) -> str:
    return OURS if _is_ours(name) else FLOOR if name == floor else PEERS


def _spans_decades(values: list[float], factor: float) -> bool:
    positive = [value for value in values if value > 0]
    return len(positive) == len(values) > 0 and max(positive) > factor * min(positive)


def _figure(height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")  # no window, whatever the user's configuration says
    from matplotlib import pyplot

    # The same data give the same file, byte for byte: diffs show what changed.
    matplotlib.rcParams["svg.hashsalt"] = "ddp_utils"
    matplotlib.rcParams["svg.fonttype"] = "none"
    return pyplot.subplots(figsize=(7.6, height), layout="constrained")


def _save(figure: Any, axes: Any, measured: Comparison | Curve, folder: Path) -> None:
    from matplotlib import pyplot

    noise = " (measured on a busy machine)" if measured.steadiness > NOISY else ""
    axes.set_title(measured.title + noise, loc="left", fontsize=11)
    name = file_name(measured.title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    figure.savefig(folder / f"{name}.png", dpi=144)
    pyplot.close(figure)
