"""How does a sampler made for one process serve several ranks?

All ranks draw one and the same sequence from it, and take its items in turn. That the sequence is
the same everywhere does not depend on the sampler's generators: they are ours while it draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain, cycle, islice
from typing import Any

from torch.utils.data import DistributedSampler, Sampler

from ddp_utils.agree.by_word import require_same
from ddp_utils.agree.seeding import mix_seeds
from ddp_utils.data.isolation import IsolatedRandom, digest_of_generators
from ddp_utils.data.progress import Walk
from ddp_utils.data.resumable import ResumableSampler, describe

__all__ = ["WrappedSampler", "shard_batch_sampler"]

LARGEST_DRAW = 64
"""Items for each rank that are drawn at once, at most; a pass begins with 1, then 2, then 4."""


def shard_batch_sampler(
    batch_sampler: Sampler[list[Any]] | Iterable[list[Any]],
    *,
    pad: bool | None = None,
    drop_last: bool = False,
    seed: int | None = None,
) -> DistributedSampler[Any]:
    """Return a batch sampler that deals the batches of another out to the ranks.

    For samplers that decide what goes together: by length, by tokens, by class. All ranks draw
    one sequence of batches, and the rank r gets the batches r, r + world_size, ... Making and
    walking it is no collective.

    Args:
        batch_sampler: Anything that yields lists of indices; it needs no length.
        pad: Whether the ranks get equally many batches, as training needs; the first batches
            are repeated for that. With ``pad=False`` each batch is visited exactly once. By
            default True, unless ``drop_last``.
        drop_last: Whether batches are left out instead, so that the ranks get equally many.
        seed: As for :func:`make_sampler`.

    Raises:
        TypeError: It is shared out already, or can be walked only once.
        RanksDisagreeError: When walked, if another rank draws other batches.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> list(shard_batch_sampler(BatchSampler(range(5), 2, drop_last=False)))
        [[0, 1], [2, 3], [4]]
    """
    if isinstance(batch_sampler, DistributedSampler):
        raise TypeError(f"{describe(batch_sampler)} is shared out over the ranks already")
    pad = not drop_last if pad is None else pad
    return WrappedSampler(batch_sampler, pad=pad, drop_last=drop_last, seed=seed)


class WrappedSampler(ResumableSampler):
    """One rank's share of what another sampler draws. Made by :func:`make_sampler`.

    While the other sampler draws, the global generators of torch, NumPy and ``random``, and
    those it holds itself, are seeded from the common seed and the epoch; outside they keep their
    state. Without ``seed=`` or ``seed_everything`` the common seed is derived from the sampler's
    own generators, as they are on the rank that comes first. A sampler with a ``set_epoch`` is
    told the epoch. To resume, the draws of the epoch are repeated and passed over.

    Attributes that this class lacks are read from the other sampler.
    """

    def __init__(
        self, source: Iterable[Any], *, pad: bool, drop_last: bool, seed: int | None
    ) -> None:
        if isinstance(source, Iterator):
            raise TypeError(
                f"{describe(source)} is an iterator, which can be walked only once: pass an "
                "object whose __iter__ starts anew for each epoch"
            )
        super().__init__(source, shuffle=True, pad=pad, drop_last=drop_last, seed=seed)
        self.own_seed = digest_of_generators(source)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet, as while being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        with self._isolated(self.epoch):
            length = len(self.dataset)  # type: ignore[arg-type]
        left = max(0, length - self.progress.start)
        if self.drop_last:
            return left // self.num_replicas
        return len(range(0 if self.pad else self.rank, left, self.num_replicas))

    def is_uneven(self, batch_size: int, drop_last: bool) -> bool:
        # How much there is to draw is not known before the end.
        return self.num_replicas > 1 and not (self.pad or self.drop_last)

    def _isolated(self, epoch: int) -> IsolatedRandom:
        isolated = IsolatedRandom(mix_seeds(self.seed, epoch), self.dataset)
        if callable(getattr(self.dataset, "set_epoch", None)):
            with isolated:
                self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        return isolated

    def _blocks(self, walk: Walk, finish: bool) -> Iterator[Iterator[Any]]:
        ranks = self.num_replicas
        sequence = chain.from_iterable(self._draws(walk))
        first = list(islice(sequence, ranks))
        unseen = chain(first, sequence)
        deque(islice(unseen, walk.start), maxlen=0)
        for size in _growing(ranks):
            items = list(islice(unseen, size))
            if not items:
                break
            over = len(items) % ranks  # in the last block only
            if over and self.pad:
                items += islice(cycle(first), ranks - over)
            elif over and self.drop_last:
                del items[-over:]
            yield walk.draw(items[self.rank :: ranks])
        if finish:
            self._ran_out(walk)

    def _draws(self, walk: Walk) -> Iterator[list[Any]]:
        """Yield the whole sequence of an epoch, some items at a time."""
        isolated = self._isolated(walk.epoch)
        with isolated:
            drawing = iter(self.dataset)
        drawn = 0
        items: list[Any] = []
        for size in _growing(self.num_replicas):
            before = items
            with isolated:
                items = list(islice(drawing, size))
            drawn += len(items)
            if not before:
                self._compare(f"{walk.epoch}/start", drawn, items)
            if not items:
                self._compare(f"{walk.epoch}/end", drawn, before)
                self._refuse_nothing(drawn)
                walk.end = drawn
                return
            yield items

    def _refuse_nothing(self, drawn: int) -> None:
        """Raise where every rank would train on nothing, and succeed at it."""
        if drawn == 0:
            raise ValueError(f"{describe(self.dataset)} drew nothing")
        if self.drop_last and drawn < self.num_replicas:
            raise ValueError(
                f"{describe(self.dataset)} made {drawn} draws for {self.num_replicas} ranks, so "
                "with drop_last=True every rank gets none. Use fewer ranks or pad=True."
            )

    def _compare(self, when: str, drawn: int, items: list[Any]) -> None:
        """Raise if another rank draws something else: it would repeat and lose samples."""
        require_same(
            f"{self._topic}/{self.seed}/{when}",
            f"{drawn} draws, the newest {blake2b(repr(items).encode(), digest_size=8).hexdigest()}",
            f"{describe(self.dataset)} draws differently on different ranks",
            "Its order must follow from its arguments, the epoch and torch's, NumPy's or "
            "Python's global generators, or from generators in its attributes; not from the rank, "
            "the time or a generator seeded afresh.",
        )


def _growing(ranks: int) -> Iterator[int]:
    """Yield sizes of draws: small for whoever looks at a first batch only, then larger."""
    size = 1
    while True:
        yield size * ranks
        size = min(2 * size, LARGEST_DRAW)
