"""Which samples of a dataset does this rank visit, and in which order?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from ddp_utils.data.permutation import TABLE_BELOW, InOrder, Permutation
from ddp_utils.data.progress import Drawn, Walk
from ddp_utils.data.resumable import ResumableSampler, describe
from ddp_utils.data.shares import batches_are_uneven, dealt_end, share
from ddp_utils.data.warning import warn_caller
from ddp_utils.data.wrapped import WrappedSampler

__all__ = ["ShardedSampler", "make_sampler"]

BLOCK = 8192
"""Samples computed at once: few enough for the processor's cache, many enough to forget Python."""


def make_sampler(
    data: Dataset[Any] | Sampler[Any] | Iterable[Any] | int,
    *,
    shuffle: bool = True,
    pad: bool | None = None,
    drop_last: bool = False,
    seed: int | None = None,
) -> DistributedSampler[Any]:
    """Return a sampler that deals a dataset out to the ranks.

    All ranks see one order and take its positions in turn. The epoch advances when a pass
    has been walked to its end; ``set_epoch`` is honoured but not needed. Making and walking a
    sampler is no collective. Time and memory to start are constant, at any length.

    Args:
        data: A dataset with a length, a length, or any sampler: what a sampler draws is dealt
            out, from one sequence that all ranks draw alike (see :class:`WrappedSampler`).
        shuffle: Whether an epoch has an order of its own (see :class:`Permutation`). A
            sampler given as ``data`` decides its order itself.
        pad: Whether ranks get equally many samples, as training needs; up to
            ``world_size - 1`` from the start of the order are then visited twice. With
            ``pad=False`` every sample is visited exactly once, as evaluation needs. By default
            True when shuffling, and False otherwise and with ``drop_last``.
        drop_last: Whether shares are made equal by leaving samples out instead.
        seed: The same number on all ranks; by default that of ``seed_everything``, else one that
            the ranks agreed on when their group was made.

    Returns:
        A ``DistributedSampler`` by type, also at world size 1, for a ``DataLoader``. Its
        ``state_dict()`` and ``load_state_dict()`` let a run stop and resume at any sample, also
        at another world size or batch size.

    Raises:
        TypeError: The data have no length and are no sampler, or are a stream.
        ValueError: No samples; fewer samples than ranks, and ``drop_last``; ``pad`` and
            ``drop_last`` together.
        RanksDisagreeError: When first walked, if another rank made it from something else.

    Example:
        >>> list(make_sampler(5, shuffle=False))
        [0, 1, 2, 3, 4]
        >>> sampler = make_sampler(1000, seed=0)
        >>> first, second = list(sampler), list(sampler)
        >>> sorted(first) == sorted(second) == list(range(1000)), first == second
        (True, False)
    """
    if isinstance(data, (IterableDataset, DistributedSampler)):
        raise TypeError(_NOT_THESE[isinstance(data, IterableDataset)].format(describe(data)))
    if type(data) is SequentialSampler:
        data, shuffle = data.data_source, False  # type: ignore[assignment]  # has a length
    if isinstance(data, (int, np.integer)):
        data = _range(int(data))
    if isinstance(data, Sampler) or (
        isinstance(data, Iterable) and not hasattr(data, "__getitem__")
    ):
        pad = not drop_last if pad is None else pad
        return WrappedSampler(data, pad=pad, drop_last=drop_last, seed=seed)
    if not isinstance(data, Sized):
        raise TypeError(
            f"{describe(data)} has no length to share out: give it a __len__, pass a length or a "
            "sampler, or make it an IterableDataset and use shard_iterable"
        )
    pad = shuffle and not drop_last if pad is None else pad
    return ShardedSampler(data, shuffle=shuffle, pad=pad, drop_last=drop_last, seed=seed)


_NOT_THESE = {
    True: "{} is a stream, which no sampler can order: use shard_iterable(dataset), or "
    "make_loader(dataset), which does it by itself",
    False: "{} is shared out over the ranks already, and would be shared out twice. Pass the "
    "dataset, or the sampler that your script had on one GPU.",
}


