"""What does a shuffle cost, beside ``DistributedSampler``?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DistributedSampler

from benchmarks import Target, compare, seconds, sweep
from ddp_utils import make_sampler
from ddp_utils.testing import simulated_world

JOB = Path(__file__).parent / "jobs" / "sampler.py"
SIZES = [10**6, 10**7, 10**8, 10**12]
LIMITS = {"DistributedSampler": 10**8}
SMALL = [7, 64, 1000, 4096, 65_536, 10**5, 10**6]
SHORT = [7, 32, 64, 128, 256, 512, 1000, 2000, 10_000]


def main() -> None:
    """Measure long orders, each in a process of its own, and passes over short ones."""
    for title, key, unit in (
        ("shuffle: time to the first index, one of 8 ranks", "first", "s"),
        ("shuffle: indices a second, one of 8 ranks", "rate", "M/s"),
        ("shuffle: peak of extra memory, one of 8 ranks", "memory", "MiB"),
    ):
        contenders = {"ddp_utils": partial(_job, "ddp_utils", key)}
        contenders["DistributedSampler"] = partial(_job, "torch", key)
        sweep(title, "samples", SIZES, contenders, unit=unit, rounds=3, limits=LIMITS)
    compare(
        "first index of a shuffle of 10^8 samples over 8 ranks",
        {"ddp_utils": partial(_job, "ddp_utils", "first", 10**8)},
        targets=[Target("ddp_utils", at_most=0.005, absolute=True)],
    )
    compare(
        "indices a second of a shuffle of 10^12 samples over 8 ranks",
        {"ddp_utils": partial(_job, "ddp_utils", "rate", 10**12)},
        unit="M/s",
        targets=[Target("ddp_utils", at_least=10, absolute=True)],
    )
    for ranks in (1, 8):
        sweep(
            f"shuffle: a whole pass of one of {ranks} ranks",
            "samples",
            SMALL,
            {"ddp_utils": partial(_ours, ranks), "DistributedSampler": partial(_theirs, ranks)},
            rounds=9,
        )
    for shuffle in (True, False):
        for ranks in (1, 2, 4):
            _short_passes(ranks, shuffle)


def _short_passes(ranks: int, shuffle: bool) -> None:
    """Compare passes so short that what is done once in each is most of them."""
    theirs, ours = {}, {}
    with simulated_world(world_size=ranks):
        for samples in SHORT:
            data: Any = range(samples)
            theirs[samples] = DistributedSampler(data, ranks, rank=0, shuffle=shuffle)
            ours[samples] = make_sampler(samples, seed=0, shuffle=shuffle, pad=True)
    sweep(
        f"passes a second over {'shuffled' if shuffle else 'ordered'} sets, one of {ranks} ranks",
        "samples",
        SHORT,
        {
            "ddp_utils": lambda samples: _passes(ours[samples]),
            "DistributedSampler": lambda samples: _passes(theirs[samples]),
        },
        unit="k/s",
        rounds=51,
    )


def _passes(sampler: Any) -> float:
    repeats = 1 + 20_000 // max(100, len(sampler))
    list(sampler)

    def walk() -> None:
        for epoch in range(repeats):
            sampler.set_epoch(epoch)
            list(sampler)

    return repeats / seconds(walk) / 1000


_measured: dict[tuple[str, int], list[dict[str, float]]] = {}


def _job(name: str, key: str, samples: float) -> float:
    """Return one figure of a run in a process of its own; the three figures share their runs."""
    runs = _measured.setdefault((name, int(samples)), [])
    fresh = [run for run in runs if key in run]
    if not fresh:
        command = [sys.executable, str(JOB), name, str(int(samples))]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        runs.append(json.loads(out))
        fresh = runs[-1:]
    return fresh[0].pop(key)


def _ours(ranks: int, samples: float) -> float:
    with simulated_world(world_size=ranks):
        return _pass(make_sampler(int(samples), seed=0), samples)


def _theirs(ranks: int, samples: float) -> float:
    sampler: Any = DistributedSampler(range(int(samples)), ranks, rank=0)  # type: ignore[arg-type]
    return _pass(sampler, samples)


def _pass(sampler: Any, samples: float) -> float:
    repeats = max(1, int(20_000 // samples))
    walk = partial(deque, sampler, maxlen=0)
    walk()
    return seconds(lambda: [walk() for _ in range(repeats)]) / repeats
