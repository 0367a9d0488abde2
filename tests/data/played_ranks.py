"""Ranks without processes: for what never communicates, one process can play all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ddp_utils.world.world import SIMULATED, World


def on_ranks(world_size: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Return ``fn(...)`` as each rank of a simulated world gets it."""
    results = []
    for rank in range(world_size):
        token = SIMULATED.set(World(rank=rank, world_size=world_size, local_rank=rank))
        try:
            results.append(fn(*args, **kwargs))
        finally:
            SIMULATED.reset(token)
    return results


def global_random_state() -> tuple[str, ...]:
    """Return something that changes whenever a global generator is drawn from or seeded."""
    torch_state = str(torch.get_rng_state().tolist())
    return torch_state, str(np.random.get_state()), str(random.getstate())
