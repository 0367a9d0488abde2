"""Which benchmarks are run, and where do their figures go?"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks import measure, plots

FRAME = {"__main__", "measure", "plots"}
"""Modules of this folder that are no benchmarks."""

PEERS = ("torch", "numpy", "accelerate", "lightning-fabric", "pytorch-ignite")
FIGURES = Path(__file__).parents[1] / "docs" / "figures"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks that were named, or all, and write their figures."""
    names = benchmark_names()
    parser = argparse.ArgumentParser("python -m benchmarks", description=benchmarks.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, help="rounds for everything (1: a sanity run)")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder for JSON and plots")
    args = parser.parse_args(arguments)
    unknown = set(args.names) - set(names)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds is at least 1")

    os.environ.setdefault("DDP_UTILS_QUIET", "1")
    _warn_if_busy()
    failed = [name for name in args.names or names if not _run(name, args.rounds, args.out)]
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def benchmark_names() -> list[str]:
    """Return the modules of this folder that hold a benchmark."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(module.name for module in found if module.name not in FRAME)


def _run(name: str, rounds: int | None, folder: Path) -> bool:
    """Run one benchmark and write what it measured, whole or in part; tell if it was whole."""
    measure.results.start_over(rounds)
    print(f"\n== {name}", flush=True)
    whole = True
    try:
        importlib.import_module(f"benchmarks.{name}").main()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        whole = False
    _write(name, folder)
    return whole


def _write(name: str, folder: Path) -> None:
    measured = measure.results
    if not measured.comparisons and not measured.curves:
        return
    folder.mkdir(parents=True, exist_ok=True)
    record = {"benchmark": name, "machine": _machine(), **measured.as_json()}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    for comparison in measured.comparisons:
        plots.draw_bars(comparison, folder)
    for curve in measured.curves:
        plots.draw_lines(curve, folder)


def _machine() -> dict[str, Any]:
    """Return what a reader must know of the machine to make sense of the figures."""
    versions: dict[str, str | None] = {}
    for peer in PEERS:
        try:
            versions[peer] = metadata.version(peer)
        except metadata.PackageNotFoundError:
            versions[peer] = None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "versions": versions,
    }


def _warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.5 * cores:
        print(
            f"WARNING: something else is running here (load {load:.1f} on {cores} cores): "
            "the figures below are noisy",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
