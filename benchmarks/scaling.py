"""How much faster do more ranks train the digits, against the ideal?

The same net, samples and global batch as ``examples/digits``. Where there are GPUs DataParallel
runs beside; on the CPU every rank has one thread, so that two ranks mean two cores.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import Skip, Target, compare, needs_gpu, seconds
from ddp_utils import get_device, launch, make_loader, wrap_ddp, wrap_dp

GLOBAL_BATCH = 192
EPOCHS = 2
SAMPLES = 1440


def main() -> None:
    """Measure it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    room = max(cores, torch.cuda.device_count())
    two = partial(_throughput, 2) if room >= 2 else Skip(f"needs 2 cores or GPUs, found {room}")
    compare(
        "digits training, throughput (ideal with 2 ranks: 2.00 x)",
        {
            "1 process, DataLoader": _by_hand,
            "ddp_utils, 1 rank": partial(_throughput, 1),
            "ddp_utils, 2 ranks": two,
            "DataParallel, 2 GPUs": needs_gpu(_data_parallel, count=2),
        },
        unit="samples/s",
        floor="1 process, DataLoader",
        targets=[Target("ddp_utils, 1 rank", at_least=0.95)],
    )


def _throughput(ranks: int) -> float:
    return launch(_on_rank, nproc=ranks)[0]


def _on_rank() -> float:
    torch.set_num_threads(1)
    loader = make_loader(_dataset(), global_batch_size=GLOBAL_BATCH, shuffle=True, drop_last=True)
    return _samples_per_second(wrap_ddp(_net()), loader, get_device())


def _by_hand() -> float:
    return launch(_alone, nproc=1)[0]


def _alone() -> float:
    torch.set_num_threads(1)
    device = get_device()
    loader = DataLoader(_dataset(), GLOBAL_BATCH, shuffle=True, drop_last=True)
    return _samples_per_second(_net().to(device), loader, device)


def _data_parallel() -> float:
    device = torch.device("cuda", 0)
    loader = DataLoader(_dataset(), GLOBAL_BATCH, shuffle=True, drop_last=True)
    return _samples_per_second(wrap_dp(_net().to(device)), loader, device)


def _samples_per_second(
    model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], device: torch.device
) -> float:
    """Return how many samples of all ranks a second are trained on, after a first epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    def train() -> None:
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def train_all() -> None:
        for _ in range(EPOCHS):
            train()

    train()
    took = seconds(train_all)
    return EPOCHS * (SAMPLES // GLOBAL_BATCH) * GLOBAL_BATCH / took


def _dataset() -> TensorDataset:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    images = torch.tensor(digits.images[:SAMPLES], dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(digits.target[:SAMPLES]))


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )
