"""How does a training script get its batches, on every rank its own?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, TypeVar, cast

from torch import Generator
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    Sampler,
)

from ddp_utils.agree.by_word import first_word, new_topic
from ddp_utils.agree.loggers import get_logger
from ddp_utils.agree.seeding import given_seed
from ddp_utils.data.iterable import IterableShard, shard_iterable
from ddp_utils.data.passes import DistributedLoader
from ddp_utils.data.resumable import ResumableSampler, describe, length_of
from ddp_utils.data.samplers import ShardedSampler, make_sampler
from ddp_utils.data.shares import per_rank_batch_size
from ddp_utils.data.stream_turns import StreamTurns
from ddp_utils.data.worker_init import WorkerInit
from ddp_utils.data.wrapped import WrappedSampler, shard_batch_sampler
from ddp_utils.world.devices import accelerator_type
from ddp_utils.world.world import get_rank, get_world_size

T = TypeVar("T")

__all__ = ["make_loader"]

NOT_PINNED = ("cpu", "mps")
"""Devices that have no use for pinned memory, or no support."""

_logger = get_logger("ddp_utils.data")


def make_loader(
    dataset: Dataset[T],
    batch_size: int | None = 1,
    shuffle: bool = False,
    *,
    global_batch_size: int | None = None,
    pad: bool | None = None,
    drop_last: bool = False,
    seed: int | None = None,
    sampler: Sampler[Any] | Iterable[Any] | None = None,
    batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
    num_workers: int = 0,
    pin_memory: bool | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    generator: Generator | None = None,
    **options: Any,
) -> DataLoader[T]:
    """Return a ``DataLoader`` that gives each rank its own batches.

    Called like ``DataLoader``, from which it differs only in what the ranks need: each sample is
    where it belongs, the epoch advances after each pass and reaches the workers, workers
    are seeded apart on all ranks, and ``state_dict()`` tells where training stopped.
    Making and walking a loader is no collective.

    Args:
        dataset: A dataset with a length, or an ``IterableDataset``, which is shared out over
            ranks x workers (:func:`shard_iterable`). One with a ``set_epoch`` is told the epoch.
        batch_size: Samples in a batch of EACH RANK, as in torch; None hands out samples.
        shuffle: Whether each epoch has an order of its own (see :func:`make_sampler`).
        global_batch_size: Samples in the batches of all ranks together, instead of
            ``batch_size``. The same global batch holds the same samples at every world size.
        pad: Whether the ranks get equally many samples, as training needs (up to
            ``world_size - 1`` twice), or each sample exactly once, as evaluation needs. By
            default True when shuffling or with a sampler, else False.
        drop_last: Whether the last batch is left out where it is not full, on all ranks alike.
        seed: Of the order and of the workers, the same on all ranks; by default the common
            seed, which ``seed_everything`` sets.
        sampler: Any sampler; its draws are dealt out to the ranks.
        batch_sampler: Any batch sampler; its batches are (:func:`shard_batch_sampler`).
        num_workers: Of each rank.
        pin_memory: By default where there is an accelerator to copy to.
        worker_init_fn: Called in each worker, after it was seeded.
        generator: Of the workers' seeds. Without ``seed`` it also decides the order.
        options: Every other option of ``DataLoader``, untouched.

    Returns:
        A ``DataLoader`` with three methods more: ``set_epoch(epoch)``, ``state_dict()`` and
        ``load_state_dict(state)``. The state counts the batches that were handed out, also
        where workers have fetched more. From ``load_state_dict`` to the end of that epoch
        ``len(loader)`` is what is left of it.

    Raises:
        TypeError: The dataset has no length, or is shared out already.
        ValueError: No samples or no batches, a global batch that does not divide, or options
            that exclude each other.

    Example:
        >>> loader = make_loader(range(10), global_batch_size=4, shuffle=True)
        >>> [len(batch) for batch in loader]
        [4, 4, 2]
    """
    _refuse_contradictions(batch_size, global_batch_size, shuffle, sampler, batch_sampler)
    if pad is not None or seed is not None:
        _refuse_for_ready(sampler if batch_sampler is None else batch_sampler)
    if isinstance(dataset, IterableDataset) and not isinstance(dataset, IterDataPipe):
        _refuse_for_streams(dataset, shuffle or sampler is not None or batch_sampler is not None)
    if global_batch_size is not None:
        batch_size = per_rank_batch_size(global_batch_size, get_world_size())
    shares: dict[str, Any] = {"pad": pad, "drop_last": drop_last and not pad, "seed": seed}
    options.update(
        num_workers=num_workers,
        pin_memory=accelerator_type() not in NOT_PINNED if pin_memory is None else pin_memory,
        worker_init_fn=WorkerInit(get_rank(), worker_init_fn),
        generator=generator,
    )
    if isinstance(dataset, IterDataPipe):  # these are shared out by DataLoader itself
        return DataLoader(dataset, batch_size, shuffle, drop_last=drop_last, **options)
    if isinstance(dataset, IterableDataset):
        loader = _over_stream(dataset, batch_size, drop_last, shares, options)
    elif batch_sampler is not None:
        loader = _over_batches(dataset, batch_sampler, shares, options)
    else:
        loader = _over_samples(dataset, batch_size, drop_last, shuffle, sampler, shares, options)
    _refuse_no_batches(loader)
    _log_once(_arithmetic(loader))
    return cast("DataLoader[T]", loader)


def _over_samples(
    dataset: Any,
    batch_size: int | None,
    drop_last: bool,
    shuffle: bool,
    sampler: Any,
    shares: dict[str, Any],
    options: dict[str, Any],
) -> DistributedLoader:
    turns = sampler
    if not isinstance(turns, ResumableSampler):
        if sampler is None:
            turns = make_sampler(dataset, shuffle=shuffle, **shares)
        else:
            turns = make_sampler(
                sampler if isinstance(sampler, Sampler) else _Draws(sampler), **shares
            )
        assert isinstance(turns, ResumableSampler)
        _let_generator_decide(turns, options["generator"])
    return DistributedLoader(
        dataset,
        turns=turns,
        items_in_batch=batch_size or 1,
        name=describe(dataset),
        batch_size=batch_size,
        sampler=turns,
        drop_last=drop_last,
        **options,
    )


class _Draws(Sampler[Any]):
    """Anything that can be walked, such as a list of indices, as a sampler."""

    def __init__(self, draws: Iterable[Any]) -> None:
        self.draws = draws

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draws)

    def __len__(self) -> int:
        return len(self.draws)  # type: ignore[arg-type]  # a TypeError is the right answer


def _over_batches(
    dataset: Any, batch_sampler: Any, shares: dict[str, Any], options: dict[str, Any]
) -> DistributedLoader:
    turns, items = batch_sampler, 1
    inner = getattr(batch_sampler, "sampler", None)
    if isinstance(batch_sampler, BatchSampler) and isinstance(inner, ResumableSampler):
        turns, items = inner, batch_sampler.batch_size
    elif isinstance(inner, DistributedSampler):
        make_sampler(inner)  # says what is wrong with it
    elif not isinstance(batch_sampler, ResumableSampler):
        turns = batch_sampler = shard_batch_sampler(batch_sampler, **shares)
        assert isinstance(turns, ResumableSampler)
        _let_generator_decide(turns, options["generator"])
    return DistributedLoader(
        dataset,
        turns=turns,
        items_in_batch=items,
        name=describe(dataset),
        batch_sampler=batch_sampler,
        **options,
    )


def _over_stream(
    dataset: IterableDataset[Any],
    batch_size: int | None,
    drop_last: bool,
    shares: dict[str, Any],
    options: dict[str, Any],
) -> DistributedLoader:
    shard = dataset
    if not isinstance(dataset, IterableShard):
        if shares["seed"] is None and options["generator"] is not None and given_seed() is None:
            own = str(options["generator"].initial_seed())
            shares["seed"] = int(first_word(f"{new_topic('stream')}/seed", own))
        shard = shard_iterable(dataset, **{**shares, "pad": bool(shares["pad"])})
    assert isinstance(shard, IterableShard)
    return DistributedLoader(
        shard,
        turns=StreamTurns(shard, options["num_workers"], batch_size or 1, drop_last),
        items_in_batch=1,
        name=describe(shard.dataset),
        batch_size=batch_size,
        drop_last=drop_last,
        **options,
    )


def _let_generator_decide(turns: ResumableSampler, generator: Generator | None) -> None:
    if generator is not None and turns.own_seed is None:
        turns.own_seed = generator.initial_seed()


def _refuse_contradictions(
    batch_size: int | None,
    global_batch_size: int | None,
    shuffle: bool,
    sampler: object,
    batch_sampler: object,
) -> None:
    if shuffle and (sampler is not None or batch_sampler is not None):
        raise ValueError(
            "shuffle=True beside a sampler: the sampler decides the order; leave shuffle out"
        )
    if global_batch_size is not None and batch_size != 1:
        raise ValueError(
            f"batch_size={batch_size} and global_batch_size={global_batch_size}: batch_size is "
            "that of one rank, global_batch_size that of all together; give one of them"
        )
    sizes_or_sampler = (global_batch_size, sampler) != (None, None) or batch_size != 1
    if batch_sampler is not None and sizes_or_sampler:
        raise ValueError(
            "batch_size, global_batch_size or sampler beside a batch_sampler, which makes the "
            "batches itself; give one of them"
        )


def _refuse_for_ready(sampler: object) -> None:
    if isinstance(getattr(sampler, "sampler", sampler), ResumableSampler):
        raise ValueError(
            "pad or seed beside a sampler that make_sampler or shard_batch_sampler made: give them "
            "there"
        )


def _refuse_for_streams(dataset: object, orders: bool) -> None:
    if orders:
        raise ValueError(
            f"{describe(dataset)} is a stream, whose order is its own: leave out shuffle, sampler "
            "and batch_sampler, and shuffle in its __iter__"
        )


def _refuse_no_batches(loader: DistributedLoader) -> None:
    """Raise where every rank would train on nothing, and succeed at it."""
    turns, batches = loader.turns, _batches(loader)
    if _samples(loader) == 0:
        raise ValueError(f"{loader.name} has no samples")
    equal = isinstance(turns, ShardedSampler) and (turns.pad or turns.drop_last)
    if batches == 0 and (equal or loader.drop_last) and not turns.progress.start:
        raise ValueError(
            f"{loader.name} makes no batches: its {_samples(loader)} samples, dealt out to "
            f"{get_world_size()} ranks, do not fill one batch of {loader.batch_size} each, and "
            "drop_last=True leaves out what does not. Use smaller batches or drop_last=False."
        )


def _arithmetic(loader: DistributedLoader) -> str:
    """Return one line that says how large the global batch is, and why."""
    ranks, size = get_world_size(), loader.batch_size
    uneven = loader.turns.is_uneven(loader.items_in_batch, loader.drop_last)
    where = f"rank {get_rank()}" if uneven else "each rank"
    counts = {"samples": _samples(loader), f"batches on {where}": _batches(loader)}
    known = [f"{count} {what}" for what, count in counts.items() if count is not None]
    batch = (
        f"batches of {type(loader.batch_sampler).__name__} dealt out to {ranks} ranks"
        if size is None
        else f"global batch {ranks * size} = {ranks} ranks x {size}"
    )
    return ", ".join([f"{loader.name}: {batch}", *known])


def _batches(loader: DistributedLoader) -> int | None:
    """Return how many batches there are, where telling costs nothing."""
    if isinstance(loader.turns, WrappedSampler):
        return None
    return length_of(loader)


def _samples(loader: DistributedLoader) -> int | None:
    turns = loader.turns
    return turns.length if isinstance(turns, (ShardedSampler, StreamTurns)) else None


@cache
def _log_once(message: str) -> None:
    _logger.info(message)
