"""How is a stream shared out over ranks and their loader workers?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info

from ddp_utils.agree.seeding import common_seed, mix_seeds
from ddp_utils.data.epochs import SharedNumbers
from ddp_utils.data.isolation import IsolatedRandom
from ddp_utils.data.resumable import describe
from ddp_utils.data.shares import share
from ddp_utils.data.worker_view import WorkerView
from ddp_utils.ground._torch_private import worker_info_as
from ddp_utils.world.world import get_rank, get_world_size

T = TypeVar("T")

__all__ = ["IterableShard", "shard_iterable"]


def shard_iterable(
    dataset: IterableDataset[T],
    *,
    pad: bool = False,
    drop_last: bool = False,
    seed: int | None = None,
) -> IterableDataset[T]:
    """Return a stream that gives each rank, and each of its loader workers, its own samples.

    Every worker of every rank reads the whole stream and keeps each n-th sample, n being the
    number of all workers. While it reads, the global generators of torch, NumPy and ``random``
    are seeded from the common seed and the epoch, so that a stream which shuffles does so
    alike everywhere; for the rest of the program they are as they were. A stream that asks
    ``get_worker_info()`` for ``id`` and ``num_workers`` shards itself: it is told the workers
    of all ranks, reads only its part, and is left alone. What a stream reads must otherwise be
    the same on every rank: not depend on the rank, the time or a generator seeded afresh.

    :func:`make_loader` does this by itself. Not a collective.

    Args:
        dataset: Any ``IterableDataset``. If it has a ``set_epoch``, it is told the epoch.
        pad: Whether all workers get equally many samples, as training needs: those that are one
            short repeat one. The stream is then read whole by each worker, also if it
            could shard itself. By default each sample is visited exactly once.
        drop_last: Whether the samples of the last, incomplete round are left out instead.
        seed: The same number on all ranks; by default the common seed.

    Returns:
        An ``IterableDataset``; its ``set_epoch`` reaches persistent workers too.

    Raises:
        TypeError: Not a stream, or shared out already.
        ValueError: Both ``pad`` and ``drop_last``.

    Example:
        >>> class Numbers(IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(5))
        >>> list(shard_iterable(Numbers()))
        [0, 1, 2, 3, 4]
    """
    return IterableShard(dataset, pad=pad, drop_last=drop_last, seed=seed)


class IterableShard(IterableDataset[Any]):
    """This rank's part of a stream. Made by :func:`shard_iterable`.

    Attributes that this class lacks are read from the stream.
    """

    def __init__(
        self, dataset: IterableDataset[Any], *, pad: bool, drop_last: bool, seed: int | None
    ) -> None:
        _check(dataset, pad, drop_last)
        self.dataset = dataset
        self.pad = pad
        self.drop_last = drop_last
        self.rank = get_rank()
        self.world_size = get_world_size()
        self._is_sharded = False
        # The seed is agreed on here, because workers have no connection to the other ranks.
        self.seed = common_seed() if seed is None else seed
        self._epoch_and_seed = SharedNumbers(0, 0)
        self.start_pass(0, self.seed)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet, as while being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass, also of persistent workers, be of this epoch."""
        self._epoch_and_seed[0] = epoch

    def start_pass(self, epoch: int, seed: int) -> None:
        """Let the next pass be of this epoch of a common seed."""
        self._epoch_and_seed[0] = epoch
        self._epoch_and_seed[1] = mix_seeds(seed) >> 1

    def __len__(self) -> int:
        return sum(self.lengths(1))

    def lengths(self, workers: int) -> list[int]:
        """Return how many samples each of this rank's workers gets, if the stream has a length."""
        length = len(self.dataset)  # type: ignore[arg-type]
        return [
            len(
                share(
                    worker * self.world_size + self.rank,
                    self.world_size * workers,
                    length,
                    pad=self.pad,
                    drop_last=self.drop_last,
                )
            )
            for worker in range(workers)
        ]

    def call_worker_init(self, init: Any, worker_id: int) -> None:
        """Call a user's ``worker_init_fn``, which may shard the stream itself."""
        view = WorkerView(self.dataset, self.rank, self.world_size)
        with worker_info_as(view):
            init(worker_id)
        self._is_sharded = view.was_used_to_shard
        if self._is_sharded and (self.pad or self.drop_last):
            raise RuntimeError(
                f"worker_init_fn shards {describe(self.dataset)} over the workers, so that equal "
                "shares (pad=True, drop_last=True) cannot be made of it: leave the sharding out, "
                "it is done for you"
            )

    def __iter__(self) -> Iterator[Any]:
        epoch, seed = self._epoch_and_seed[0], self._epoch_and_seed[1]
        view = WorkerView(self.dataset, self.rank, self.world_size)
        reader = _Reader(self.dataset, epoch, mix_seeds(seed, epoch))
        if self.drop_last:
            yield from _whole_rounds(reader, *view.shard)
        elif self.pad:
            yield from _dealt(reader, *view.shard, pad=True)
        else:
            reader.view = view
            first = reader.last_of(1)
            if self._is_sharded or view.was_used_to_shard:
                yield from first
                yield from reader.rest()
            else:
                yield from _dealt(reader, *view.shard, pad=False, first=first)
        if get_worker_info() is None and epoch == self._epoch_and_seed[0]:
            self.set_epoch(epoch + 1)


