"""How does foreign code draw the same random numbers on every rank, unseen by the rest?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ddp_utils.agree.seeding import mix_seeds

__all__ = ["IsolatedRandom", "digest_of_generators"]

DEPTH = 4
"""How deep generators are looked for: a batch sampler's sampler's generator is at 2."""

Access = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How the state of one generator is read and set."""


class IsolatedRandom:
    """Inside ``with``, every generator that foreign code may use is one of our own making.

    The global generators of torch (CPU), NumPy and ``random``, and those that ``owner`` holds
    in its attributes, start from ``seed`` and keep their own course from block to block. Outside
    they are as if nothing had happened.
    """

    def __init__(self, seed: int, owner: object = None) -> None:
        found = list(_generators(owner, DEPTH, set()))
        self._access = [*_GLOBAL, *(_access(generator) for generator in found)]
        self._inside = [
            *_global_states(mix_seeds(seed, 0)),
            *(_fresh_state(g, mix_seeds(seed, i)) for i, g in enumerate(found, 1)),
        ]
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        self._outside = self._exchange(self._inside)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._inside = self._exchange(self._outside)

    def _exchange(self, states: list[Any]) -> list[Any]:
        before = [get() for get, _ in self._access]
        for (_, put), state in zip(self._access, states, strict=True):
            put(state)
        return before


def digest_of_generators(owner: object) -> int | None:
    """Return a number for the states of the generators that ``owner`` holds; None for none."""
    states = [repr(_plain(_access(g)[0]())) for g in _generators(owner, DEPTH, set())]
    if not states:
        return None
    return int.from_bytes(blake2b("".join(states).encode(), digest_size=7).digest(), "big")


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    return state


_GLOBAL: list[Access] = [
    (torch.random.get_rng_state, torch.random.set_rng_state),
    (lambda: np.random.get_state(legacy=False), np.random.set_state),
    (random.getstate, random.setstate),
]


def _global_states(seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed >> 1)
    numpy = np.random.RandomState(seed & 0xFFFFFFFF)
    return [generator.get_state(), numpy.get_state(legacy=False), random.Random(seed).getstate()]


def _generators(owner: object, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yield the generators in the attributes of an object, in a fixed order."""
    if id(owner) in seen or depth < 0:
        return
    seen.add(id(owner))
    if isinstance(owner, _KINDS):
        yield owner
    elif isinstance(owner, (list, tuple)):
        if len(owner) <= 64:  # longer ones are indices and weights
            for child in owner:
                yield from _generators(child, depth - 1, seen)
    elif hasattr(owner, "__dict__") and (depth == DEPTH or not isinstance(owner, _OPAQUE)):
        for _, child in sorted(vars(owner).items()):
            yield from _generators(child, depth - 1, seen)


_OPAQUE = (type, Dataset, torch.nn.Module)
"""What holds the data, and not the order; unless it is a stream that was asked about itself."""

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _access(generator: Any) -> Access:
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    if isinstance(generator, np.random.RandomState):
        return (lambda: generator.get_state(legacy=False)), generator.set_state
    return generator.getstate, generator.setstate


def _fresh_state(generator: Any, seed: int) -> Any:
    """Return the state of a generator of the same kind that was made from ``seed``."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(seed >> 1).get_state()
    if isinstance(generator, np.random.Generator):
        return type(generator.bit_generator)(seed).state
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
        kind = getattr(np.random, state["bit_generator"])
        return {**np.random.RandomState(kind(seed)).get_state(legacy=False)}
    return type(generator)(seed).getstate()
