"""How does a training script get its batches, on every rank its own?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from ddp_utils.agree.seeding import mix_seeds, seed_generators
from ddp_utils.data.samplers import ShardedSampler, Walk, make_sampler
from ddp_utils.world.devices import accelerator_type
from ddp_utils.world.world import get_rank, get_world_size

__all__ = ["make_loader", "uneven_pass_in_progress"]

_logger = logging.getLogger("ddp_utils")


def make_loader(
    dataset: Dataset[Any],
    batch_size: int | None = 1,
    shuffle: bool = False,
    *,
    global_batch_size: int | None = None,
    pad: bool | None = None,
    drop_last: bool = False,
    seed: int | None = None,
    pin_memory: bool | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """Return a ``DataLoader`` that gives each rank its own share of the batches."""
    if global_batch_size is not None:
        batch_size = per_rank_batch_size(global_batch_size, get_world_size())
    sampler = make_sampler(dataset, shuffle=shuffle, pad=pad, drop_last=drop_last, seed=seed)
    return DistributedLoader(
        dataset,
        batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=accelerator_type() != "cpu" if pin_memory is None else pin_memory,
        worker_init_fn=RankedWorkerInit(get_rank(), worker_init_fn),
        **options,
    )


def per_rank_batch_size(global_batch_size: int, world_size: int) -> int:
    """Return each rank's part of a global batch."""
    if global_batch_size % world_size:
        lower = global_batch_size // world_size * world_size
        nearest = [size for size in (lower, lower + world_size) if size]
        raise ValueError(
            f"global_batch_size={global_batch_size} does not divide over {world_size} ranks; "
            f"the nearest that do: {' and '.join(map(str, nearest))}"
        )
    return global_batch_size // world_size


class RankedWorkerInit:
    """Seed a worker apart from those of the other ranks, then call the user's function."""

    def __init__(self, rank: int, then: Callable[[int], None] | None) -> None:
        self.rank = rank
        self.then = then

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        seed_generators(mix_seeds(info.seed, self.rank))
        if self.then is not None:
            self.then(worker_id)


class DistributedLoader(DataLoader[Any]):
    """The ``DataLoader`` that :func:`make_loader` returns."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return Pass(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]


class Pass(Iterator[Any]):
    """One pass over a loader."""

    def __init__(self, loader: DistributedLoader) -> None:
        sampler = loader.sampler
        assert isinstance(sampler, ShardedSampler)
        self._sampler = sampler
        self._walk: Walk = sampler.begin()
        sampler._driver = self._walk
        try:
            self._batches = DataLoader.__iter__(loader)
        finally:
            sampler._driver = None

    def __next__(self) -> Any:
        self._sampler._driver = self._walk
        try:
            return next(self._batches)
        except StopIteration:
            self._sampler.finish(self._walk)
            raise
        finally:
            self._sampler._driver = None


def uneven_pass_in_progress() -> str | None:
    """Return the name of a loader whose ranks have unequal numbers of batches, while walked."""
    return None


def gather_in_order(tree: Any, sampler: Any) -> Any:
    """Return the predictions of all ranks, in dataset order, each once."""
    raise NotImplementedError
