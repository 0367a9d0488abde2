"""How do the ranks' predictions come together in the dataset's order?"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ddp_utils.talk.collectives import all_gather
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
        RanksDisagreeError: On every rank, if the predictions of one do not fit its share.
        TypeError: The sampler was not made by this package, or deals out batches.

    Example:
        >>> from ddp_utils import make_loader
        >>> loader = make_loader(range(5), batch_size=2)
        >>> squares = torch.cat([batch**2 for batch in loader])
        >>> gather_in_order({"square": squares}, loader)
        {'square': tensor([ 0,  1,  4,  9, 16])}
    """
    turns = _sampler_of(sampler)
    turns.progress.settle()
    problem = _problem(tree, turns)
    walk = turns.progress.walked
    has_rows = problem is None and walk is not None and len(_keys(turns, walk, get_rank()))
    brought = all_gather(_Brought(problem, tree if has_rows else None))
    problems = [theirs.problem for theirs in brought if theirs.problem is not None]
    if problems:
        raise RanksDisagreeError(
            f"gather_in_order over {describe(turns.dataset)}: {'; '.join(problems)}. Each rank has "
            "to bring one row for every sample that its loader handed out, in that order."
        )
    if dst is not None and dst != get_rank():
        return None
    assert walk is not None
    trees = [theirs.tree for theirs in brought]
    keys = [_keys(turns, walk, rank) for rank in range(len(trees))]
    filled = [rank for rank in range(len(trees)) if len(keys[rank])]
    paths = {rank: sorted(path for path, _ in _leaves(trees[rank])) for rank in filled}
    odd = [rank for rank in filled if paths[rank] != paths[filled[0]]]
    if odd:
        raise RanksDisagreeError(
            f"gather_in_order over {describe(turns.dataset)}: rank {odd[0]} has {paths[odd[0]]}, "
            f"rank {filled[0]} has {paths[filled[0]]}. Bring the same structure on every rank."
        )
    return _join([trees[rank] for rank in filled], [keys[rank] for rank in filled])  # type: ignore[no-any-return]


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


def _problem(tree: Any, turns: ResumableSampler) -> str | None:
    """Return what is wrong with this rank's predictions, None if nothing is."""
    rank = get_rank()
    if turns.num_replicas != get_world_size():
        return f"rank {rank} has a sampler made for {turns.num_replicas} ranks"
    if turns.progress.walked is None:
        return f"rank {rank} has not walked {describe(turns.dataset)} to its end"
    share = len(_keys(turns, turns.progress.walked, rank))
    for path, leaf in _leaves(tree) if share else ():
        rows = _rows(leaf)
        if rows is None:
            return f"rank {rank} has a {type(leaf).__name__} at {path or 'the root'}, without rows"
        if rows != share:
            return f"rank {rank} has {rows} rows at {path or 'the root'}, for {share} samples"
    return None


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
        assert walk.end is not None  # a wrapped sampler that was walked to its end
        end = walk.end
        positions = share(
            rank, turns.num_replicas, end, walk.start, pad=turns.pad, drop_last=turns.drop_last
        )
        where = at = np.arange(*_bounds(positions), dtype=np.int64)
    return np.where(at < end, where, -1)


def _bounds(positions: range) -> tuple[int, int, int]:
    return positions.start, positions.stop, positions.step


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree in which lists are leaves, with their paths."""
    children = _children(tree)
    if children is None:
        yield path, tree
    else:
        for key, child in children:
            yield from _leaves(child, f"{path}[{key!r}]")


def _map(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return a tree of ``fn(leaf, *its leaves in other trees)``; lists are leaves."""
    children = _children(tree)
    if children is None:
        return fn(tree, *others)
    twins = [dict(_children(other) or ()) for other in others]
    new = {key: _map(fn, child, *(twin[key] for twin in twins)) for key, child in children}
    if isinstance(tree, tuple):
        return type(tree)(*new.values()) if hasattr(tree, "_fields") else type(tree)(new.values())
    if isinstance(tree, Mapping):
        mapping: Any = copy.copy(tree)
        mapping.update(new)
        return mapping
    return dataclasses.replace(tree, **new)


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, tuple):
        return list(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def _join(trees: Sequence[Any], keys: Sequence[npt.NDArray[np.int64]]) -> Any:
    """Return one tree with the rows of all ranks in the order of their keys."""
    where = np.concatenate(keys)
    order = np.argsort(where, kind="stable")
    order = order[np.searchsorted(where[order], 0) :]

    def join(*leaves: Any) -> Any:
        if isinstance(leaves[0], torch.Tensor):
            return torch.cat(leaves)[torch.from_numpy(order).to(leaves[0].device)]
        if isinstance(leaves[0], np.ndarray):
            return np.concatenate(leaves)[order]
        rows = list(chain.from_iterable(leaves))
        return [rows[at] for at in order]

    return _map(join, *trees)
