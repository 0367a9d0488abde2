"""The same global batch gives the same training at every world size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import ddp_utils
from ddp_utils.testing import run_distributed

STEPS = 20
DIGITS = Path(__file__).parents[1] / "examples" / "digits"


def train() -> tuple[list[float], dict[str, torch.Tensor], list[list[int]]]:
    """Train the digits net in float64, with its BatchNorm frozen: batch statistics are a rank's."""
    sys.path.insert(0, str(DIGITS))
    import before

    ddp_utils.seed_everything(0)
    torch.set_default_dtype(torch.float64)
    train_set, _ = before.load_data()
    images, labels = train_set.tensors
    numbered = torch.utils.data.TensorDataset(images.double(), labels, torch.arange(len(labels)))
    torch.manual_seed(0)
    model = ddp_utils.wrap_ddp(before.make_net())
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    loader = ddp_utils.make_loader(numbered, global_batch_size=64, shuffle=True, drop_last=True)
    losses, samples = [], []
    while len(losses) < STEPS:
        for x, y, index in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(ddp_utils.all_reduce_mean(loss.item()))
            samples.append(sorted(ddp_utils.gather_cat(index).tolist()))
            if len(losses) == STEPS:
                break
    state = ddp_utils.unwrap(model).state_dict()
    return losses, {name: value.clone() for name, value in state.items()}, samples


@pytest.fixture(scope="module")
def alone() -> Any:
    return run_distributed(train, world_size=1)[0]


@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_weights_and_samples_are_those_of_one_process(alone: Any, world_size: int) -> None:
    losses, state, samples = alone
    for rank_losses, rank_state, rank_samples in run_distributed(train, world_size=world_size):
        assert rank_samples == samples
        assert rank_losses == pytest.approx(losses, abs=1e-6)
        for name, value in state.items():
            torch.testing.assert_close(rank_state[name], value, rtol=0, atol=1e-6)
