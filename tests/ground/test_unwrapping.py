"""What is inside any nesting of wrappers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp_utils import unwrap, wrap_ddp
from ddp_utils.ground.unwrapping import wrapper_layers


def compiled(model: nn.Module) -> nn.Module:
    if hasattr(model, "_orig_mod"):
        return model  # torch refuses to compile what it has just compiled
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


@settings(deadline=None)
@given(st.lists(st.sampled_from([nn.DataParallel, compiled]), max_size=6))
def test_any_nesting(wrappers: list[type[nn.Module]]) -> None:
    bare = nn.Linear(1, 1)
    model: nn.Module = bare
    layers = [model]
    for wrap in wrappers:
        model = wrap(model)
        if model is not layers[0]:
            layers.insert(0, model)
    assert unwrap(model) is bare
    assert list(wrapper_layers(model)) == layers


def test_an_average_holds_a_copy() -> None:
    bare = nn.Linear(1, 1)
    average = AveragedModel(nn.DataParallel(bare))
    assert type(unwrap(average)) is nn.Linear
    assert unwrap(average) is not bare


def test_wrappers_inside_the_model_are_the_models_own() -> None:
    model = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)))
    assert unwrap(model) is model


def test_compiling_in_place_wraps_nothing() -> None:
    model = nn.Linear(1, 1)
    model.compile(backend="eager")
    assert unwrap(model) is model


@pytest.mark.distributed(world_size=1)
def test_ddp_in_between() -> None:
    bare = nn.Linear(1, 1)
    assert unwrap(compiled(wrap_ddp(compiled(bare)))) is bare


def test_asking_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; from ddp_utils import unwrap; unwrap(torch.nn.Linear(1, 1)); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
