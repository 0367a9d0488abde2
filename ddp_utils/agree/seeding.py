"""Which seed do the ranks share, and how does each rank and worker get its own from it?"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ddp_utils.process_group import agreed_seed
from ddp_utils.world.world import get_rank, get_world_size, is_distributed

__all__ = ["common_seed", "mix_seeds", "seed_everything", "seed_generators"]

_given: int | None = None
_MASK = (1 << 64) - 1


def seed_everything(seed: int | None = None) -> int:
    """Seed torch, NumPy and ``random`` differently on every rank and worker, reproducibly.

    The rank is mixed in here, and in a ``DataLoader`` worker its id: pass the SAME number on
    every rank. Samplers and loaders made afterwards shuffle by this number.

    Args:
        seed: Any integer; by default the number that the ranks agreed on when their group was
            made.

    Returns:
        The common seed, the same on all ranks.

    Example:
        >>> seed_everything(42)
        42
    """
    global _given
    if seed is None:
        seed = common_seed()
    _given = int(seed)
    info = get_worker_info()
    seed_generators(mix_seeds(_given, get_rank(), 0 if info is None else info.id + 1))
    return _given


def common_seed() -> int:
    """Return the seed that all ranks share: that of :func:`seed_everything`, else an agreed one.

    Raises:
        RuntimeError: Several ranks, but no process group yet in which they could agree.
    """
    if _given is not None:
        return _given
    if not is_distributed() and get_world_size() > 1:
        raise RuntimeError(
            f"rank {get_rank()} of {get_world_size()} is in no process group yet, so the ranks "
            "cannot agree on a seed: call ddp_utils.init_distributed() first, or "
            "ddp_utils.seed_everything(number)"
        )
    return agreed_seed()


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (all devices), NumPy and ``random``."""
    torch.manual_seed(seed & (_MASK >> 1))
    np.random.seed(mix_seeds(seed, 1) & 0xFFFFFFFF)
    random.seed(mix_seeds(seed, 2))


def mix_seeds(*numbers: int) -> int:
    """Mix integers of any size into one of 64 bits; order matters, neighbours come out far apart.

    Each step is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014).

    >>> mix_seeds(42, 0) == mix_seeds(42, 0) != mix_seeds(42, 1)
    True
    """
    state = len(numbers)
    for number in numbers:
        while True:
            state = _finalise((state + 0x9E3779B97F4A7C15 + number) & _MASK)
            number >>= 64
            if number in (0, -1):
                break
    return state


def _finalise(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
