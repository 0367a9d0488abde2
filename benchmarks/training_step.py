"""What does a training step cost, wrapped by hand beside ``wrap_ddp`` and ``make_loader``?

Both ways train the same model on the same two ranks, in turns of a few steps each, so that a
slow moment of the machine hits both; the first steps, in which ``wrap_ddp`` looks at every
gradient, are over before the measurement begins.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it; here once for all ranks
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.measure import Target, compare
from ddp_utils import make_loader, wrap_ddp
from ddp_utils.testing import run_distributed

WARM_UP = 15
TURNS = 12
STEPS = 8
"""Steps of one way before it is the other's turn."""
NOISE = 0.03
"""At most 1.0 is asked for, within what a calm machine differs from itself."""
BY_HAND, OURS = "DDP and DistributedSampler by hand", "ddp_utils"

Step = Callable[[], None]


def main() -> None:
    """Measure all of it."""
    for name, model in (("convolutions and batch norm", convolutions), ("layers", layers)):
        pairs = Pairs(model)
        compare(
            f"training step, {name}, 2 ranks",
            {BY_HAND: lambda p=pairs: p.next(BY_HAND), OURS: lambda p=pairs: p.next(OURS)},  # type: ignore[misc]
            floor=BY_HAND,
            targets=[Target(OURS, 1 + NOISE)],
            rounds=7,
        )
    compare(
        "memory that training adds, 100 MB of weights, a rank",
        {way: lambda w=way: memory(w) for way in (BY_HAND, OURS)},  # type: ignore[misc]
        unit="MB",
        floor=BY_HAND,
        targets=[Target(OURS, 1.0)],
        rounds=3,
    )


class Pairs:
    """Both ways' step times, measured together in one job and handed out one by one."""

    def __init__(self, model: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
        self.model = model
        self.waiting: dict[str, list[float]] = {BY_HAND: [], OURS: []}

    def next(self, way: str) -> float:
        """Return a median step time of one way, in seconds."""
        if not self.waiting[way]:
            for name, seconds in run_distributed(in_turns, self.model, timeout=600)[0].items():
                self.waiting[name].append(seconds)
        return self.waiting[way].pop(0)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Return a small convolutional net, with a hundred parameters and buffers, and its data."""
    blocks: list[nn.Module] = []
    for width_in, width_out in [(3, 16)] + 15 * [(16, 16)]:
        blocks += [
            nn.Conv2d(width_in, width_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(width_out),
            nn.ReLU(),
        ]
    net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return net, torch.randn(2048, 3, 16, 16)


def layers() -> tuple[nn.Module, torch.Tensor]:
    """Return a net of fully connected layers without buffers, and its data."""
    blocks = [part for _ in range(8) for part in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*blocks), torch.randn(2048, 256)


def in_turns(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> dict[str, float]:
    """Return the median step time of both ways, in seconds."""
    torch.manual_seed(0)
    steps = {BY_HAND: steps_by_hand(*make()), OURS: steps_of_ours(*make())}
    for step in steps.values():
        for _ in range(WARM_UP):
            next(step)
    times: dict[str, list[float]] = {way: [] for way in steps}
    gc.disable()
    for turn in range(TURNS):
        for way in list(steps)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            for _ in range(STEPS):
                begin = time.perf_counter()
                next(steps[way])
                times[way].append(time.perf_counter() - begin)
    return {way: statistics.median(taken) for way, taken in times.items()}


def steps_by_hand(model: nn.Module, data: torch.Tensor) -> Iterator[None]:
    """Train as a script does that follows torch's tutorial, a step at a time."""
    dataset = TensorDataset(data)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, 16, sampler=sampler)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()
            yield


def steps_of_ours(model: nn.Module, data: torch.Tensor) -> Iterator[None]:
    """Train the same with this package, a step at a time."""
    loader = make_loader(TensorDataset(data), 16, shuffle=True)
    wrapped = wrap_ddp(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for _ in range(1000):
        for (batch,) in loader:
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()
            yield


def memory(way: str) -> float:
    """Return by how much a rank grew at most while it trained, in megabytes."""
    return max(run_distributed(growth, way, timeout=600))


def growth(way: str) -> float:
    """Train 100 MB of weights for some steps; return how much the rank's peak rose over them."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(25)])
    data = torch.randn(256, 1024)
    before = _kilobytes("VmRSS")
    steps = {BY_HAND: steps_by_hand, OURS: steps_of_ours}[way](model, data)
    for _ in range(WARM_UP):
        next(steps)
    return (_kilobytes("VmHWM") - before) / 1000


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
