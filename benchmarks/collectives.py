"""What does averaging a dictionary of metrics cost, beside one bare ``all_reduce`` and others?

All contenders are measured inside the same two ranks, call by call in turn, so that a noisy
moment hits all alike. Each number is the median of many calls.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import Skip, Target, compare, installed, seconds, sweep
from ddp_utils import all_reduce_mean, barrier, get_rank
from ddp_utils.testing import run_distributed

METRICS = 50
CALLS = 300
ROUNDS = 5

Calls = dict[str, Callable[[], object]]


def main() -> None:
    """Measure all of it."""
    metrics()
    with_debug()
    sizes()


def metrics() -> None:
    """The mean of 50 metrics over 2 ranks."""
    measured = _medians(run_distributed(mean_of_metrics, timeout=600)[0])
    compare(
        f"mean of {METRICS} metrics over 2 ranks",
        {
            f"bare all_reduce of {METRICS} floats": measured("bare"),
            "ddp_utils, Python floats": measured("floats"),
            "ddp_utils, tensors": measured("tensors"),
            "accelerate": installed("accelerate", measured("accelerate")),
            "ignite": installed("ignite", measured("ignite")),
        },
        floor=f"bare all_reduce of {METRICS} floats",
        rounds=ROUNDS,
        targets=[Target("ddp_utils, Python floats", 1.25)],
    )


def with_debug() -> None:
    """The same under DDP_UTILS_DEBUG=1, and a barrier."""
    plain = _medians(run_distributed(mean_and_barrier, False)[0])
    debug = _medians(run_distributed(mean_and_barrier, True)[0])
    compare(
        "what DDP_UTILS_DEBUG=1 costs",
        {
            "ddp_utils mean": plain("mean"),
            "ddp_utils mean, debug": debug("mean"),
            "torch barrier": plain("torch"),
            "ddp_utils barrier": plain("barrier"),
            "ddp_utils barrier, debug": debug("barrier"),
        },
        floor="ddp_utils mean",
        rounds=ROUNDS,
    )


def sizes() -> None:
    """One float32 tensor of growing size: what the check and float64 cost."""
    numbers = [1, 256, 10_000, 1_000_000]
    measured = run_distributed(mean_of_a_tensor, numbers, timeout=600)[0]
    bare, ours = (
        {size: itertools.cycle(measured[name, size]) for size in numbers}
        for name in ("bare", "ours")
    )
    sweep(
        "mean of one float32 tensor over 2 ranks",
        "numbers",
        numbers,
        {"bare all_reduce": lambda x: next(bare[x]), "ddp_utils": lambda x: next(ours[x])},
    )


def _medians(measured: dict[str, list[float]]) -> Callable[[str], Callable[[], float]]:
    """Return a way to hand out what was measured in the ranks, one round after the other."""

    def contender(name: str) -> Callable[[], float]:
        rounds: Iterator[float] = itertools.cycle(measured.get(name, [float("nan")]))
        return lambda: next(rounds)

    return contender


# -- what the ranks do --------------------------------------------------------------------------


def mean_of_metrics() -> dict[str, list[float]]:
    floats = {f"metric_{i}": float(i + get_rank()) for i in range(METRICS)}
    tensors = {name: torch.tensor(value) for name, value in floats.items()}
    bare = torch.zeros(METRICS)
    calls: Calls = {
        "bare": lambda: dist.all_reduce(bare),
        "floats": lambda: all_reduce_mean(floats),
        "tensors": lambda: all_reduce_mean(tensors),
    }
    for name, theirs in (("accelerate", _by_accelerate), ("ignite", _by_ignite)):
        if not isinstance(installed(name, theirs), Skip):
            calls[name] = theirs(tensors)
    return _measure(calls)


def _by_accelerate(tensors: dict[str, torch.Tensor]) -> Callable[[], object]:
    from accelerate import PartialState
    from accelerate.utils import reduce

    PartialState(cpu=True)
    return lambda: reduce(tensors, "mean")


def _by_ignite(tensors: dict[str, torch.Tensor]) -> Callable[[], object]:
    import ignite.distributed as idist

    idist.sync()
    size = idist.get_world_size()
    return lambda: {name: idist.all_reduce(value) / size for name, value in tensors.items()}


def mean_and_barrier(debug: bool) -> dict[str, list[float]]:
    os.environ["DDP_UTILS_DEBUG"] = "1" if debug else "0"
    floats = {f"metric_{i}": float(i) for i in range(METRICS)}
    return _measure(
        {
            "mean": lambda: all_reduce_mean(floats),
            "barrier": lambda: barrier(),
            "torch": lambda: dist.barrier(),
        }
    )


def mean_of_a_tensor(sizes: list[int]) -> dict[tuple[str, int], list[float]]:
    measured = {}
    for size in sizes:
        tensor = torch.zeros(size)
        calls: Calls = {
            "bare": lambda tensor=tensor: dist.all_reduce(tensor),
            "ours": lambda tensor=tensor: all_reduce_mean(tensor),
        }
        for name, rounds in _measure(calls, CALLS if size < 10**5 else 20).items():
            measured[name, size] = rounds
    return measured


def _measure(calls: Calls, times: int = CALLS) -> dict[str, list[float]]:
    """Return for each call, by round, the median of its times in seconds; calls take turns."""
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        taken: dict[str, list[Any]] = {name: [] for name in calls}
        for _ in range(times):
            for name, call in calls.items():
                taken[name].append(seconds(call))
        for name, each in taken.items():
            rounds[name].append(statistics.median(each))
    return rounds


if __name__ == "__main__":
    main()
