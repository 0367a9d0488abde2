"""Which seed do the ranks share, and how does each rank and worker get its own from it?"""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ddp_utils.agree.by_word import new_topic, require_same
from ddp_utils.process_group import agreed_seed
from ddp_utils.world.world import SIMULATED, get_rank, get_world_size, is_distributed

__all__ = ["common_seed", "given_seed", "mix_seeds", "seed_everything", "seed_generators"]

MASK = (1 << 64) - 1

_given: int | None = None
_agreed: int | None = None


def seed_everything(seed: int | None = None) -> int:
    """Seed torch, NumPy and ``random`` differently on every rank and worker, reproducibly.

    Pass the SAME number on every rank: the rank, and in a ``DataLoader`` worker its id, is mixed
    in here. Samplers and loaders made afterwards shuffle by this number. Models that are
    built afterwards start out different on each rank, until DDP hands rank zero's to all.

    Not a collective: ranks may call it at different times.

    Args:
        seed: Any integer. By default the number that the ranks agreed on when their group was
            made, which is a new one in each run.

    Returns:
        The common seed, the same on all ranks, to be logged.

    Raises:
        RanksDisagreeError: Another rank passed another number at this line.
        RuntimeError: No number was passed, and there are ranks but no process group yet in
            which they could agree on one.

    Example:
        >>> seed_everything(42)
        42
    """
    global _given
    if seed is None:
        seed = common_seed()
    seed = int(seed)
    require_same(
        new_topic("seed_everything"),
        str(seed),
        "seed_everything got different numbers",
        "Pass the same number on every rank; the rank is mixed in by seed_everything.",
    )
    _given = seed
    info = get_worker_info()
    seed_generators(mix_seeds(seed, get_rank(), 0 if info is None else info.id + 1))
    return seed


def given_seed() -> int | None:
    """Return the number given to :func:`seed_everything`, or None before that."""
    return _given


def common_seed() -> int:
    """Return the seed that all ranks share: that of :func:`seed_everything`, else an agreed one.

    Raises:
        RuntimeError: There are other ranks, but no process group yet in which to agree.
    """
    global _agreed
    if _given is not None:
        return _given
    if get_worker_info() is not None:
        return _known_in_worker()
    if is_distributed() and SIMULATED.get() is None:
        _agreed = agreed_seed()
        return _agreed
    if get_world_size() > 1 and SIMULATED.get() is None:
        raise RuntimeError(
            f"rank {get_rank()} of {get_world_size()} is in no process group yet, so the ranks "
            "cannot agree on a seed: call ddp_utils.init_distributed() first, or give a number "
            "with seed= or ddp_utils.seed_everything"
        )
    return _own_seed()


def _known_in_worker() -> int:
    """Return what the process that started this worker agreed on: a worker cannot ask."""
    if _agreed is None:
        raise RuntimeError(
            "a DataLoader worker cannot agree on a seed with other ranks: give seed_everything a "
            "number there"
        )
    return _agreed


@lru_cache(maxsize=1)
def _own_seed() -> int:
    """Return this process's own random number, for where there is nobody to agree with."""
    return agreed_seed()


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (on all devices), NumPy and ``random``."""
    torch.manual_seed(seed & (MASK >> 1))
    np.random.seed(mix_seeds(seed, 1) & 0xFFFFFFFF)
    random.seed(mix_seeds(seed, 2))


def mix_seeds(*numbers: int) -> int:
    """Mix integers of any size into one of 64 bits; neighbouring numbers come out far apart.

    Each step is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014).

    >>> mix_seeds(42, 0) == mix_seeds(42, 0) != mix_seeds(42, 1)
    True
    """
    state = len(numbers)
    for number in numbers:
        while True:
            state = _finalise((state + 0x9E3779B97F4A7C15 + number) & MASK)
            number >>= 64
            if number in (0, -1):
                break
    return state


def _finalise(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