class _Reader:
    """Reads a stream so that it comes out the same on every rank and worker."""

    def __init__(self, dataset: Any, epoch: int, seed: int) -> None:
        self.view: WorkerView | None = None
        self.count = 0
        self._dataset = dataset
        self._isolated = IsolatedRandom(seed, dataset)
        self._stream: Iterator[Any] | None = None
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)

    def read(self, number: int) -> list[Any]:
        """Return the next samples, fewer than ``number`` at the stream's end."""
        return list(self._next(number, keep=number))

    def last_of(self, number: int) -> list[Any]:
        """Pass over ``number`` samples and return the last in a list; empty at the end."""
        before = self.count
        last = self._next(number, keep=1)
        return list(last) if self.count - before == number else []

    def _next(self, number: int, keep: int) -> deque[Any]:
        kept: deque[Any] = deque(maxlen=keep)
        with self._isolated, worker_info_as(self.view):
            if self._stream is None:
                self._stream = iter(self._dataset)
            for sample in islice(self._stream, number):
                kept.append(sample)
                self.count += 1
        return kept

    def rest(self) -> Iterator[Any]:
        """Yield what follows, with the worker's own random numbers."""
        assert self._stream is not None
        while True:
            with worker_info_as(self.view):
                sample = next(self._stream, self)
            if sample is self:
                return
            yield sample


def _dealt(
    reader: _Reader, shard: int, shards: int, *, pad: bool, first: list[Any] | None = None
) -> Iterator[Any]:
    """Yield each ``shards``-th sample; with ``pad`` one more where other shards have one more."""
    if first is None:
        first = reader.last_of(1)
    own = first if shard == 0 else reader.last_of(shard)
    spare, given = own or first, 0
    while own:
        yield own[0]
        given += 1
        own = reader.last_of(shards)
        if reader.view is not None and reader.view.was_used_to_shard:
            raise RuntimeError(
                f"{describe(reader.view.dataset)} asked which worker it is in only after its "
                "first sample: by then it was taken for a stream that does not shard itself. "
                "Let it ask when its __iter__ begins."
            )
    rounds = -(-reader.count // shards)
    if pad and given < rounds:
        yield from spare


def _whole_rounds(reader: _Reader, shard: int, shards: int) -> Iterator[Any]:
    """Yield each ``shards``-th sample, as long as all shards get one."""
    while len(samples := reader.read(shards)) == shards:
        yield samples[shard]


def _check(dataset: object, pad: bool, drop_last: bool) -> None:
    if isinstance(dataset, (IterableShard, IterDataPipe)):
        raise TypeError(
            f"{describe(dataset)} is shared out by itself: give it to a DataLoader as it is"
        )
    if not isinstance(dataset, IterableDataset):
        raise TypeError(
            f"shard_iterable takes an IterableDataset, not {describe(dataset)}; for a dataset "
            "with a length use make_sampler or make_loader"
        )
    if pad and drop_last:
        raise ValueError(
            "pad=True and drop_last=True: one repeats samples, the other leaves "
            "some out; choose one"
        )
