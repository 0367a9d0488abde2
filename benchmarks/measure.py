"""How are several contenders measured side by side, so that the ratios can be believed?

Interleaved rounds, medians and spreads, and a yardstick: a fixed piece of work that is timed
beside each round and tells how steady the machine was meanwhile.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

__all__ = [
    "Curve",
    "Results",
    "Skip",
    "Target",
    "command",
    "compare",
    "installed",
    "needs_gpu",
    "results",
    "seconds",
    "sweep",
]

NOISY = 0.15
"""Relative spread of the yardstick from which on a run is called noisy."""


@dataclass(frozen=True)
class Skip:
    """A contender that is left out, and why."""

    reason: str


@dataclass(frozen=True)
class Target:
    """What a contender shall reach: ``at_most`` times the floor, or in the unit itself.

    With ``at_least`` more is better, for example indices a second.
    """

    contender: str
    at_most: float | None = None
    at_least: float | None = None
    absolute: bool = False


@dataclass
class Row:
    """What was measured of one contender, in the comparison's unit."""

    median: float
    low: float
    high: float
    ratio: float | None
    """Median of the ratios to the floor, round by round: a slow minute hits both."""
    values: list[float]
    verdict: str = ""


@dataclass
class Comparison:
    """Contenders side by side at one task."""

    title: str
    unit: str
    floor: str | None
    rows: dict[str, Row]
    skipped: dict[str, str]
    steadiness: float
    """Relative spread of the yardstick over the rounds: 0.03 is calm, 0.3 is noise."""


@dataclass
class Curve:
    """Contenders side by side at one task of several sizes."""

    title: str
    x_label: str
    unit: str
    points: dict[str, list[tuple[float, Row]]]
    skipped: dict[str, str]
    steadiness: float


@dataclass
class Results:
    """What one run of ``python -m benchmarks`` has measured, and how."""

    rounds: int | None = None
    """Rounds for everything, instead of what each comparison asks for."""
    comparisons: list[Comparison] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)

    def start_over(self, rounds: int | None) -> None:
        """Forget what was measured: the next benchmark has a page of its own."""
        self.rounds, self.comparisons, self.curves = rounds, [], []

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain lists and dictionaries."""
        return asdict(self)


results = Results()
"""Where :func:`compare` and :func:`sweep` record; ``python -m benchmarks`` writes it out."""


def compare(
    title: str,
    contenders: Mapping[str, Callable[[], float] | Skip],
    *,
    unit: str = "s",
    floor: str | None = None,
    rounds: int = 5,
    targets: Sequence[Target] = (),
) -> Comparison:
    """Measure each contender ``rounds`` times, interleaved; print a table and record it.

    A contender returns one number in ``unit``; ratios are to the contender named ``floor``.
    """
    present, skipped = _split(contenders)
    bar = tqdm(total=_rounds(rounds) * len(present), desc=title, leave=False, dynamic_ncols=True)
    with bar:
        values, yardstick = _interleave(present, _rounds(rounds), bar)
    rows = _rows(values, floor)
    for target in targets:
        if target.contender in rows:
            row = rows[target.contender]
            row.verdict = _verdict(row, target, unit)
    comparison = Comparison(title, unit, floor, rows, skipped, _spread(yardstick))
    results.comparisons.append(comparison)
    print(_table(comparison), flush=True)
    return comparison


def sweep(
    title: str,
    x_label: str,
    xs: Sequence[float],
    contenders: Mapping[str, Callable[[Any], float] | Skip],
    *,
    unit: str = "s",
    rounds: int = 3,
    limits: Mapping[str, float] | None = None,
) -> Curve:
    """Measure each contender at each size in ``xs``; print a table and record the curves.

    A contender is called with the size. ``limits`` names the largest size for contenders that
    would take too long, or too much memory, beyond it.
    """
    present, skipped = _split(contenders)
    points: dict[str, list[tuple[float, Row]]] = {name: [] for name in present}
    yardsticks: list[float] = []
    with tqdm(desc=title, total=0, leave=False, dynamic_ncols=True) as bar:
        for x in xs:
            here = {
                name: _at(measure, x)
                for name, measure in present.items()
                if x <= (limits or {}).get(name, float("inf"))
            }
            bar.total += _rounds(rounds) * len(here)
            values, yardstick = _interleave(here, _rounds(rounds), bar)
            yardsticks += yardstick
            for name, row in _rows(values, None).items():
                points[name].append((x, row))
    curve = Curve(title, x_label, unit, points, skipped, _spread(yardsticks))
    results.curves.append(curve)
    print(_curve_table(curve), flush=True)
    return curve


def seconds(work: Callable[[], object]) -> float:
    """Return how long one call of ``work`` takes, in seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def command(*args: str, timeout: float = 120, exit_code: int | None = 0, **environ: str) -> float:
    """Run a whole command and return its wall time in seconds.

    Args:
        args: The command; a leading ``"python"`` is this interpreter.
        exit_code: What it must end with; None for anything but 0.
        environ: Variables on top of this process's.

    Raises:
        RuntimeError: It ended otherwise. The message ends with its output.
    """
    arguments = [sys.executable, *args[1:]] if args[0] == "python" else list(args)
    begin = time.perf_counter()
    done = subprocess.run(
        arguments,
        env={**os.environ, "DDP_UTILS_QUIET": "1", **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    took = time.perf_counter() - begin
    wrong = done.returncode == 0 if exit_code is None else done.returncode != exit_code
    if wrong:
        raise RuntimeError(
            f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-2000:]}"
        )
    return took