def _range(length: int) -> range:
    if length < 0:
        raise ValueError(f"make_sampler got a length of {length}")
    return range(length)


class ShardedSampler(ResumableSampler):
    """One rank's share of a dataset with a length. Made by :func:`make_sampler`."""

    def __init__(
        self, source: Sized, *, shuffle: bool, pad: bool, drop_last: bool, seed: int | None
    ) -> None:
        super().__init__(source, shuffle=shuffle, pad=pad, drop_last=drop_last, seed=seed)
        self.length: int = len(source)
        self._whole = self.positions(self.rank, 0)
        self._whole_length = len(self._whole)
        self._is_short = self._whole_length <= BLOCK or self.length < TABLE_BELOW
        self._in_order: list[int] = []
        length = self.length
        if length == 0:
            raise ValueError(f"{describe(source)} has no samples")
        if drop_last and length < self.num_replicas:
            raise ValueError(
                f"{describe(source)} has {length} samples for {self.num_replicas} ranks, so with "
                "drop_last=True every rank gets none. Use fewer ranks or pad=True."
            )
        if pad and length < self.num_replicas and self.rank == 0:
            warn_caller(
                f"{describe(source)} has {length} samples for {self.num_replicas} ranks: with "
                "pad=True each is visited by several ranks in every epoch"
            )

    def __len__(self) -> int:
        start = self.progress.start
        return len(self.positions(self.rank, start)) if start else self._whole_length

    def positions(self, rank: int, start: int) -> range:
        """Return the positions in the epoch's order that a rank visits from a position on."""
        return share(
            rank,
            self.num_replicas,
            self.length,
            start,
            pad=self.pad,
            drop_last=self.drop_last,
        )

    @property
    def total_size(self) -> int:  # type: ignore[override]
        start = self.progress.start
        ends = dealt_end(
            self.length, self.num_replicas, start, pad=self.pad, drop_last=self.drop_last
        )
        return ends - start

    def is_uneven(self, batch_size: int, drop_last: bool) -> bool:
        if self.pad or self.drop_last:
            return False
        left = max(0, self.length - self.progress.start)
        return batches_are_uneven(left, self.num_replicas, batch_size, drop_last)

    def order(self, epoch: int) -> Permutation | InOrder:
        """Return the order of an epoch."""
        if not self.shuffle:
            return InOrder(self.length)
        return Permutation(self.length, self.seed, epoch)

    def _visits(self, start: int) -> tuple[range, range]:
        """Return the positions that a rank visits, and the one given twice to fill up its share."""
        positions = self.positions(self.rank, start) if start else self._whole
        if not positions or positions[-1] < self.length:
            return positions, range(0)
        again = positions[-1] % self.length
        return positions[:-1], range(again, again + 1)

    def _drawn(self, walk: Walk) -> Drawn:
        if not self._is_short:
            return super()._drawn(walk)
        # A short pass costs what is done once in it: so it is one list, without a generator.
        end = self.progress.finish if walk.counts_itself else self._ran_out
        return walk.draw_all(self._items(walk.epoch, walk.start), end)

    def _items(self, epoch: int, start: int) -> list[int]:
        """Return all items of a short pass at once; not to be written to."""
        is_kept = not (self.shuffle or start)
        if is_kept and self._in_order:
            return self._in_order
        order = self.order(epoch)
        inside, again = self._visits(start)
        items = order.take(inside) + order.take(again) if again else order.take(inside)
        if is_kept:
            self._in_order = items
        return items

    def _blocks(self, walk: Walk, finish: bool) -> Iterator[Iterator[int]]:
        order = self.order(walk.epoch)
        inside, again = self._visits(walk.start)
        for at in range(0, len(inside), BLOCK):
            yield walk.draw(order.take(inside[at : at + BLOCK]))
        if again:
            yield walk.draw(order.take(again))
        if finish:
            self._ran_out(walk)
