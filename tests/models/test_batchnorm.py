"""SyncBatchNorm there and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
from torch import nn

from ddp_utils import get_world_size, revert_sync_batchnorm
from ddp_utils.models.batchnorm import convert_sync_batchnorm
from ddp_utils.models.wrap import _with_batchnorm_that_works


class Mine(nn.BatchNorm2d):
    """A batch norm of the user's own."""


def model() -> nn.Sequential:
    shared = nn.BatchNorm1d(3, eps=1e-3, momentum=None)
    inner = nn.Sequential(shared, nn.BatchNorm3d(4, affine=False))
    return nn.Sequential(shared, inner, Mine(2, track_running_stats=False), nn.GroupNorm(1, 2))


def modes(module: nn.Module) -> dict[str, bool]:
    return {name: m.training for name, m in module.named_modules(remove_duplicate=False)}


def test_there_and_back_is_the_same_model() -> None:
    before = model()
    before[1].eval()
    expected = copy.deepcopy(before)
    parameters = list(before.parameters())
    buffers = list(before.buffers())
    synced = convert_sync_batchnorm(before)
    assert sum(isinstance(m, nn.SyncBatchNorm) for m in synced.modules()) == 4
    after: Any = revert_sync_batchnorm(synced)
    assert repr(after) == repr(expected)
    assert modes(after) == modes(expected)
    assert all(a is b for a, b in zip(after.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(after.buffers(), buffers, strict=True))
    assert list(after.state_dict()) == list(expected.state_dict())


def test_a_layer_in_two_places_stays_one() -> None:
    layer = nn.SyncBatchNorm(2)
    after: Any = revert_sync_batchnorm(nn.Sequential(layer, nn.Sequential(layer)))
    assert after[0] is after[1][0]
    assert not isinstance(after[0], nn.SyncBatchNorm)


def test_a_layer_by_itself() -> None:
    layer = nn.SyncBatchNorm(2)
    after = revert_sync_batchnorm(layer)
    assert isinstance(after, nn.BatchNorm2d)
    assert after.weight is layer.weight
    for shape in ((3, 2), (3, 2, 4), (3, 2, 4, 4), (3, 2, 4, 4, 4)):
        assert after(torch.randn(shape)).shape == shape
    plain = nn.Linear(1, 1)
    assert revert_sync_batchnorm(plain) is plain


class OnAccelerator(nn.Sequential):
    """Says that its parameters are on an accelerator."""

    def parameters(self, recurse: bool = True) -> Any:
        return iter([nn.Parameter(torch.empty(1, device="meta"))])


@pytest.mark.distributed(world_size=[1, 2])
def test_layers_are_converted_only_where_that_can_work() -> None:
    kinds = []
    for holder in (nn.Sequential, OnAccelerator):
        for wanted in (False, True):
            made: Any = _with_batchnorm_that_works(holder(nn.BatchNorm1d(2)), wanted, None)
            kinds.append(type(made[0]).__name__)
    on_accelerator = {1: "BatchNorm1d", 2: "SyncBatchNorm"}[get_world_size()]
    assert kinds == ["BatchNorm1d"] * 3 + [on_accelerator]
