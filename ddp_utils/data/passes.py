"""How is a loader walked, from its first batch to its last?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Protocol
from weakref import WeakSet, ref

from torch import Generator
from torch.utils.data import DataLoader, IterableDataset

from ddp_utils.agree.seeding import mix_seeds
from ddp_utils.data.epochs import EpochFollower
from ddp_utils.data.progress import Progress, Walk
from ddp_utils.data.resumable import length_of
from ddp_utils.data.stream_turns import StreamTurns
from ddp_utils.world.world import get_rank

__all__ = ["DistributedLoader", "Pass", "Turns", "take_uneven_draw"]


class Turns(Protocol):
    """What decides who gets what: a sampler, or the shard of a stream."""

    @property
    def progress(self) -> Progress: ...
    @property
    def seed(self) -> int: ...
    def begin(self) -> Walk: ...
    def drawn_by(self, walk: Walk) -> AbstractContextManager[None]: ...
    def is_uneven(self, batch_size: int, drop_last: bool) -> bool: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class DistributedLoader(DataLoader[Any]):
    """The ``DataLoader`` that :func:`ddp_utils.make_loader` returns."""

    def __init__(
        self, dataset: Any, *, turns: Turns, items_in_batch: int, name: str, **options: Any
    ) -> None:
        super().__init__(dataset, **options)
        self.turns = turns
        self.items_in_batch = items_in_batch
        """Of the items that ``turns`` counts in, be they samples or batches."""
        self.name = name
        self._seeds_workers = self.generator is None
        self._follower: EpochFollower | None = None
        is_copied = self.persistent_workers and not isinstance(dataset, IterableDataset)
        if is_copied and callable(getattr(dataset, "set_epoch", None)):
            self._follower = EpochFollower(dataset)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's is a private class
        return Pass(self)

    def __len__(self) -> int:
        return len(self.turns) if isinstance(self.turns, StreamTurns) else super().__len__()

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch.

        Not needed: a pass that was walked to its end moves on to the next epoch by itself.
        """
        self.turns.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, by the batches that it has handed out.

        A few numbers, the same on every rank.
        """
        return self.turns.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken: the next pass is the rest of that epoch.

        Datasets with a length resume at any world size, batch size and number of workers;
        streams only as they were.

        Raises:
            ValueError: The state cannot be resumed here; the message tells what differs.
        """
        self.turns.load_state_dict(state)

    def fetching(self, epoch: int) -> Iterator[Any]:
        """Return torch's own iterator over the batches of an epoch."""
        if self._seeds_workers:
            seed = mix_seeds(self.turns.seed, epoch, get_rank()) if self.num_workers else 0
            self.generator = Generator().manual_seed(seed >> 1)
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        if self._follower is None:
            return super().__iter__()
        self._follower.epoch[0] = epoch
        # Workers are started with the follower; everybody else still sees the user's dataset.
        dataset, self.__dict__["dataset"] = self.dataset, self._follower
        try:
            return super().__iter__()
        finally:
            self.__dict__["dataset"] = dataset


_drawn: WeakSet[Pass] = WeakSet()
"""Uneven passes that have handed out a batch, and no model has been asked since."""


class Pass(Iterator[Any]):
    """One pass over a loader: torch's own iterator, and a count of what it has handed out."""

    def __init__(self, loader: DistributedLoader) -> None:
        self.name = loader.name
        self._turns = loader.turns
        self._walk = walk = loader.turns.begin()
        # A pass that is dropped has to end, and its workers with it: the walk must not hold it.
        self._handed_out = handed_out = [0]
        walk.count_by(lambda: handed_out[0], loader.items_in_batch)
        batches = length_of(loader)
        walk.length = None if batches is None else batches * loader.items_in_batch
        walk.walker = ref(self)
        self._is_uneven = self._turns.is_uneven(loader.items_in_batch, loader.drop_last)
        with self._turns.drawn_by(walk):
            self._fetched = loader.fetching(walk.epoch)
            if isinstance(self._turns, StreamTurns):  # its seen batches are fetched once more
                deque(islice(self._fetched, walk.start), maxlen=0)

    def __next__(self) -> Any:
        with self._turns.drawn_by(self._walk):
            try:
                batch = next(self._fetched)
            except StopIteration:
                _drawn.discard(self)
                self._turns.progress.finish(self._walk)
                raise
        if self._is_uneven:
            _drawn.add(self)
        self._handed_out[0] += 1
        self._turns.progress.moved(self._walk)
        return batch

    def __len__(self) -> int:
        return len(self._fetched)  # type: ignore[arg-type]  # torch's iterator has a length


def take_uneven_draw() -> str | None:
    """Return a loader that has more batches on some ranks, if one was drawn from since last asked.

    Such a pass is for evaluation: each sample once, so that ranks may end at different batches. A
    training forward of its batch would wait for ranks that are done. An iterator that is kept
    for later is no reason to complain.
    """
    name = next((one.name for one in _drawn), None)
    _drawn.clear()
    return name