def installed(package: str, measure: Callable[..., float]) -> Callable[..., float] | Skip:
    """Return ``measure`` if ``package`` can be imported, else the reason to skip it."""
    if importlib.util.find_spec(package) is None:
        return Skip(f"{package} is not installed")
    return measure


def needs_gpu(measure: Callable[..., float], count: int = 1) -> Callable[..., float] | Skip:
    """Return ``measure`` if this machine has ``count`` GPUs, else the reason to skip it."""
    import torch

    found = torch.cuda.device_count()
    return measure if found >= count else Skip(f"needs {count} CUDA device(s), found {found}")


def _split(contenders: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    present = {name: it for name, it in contenders.items() if not isinstance(it, Skip)}
    skipped = {name: it.reason for name, it in contenders.items() if isinstance(it, Skip)}
    return present, skipped


def _at(measure: Callable[[Any], float], x: float) -> Callable[[], float]:
    return lambda: measure(x)


def _rounds(asked: int) -> int:
    return results.rounds or asked


def _interleave(
    contenders: Mapping[str, Callable[[], float]], rounds: int, bar: Any
) -> tuple[dict[str, list[float]], list[float]]:
    """Measure all contenders once a round, each round beginning with another one."""
    values: dict[str, list[float]] = {name: [] for name in contenders}
    yardstick: list[float] = []
    names = list(contenders)
    for round_ in range(rounds):
        yardstick.append(seconds(_fixed_work))
        first = round_ % len(names) if names else 0
        for name in names[first:] + names[:first]:
            bar.set_postfix_str(name)
            values[name].append(float(contenders[name]()))
            bar.update()
    yardstick.append(seconds(_fixed_work))
    return values, yardstick


def _fixed_work() -> None:
    total = 0
    for number in range(600_000):
        total += number


def _spread(values: Sequence[float]) -> float:
    """Return how far the slowest is above the fastest, relative to the median."""
    return (max(values) - min(values)) / statistics.median(values)


def _rows(values: Mapping[str, list[float]], floor: str | None) -> dict[str, Row]:
    rows = {}
    for name, measured in values.items():
        ratio = None
        if floor is not None and floor in values:
            pairs = zip(measured, values[floor], strict=True)
            ratio = statistics.median(one / other for one, other in pairs)
        rows[name] = Row(
            statistics.median(measured), min(measured), max(measured), ratio, list(measured)
        )
    return rows


def _verdict(row: Row, target: Target, unit: str) -> str:
    reached = row.median if target.absolute else row.ratio
    if reached is None:
        return ""
    limit = target.at_most if target.at_most is not None else target.at_least
    assert limit is not None, "a target has at_most or at_least"
    good = reached <= limit if target.at_most is not None else reached >= limit
    words = "at most" if target.at_most is not None else "at least"
    asked = f"{_number(limit)} {unit}" if target.absolute else f"{limit:g} x"
    return f"{'reached' if good else 'MISSED'} ({words} {asked})"


def _table(comparison: Comparison) -> str:
    lines = [["", f"median [{comparison.unit}]", "spread", "ratio", ""]]
    for name, row in comparison.rows.items():
        ratio = "" if row.ratio is None else f"{row.ratio:.2f} x"
        spread = f"{_number(row.low)} to {_number(row.high)}"
        lines.append([name, _number(row.median), spread, ratio, row.verdict])
    return _laid_out(comparison.title, lines, comparison.skipped, comparison.steadiness)


def _curve_table(curve: Curve) -> str:
    xs = sorted({x for points in curve.points.values() for x, _ in points})
    lines = [[f"[{curve.unit}] at {curve.x_label}", *(_number(x) for x in xs)]]
    for name, points in curve.points.items():
        known = dict(points)
        lines.append([name, *(_number(known[x].median) if x in known else "-" for x in xs)])
    return _laid_out(curve.title, lines, curve.skipped, curve.steadiness)


def _laid_out(
    title: str, lines: Sequence[Sequence[str]], skipped: Mapping[str, str], steadiness: float
) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    out = ["", title]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        out.append(("  " + "  ".join(cells)).rstrip())
    out += [f"  {name}: skipped, {reason}" for name, reason in skipped.items()]
    if steadiness > NOISY:
        out.append(
            f"  NOISY: the same fixed work took up to {steadiness:.0%} longer in some rounds; "
            "only ratios mean something, and large ones at that"
        )
    return "\n".join(out)


def _number(value: float) -> str:
    """Return a number as people write it: three digits that count, and thousands apart."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.2e}"
