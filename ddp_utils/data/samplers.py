"""Which samples does this rank visit, in which order, and where did it stop?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import chain
from operator import length_hint
from typing import Any

from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

from ddp_utils.agree.seeding import common_seed
from ddp_utils.data.permutation import Permutation
from ddp_utils.world.world import get_rank, get_world_size

__all__ = ["ShardedSampler", "make_sampler"]

BLOCK = 8192
"""Samples computed at once: few enough for the processor's cache, enough to forget Python."""


def make_sampler(
    data: Dataset[Any] | Sampler[Any] | Iterable[Any] | int,
    *,
    shuffle: bool = True,
    pad: bool | None = None,
    drop_last: bool = False,
    seed: int | None = None,
) -> DistributedSampler[Any]:
    """Return a sampler that gives each rank its own share of a dataset."""
    if isinstance(data, IterableDataset):
        raise TypeError(
            f"{type(data).__name__} is an IterableDataset, which no sampler can order: use "
            "shard_iterable(dataset), or make_loader(dataset), which does it by itself"
        )
    source = range(data) if isinstance(data, int) else data
    if not isinstance(source, Sized):
        raise TypeError(f"{type(source).__name__} has no length")
    return ShardedSampler(source, shuffle=shuffle, pad=pad, drop_last=drop_last, seed=seed)


@dataclass
class Walk:
    """One pass of one rank: where it began and how much of it has been handed out."""

    epoch: int
    start: int
    """The global position that the pass began at."""
    handed_out: int = 0
    """Samples of this rank, counting those left in ``block``."""
    block: Iterator[int] = field(default_factory=lambda: iter(()))

    def taken(self) -> int:
        return self.handed_out - length_hint(self.block)


class ShardedSampler(DistributedSampler[int]):
    """The sampler that :func:`make_sampler` returns."""

    def __init__(
        self,
        data: Sized,
        *,
        shuffle: bool = True,
        pad: bool | None = None,
        drop_last: bool = False,
        seed: int | None = None,
    ) -> None:
        if len(data) == 0:
            raise ValueError(f"{describe(data)} has no samples")
        world_size = get_world_size()
        super().__init__(data, world_size, get_rank(), shuffle, 0, drop_last)  # type: ignore[arg-type]
        self.pad = (shuffle if pad is None else pad) and not drop_last
        self._seed = seed
        self._start = 0
        self._walk: Walk | None = None
        self._driver: Walk | None = None
        self.num_samples = len(self._positions(0))
        self.total_size = self._end(0)

    @property
    def seed(self) -> int:
        """The seed that all ranks shuffle by."""
        if self._seed is None:
            self._seed = common_seed()
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        walk = self._driver
        if walk is not None:
            return chain.from_iterable(self._blocks(walk, False))
        walk = self.begin()
        return chain.from_iterable(self._blocks(walk, True))

    def begin(self) -> Walk:
        self._walk = Walk(self.epoch, self._start)
        return self._walk

    def finish(self, walk: Walk) -> None:
        """Note that a pass is exhausted: the next one is of the next epoch."""
        if walk is self._walk:
            self.set_epoch(walk.epoch + 1)

    def __len__(self) -> int:
        return len(self._positions(self._start)) if self._start else self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        if epoch != self.epoch:
            self.epoch, self._start, self._walk = epoch, 0, None

    def _end(self, start: int) -> int:
        """Return the global position, beyond the last sample where padded, that passes end at."""
        length, ranks = len(self.dataset), self.num_replicas  # type: ignore[arg-type]
        left = max(0, length - start)
        if self.drop_last:
            return start + left // ranks * ranks
        return start + (-(-left // ranks) * ranks if self.pad else left)

    def _positions(self, start: int) -> range:
        return range(start + self.rank, self._end(start), self.num_replicas)

    def _blocks(self, walk: Walk, own: bool) -> Iterator[Iterator[int]]:
        length = len(self.dataset)  # type: ignore[arg-type]
        positions = self._positions(walk.start)
        inside = range(positions.start, min(positions.stop, length), positions.step)
        order = Permutation(length, self.seed, walk.epoch) if self.shuffle else None
        for at in range(0, len(inside), BLOCK):
            part = inside[at : at + BLOCK]
            block = list(part) if order is None else order.take(part)
            walk.handed_out += len(block)
            walk.block = iter(block)
            yield walk.block
        for position in positions[len(inside) :]:
            at = position % length
            walk.handed_out += 1
            walk.block = iter([at if order is None else order.take(range(at, at + 1))[0]])
            yield walk.block
        if own:
            self.finish(walk)


def describe(data: Any) -> str:
    """Return how an error names a dataset."""
    return f"dataset {type(data).__name__}"
