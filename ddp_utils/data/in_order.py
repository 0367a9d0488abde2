"""How do the ranks' predictions come together in the dataset's order?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Sampler

from ddp_utils.data.passes import DistributedLoader
from ddp_utils.data.progress import Walk
from ddp_utils.data.resumable import ResumableSampler, describe
from ddp_utils.data.samplers import ShardedSampler
from ddp_utils.data.shares import share
from ddp_utils.ground.errors import RanksDisagreeError
from ddp_utils.ground.trees import flatten, paths_of, unflatten
from ddp_utils.talk.collectives import all_gather
from ddp_utils.talk.gathering import join_rows, terms_of_rows
from ddp_utils.world.world import get_rank, get_world_size

T = TypeVar("T")

__all__ = ["gather_in_order"]


def gather_in_order(
    tree: T, sampler: Sampler[Any] | DataLoader[Any], *, dst: int | None = None
) -> T | None:
    """Return the predictions of all ranks, in the dataset's order, each exactly once.

    What padding repeated is left out, so that metrics over the result are those of one
    process. A collective: every rank calls it after its pass, also one that had no samples.

    Args:
        tree: This rank's predictions in the order in which its loader handed out the samples:
            tensors and arrays with one row for each sample along dimension 0, lists with one
            value for each sample, in any nesting of mappings, tuples and dataclasses. A rank
            without samples may pass anything, such as None.
        sampler: The sampler that was walked, or its loader.
        dst: The only rank that gets the result, the others get None. By default all do.

    Returns:
        The tree with the rows of all samples, by index in the dataset. After a resumed pass only
        those of that pass; with ``drop_last`` without those left out. What was drawn from a
        wrapped sampler comes in the order in which it was drawn.

    Raises:
        RanksDisagreeError: On every rank, if the predictions of one do not fit its share, or
            differ from another's in structure, dtype or a row's shape.
        TypeError: The sampler was not made by this package, or deals out batches.

    Example:
        >>> from ddp_utils import make_loader
        >>> loader = make_loader(range(5), batch_size=2)
        >>> squares = torch.cat([batch**2 for batch in loader])
        >>> gather_in_order({"square": squares}, loader)
        {'square': tensor([ 0,  1,  4,  9, 16])}
    """
    turns = _sampler_of(sampler)
    trouble: Exception | None = None
    try:
        mine = _Brought(None, _fitting(tree, turns))
    except Exception as error:  # whatever it is, every rank has to learn of it
        trouble, mine = error, _Brought(f"rank {get_rank()} {error}", None)
    brought = all_gather(mine)
    problems = [theirs.problem for theirs in brought if theirs.problem is not None]
    if problems:
        raise RanksDisagreeError(
            f"gather_in_order over {describe(turns.dataset)}: {'; '.join(problems)}. Each rank has "
            "to bring one row for every sample that its loader handed out, in that order."
        ) from trouble
    if dst is not None and dst != get_rank():
        return None
    walk = turns.progress.newest_complete()
    assert walk is not None
    keys = [_keys(turns, walk, rank) for rank in range(len(brought))]
    filled = [rank for rank in range(len(brought)) if len(keys[rank])]
    trees = {rank: flatten(brought[rank].tree, lists_are_leaves=True) for rank in filled}
    _require_alike(trees, describe(turns.dataset))
    order = _order_of([keys[rank] for rank in filled])
    first = filled[0]
    rows = zip(*(leaves for _, leaves in trees.values()), strict=True)
    joined = [_join(of_leaf, order) for of_leaf in rows]
    return unflatten(brought[first].tree, trees[first][0], joined)  # type: ignore[no-any-return]


@dataclass
class _Brought:
    """What one rank brings: its predictions, or what is wrong with them."""

    problem: str | None
    tree: Any


def _sampler_of(sampler: object) -> ResumableSampler:
    turns = sampler.turns if isinstance(sampler, DistributedLoader) else sampler
    if isinstance(turns, DataLoader):
        turns = turns.sampler
    deals_batches = isinstance(sampler, DataLoader) and sampler.batch_sampler is turns
    if not isinstance(turns, ResumableSampler) or deals_batches:
        raise TypeError(
            "gather_in_order needs a sampler made by make_sampler or a loader over one, not "
            f"{describe(sampler)}: only that knows which sample is at which place"
        )
    return turns


def _fitting(tree: Any, turns: ResumableSampler) -> Any:
    """Return this rank's predictions, None if it had no samples.

    Raises:
        LookupError, ValueError: They are not one row for each sample; the message tells what this
            rank has instead.
    """
    if turns.num_replicas != get_world_size():
        raise ValueError(f"has a sampler made for {turns.num_replicas} ranks")
    walk = turns.progress.newest_complete()
    if walk is None:
        raise LookupError(f"has not walked {describe(turns.dataset)} to its end")
    share = len(_keys(turns, walk, get_rank()))
    if not share:
        return None
    structure, leaves = flatten(tree, lists_are_leaves=True)
    for path, leaf in zip(paths_of(structure), leaves, strict=True):
        rows, at = _rows(leaf), path or "the root"
        if rows is None:
            raise ValueError(f"has a {type(leaf).__name__} at {at}, without rows")
        if rows != share:
            raise ValueError(f"has {rows} rows at {at}, for {share} samples")
    return tree


def _rows(leaf: Any) -> int | None:
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return len(leaf) if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list) else None


def _keys(turns: ResumableSampler, walk: Walk, rank: int) -> npt.NDArray[np.int64]:
    """Return where each row of a rank belongs, -1 for what padding repeated."""
    if isinstance(turns, ShardedSampler):
        end = turns.length
        at = np.arange(*_bounds(turns.positions(rank, walk.start)), dtype=np.int64)
        where = turns.order(walk.epoch)(at % end)
    else:
        # A pass can be complete by the sampler's length before its sequence was asked for its end.
        end = len(turns.dataset) if walk.end is None else walk.end  # type: ignore[arg-type]
        positions = share(
            rank, turns.num_replicas, end, walk.start, pad=turns.pad, drop_last=turns.drop_last
        )
        where = at = np.arange(*_bounds(positions), dtype=np.int64)
    return np.where(at < end, where, -1)


def _bounds(positions: range) -> tuple[int, int, int]:
    return positions.start, positions.stop, positions.step


def _require_alike(trees: Mapping[int, tuple[Any, list[Any]]], dataset: str) -> None:
    """Raise unless the rows of all ranks, given by rank, can be joined leaf by leaf."""
    terms = {
        rank: dict(zip(paths_of(structure), map(_terms, leaves), strict=True))
        for rank, (structure, leaves) in trees.items()
    }
    first, expected = next(iter(terms.items()))
    for rank, found in terms.items():
        if found == expected:
            continue
        path = next(p for p in {**expected, **found} if expected.get(p) != found.get(p))
        raise RanksDisagreeError(
            f"gather_in_order over {dataset}: at {path or 'the root'}, rank {first}: "
            f"{expected.get(path, 'nothing')}, rank {rank}: {found.get(path, 'nothing')}. "
            "Bring the same structure, dtypes and shapes of rows on every rank."
        )


def _terms(leaf: Any) -> str:
    """Return what the rows of a leaf must have in common on all ranks."""
    return "list" if isinstance(leaf, list) else terms_of_rows(leaf)


def _order_of(keys: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return the places, in the joined rows of all ranks, of the rows by ascending key."""
    where = np.concatenate(keys)
    order = np.argsort(where, kind="stable")
    return order[np.searchsorted(where[order], 0) :]


def _join(rows: Sequence[Any], order: npt.NDArray[np.int64]) -> Any:
    """Return the rows of all ranks as one leaf, in an order."""
    if isinstance(rows[0], list):
        together = list(chain.from_iterable(rows))
        return [together[at] for at in order]
    joined = join_rows(rows)
    if isinstance(joined, torch.Tensor):
        return joined[torch.from_numpy(order).to(joined.device)]
    return joined[order]
