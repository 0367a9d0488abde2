"""What does stripping the prefixes of a large state dictionary cost, beside doing it by hand?"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from benchmarks import Target, compare, seconds
from ddp_utils import load_model_state, strip_module_prefix

KEYS = 100_000
LAYERS = 2_000


def main() -> None:
    """Strip 100,000 keys, and load a model of 4,000; no contender copies a tensor to strip."""
    value = torch.ones(1)
    ddp = OrderedDict((f"module.layers.{i}.weight", value) for i in range(KEYS))
    nested = OrderedDict((f"module._orig_mod.module.{i}.weight", value) for i in range(KEYS))
    compare(
        "strip the prefix of 100,000 keys",
        {
            "dict comprehension": lambda: seconds(partial(_by_hand, ddp)),
            "torch's consume_prefix": partial(_consume, ddp),
            "ddp_utils": lambda: seconds(partial(strip_module_prefix, ddp)),
            "ddp_utils, three wrappers": lambda: seconds(partial(strip_module_prefix, nested)),
        },
        floor="dict comprehension",
        targets=[
            Target("ddp_utils", at_most=0.2, absolute=True),
            Target("ddp_utils, three wrappers", at_most=0.2, absolute=True),
        ],
    )
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(LAYERS)))
    state = nn.DataParallel(model).state_dict()
    compare(
        "load a wrapped model's state of 4,000 tensors into the bare model",
        {
            "by hand": lambda: seconds(lambda: model.load_state_dict(_by_hand(state))),
            "ddp_utils": lambda: seconds(lambda: load_model_state(model, state)),
        },
        floor="by hand",
    )


def _by_hand(state: OrderedDict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What people write; it knows one wrapper, and loses ``_metadata`` and the type."""
    return {key.removeprefix("module."): value for key, value in state.items()}


def _consume(state: OrderedDict[str, torch.Tensor]) -> float:
    """Torch's own renames in place, so each turn needs a copy of the mapping, made before."""
    fresh = state.copy()
    return seconds(lambda: consume_prefix_in_state_dict_if_present(fresh, "module."))
