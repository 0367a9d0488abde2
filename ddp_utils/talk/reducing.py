"""How is a tree of numbers reduced over the ranks, all of them made sure to mean the same?

Small trees travel whole in the first message, and each rank reduces everybody's numbers by
itself, in the same order. Larger ones go by one ``all_reduce`` after it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_utils.ground.errors import RanksDisagreeError
from ddp_utils.ground.trees import flatten, map_leaves, merge, paths_of, unflatten
from ddp_utils.talk import bulk
from ddp_utils.talk.agreement import Came
from ddp_utils.talk.circle import road_for
from ddp_utils.talk.exchange import PAYLOAD, Answers, Call, Note
from ddp_utils.talk.packing import (
    PYTHON,
    Leaf,
    Operation,
    Plan,
    common_kind,
    from_row,
    leaf_of,
    numbers_of,
    plan_for,
    plan_of,
    rebuild_leaf,
    reduce_rows,
    to_row,
)

__all__ = ["reduce_tree"]

SMALL = PAYLOAD // 8
"""Numbers that travel within the first message."""
REDUCE_OPS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


@dataclass(frozen=True)
class Brought:
    """What this rank brings to a reduction: its tree, taken apart."""

    tree: Any
    structure: Hashable
    values: list[Any]
    plan: Plan

    def rebuild(self, results: Sequence[Any]) -> Any:
        """Return the tree with other leaves; tensors go back to their own's device."""
        if not self.plan.plain:
            results = list(map(_beside, self.values, results))
        return unflatten(self.tree, self.structure, results)


def reduce_tree(
    operation: Operation,
    value: Any,
    group: dist.ProcessGroup | None,
    weight: Any = None,
    *,
    skip_missing: bool = False,
) -> Any:
    """Reduce a tree; see the public functions of :mod:`ddp_utils.talk.collectives`."""
    options = ["weight"] * (weight is not None) + ["missing='skip'"] * skip_missing
    name = f"all_reduce_{operation}" + (f"({', '.join(options)})" if options else "")
    call = Call.of(name, group)
    with call.preparing():
        brought = _take_apart(name, value)
        note = Note(
            brought.plan.digest,
            on_accelerator=not brought.plan.plain and _on_accelerator(brought.values),
            size=brought.plan.size,
            weight=1.0 if weight is None else _checked_weight(weight),
        )
        row = _row(operation, brought) if note.size <= SMALL else b""
    answers = call.exchange(
        note,
        row,
        lambda: dict(zip(brought.plan.paths, brought.plan.leaves, strict=True)),
        agree=_agree_but_for_missing if skip_missing else _agree,
        tree=lambda: _of_paths(brought) if skip_missing else None,
    )
    if answers.came is not None:
        return _reduce_unlike(operation, call, brought, answers, skip_missing)
    if note.size > SMALL:
        return brought.rebuild(
            _reduce_large(operation, call, brought.values, brought.plan.leaves, answers)
        )
    weights = None if weight is None else _weights(answers)
    rows = answers.payloads[:, : 8 * note.size].view(np.int64)
    reduced = reduce_rows(operation, rows, brought.plan.floats, weights)
    return brought.rebuild(_leaves_of(operation, brought.plan, reduced))


def _leaves_of(operation: Operation, plan: Plan, reduced: list[Any]) -> list[Any]:
    if plan.plain and (plan.all_floats or operation == "mean"):
        return reduced
    return [
        rebuild_leaf(operation, leaf, numbers)
        for leaf, numbers in zip(plan.leaves, plan.parts(reduced), strict=True)
    ]


def _take_apart(name: str, tree: Any) -> Brought:
    structure, values = flatten(tree)
    try:
        leaves = tuple([PYTHON.get(type(value)) or leaf_of(value) for value in values])
    except TypeError:
        for path, value in zip(paths_of(structure), values, strict=True):
            try:
                leaf_of(value)
            except TypeError as error:
                what = f"what is at {path}" if path else "the value"
                raise TypeError(f"{name}: {what} {error}") from None
        raise
    return Brought(tree, structure, values, plan_for(name, structure, leaves))


def _checked_weight(weight: Any) -> float:
    number = float(weight)
    if not 0 <= number < float("inf"):
        raise ValueError(f"weight must be a finite number of at least 0, not {weight!r}")
    return number


def _on_accelerator(values: Sequence[Any]) -> bool:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return bool(tensors) and all(tensor.device.type != "cpu" for tensor in tensors)


def _row(operation: Operation, brought: Brought) -> bytes:
    if brought.plan.plain:
        return to_row(operation, brought.values, brought.plan)
    numbers: list[Any] = []
    for value, leaf in zip(_on_host(brought.values), brought.plan.leaves, strict=True):
        numbers += numbers_of(value, leaf)
    return to_row(operation, numbers, brought.plan)


def _on_host(values: Sequence[Any]) -> Sequence[Any]:
    """Bring accelerator tensors to the CPU, with one copy for all of a dtype."""
    away: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            away.setdefault((value.device, value.dtype), []).append(index)
    if not away:
        return values
    values = list(values)
    for indices in away.values():
        there = torch.cat([values[index].detach().reshape(-1) for index in indices])
        here = torch.split(there.cpu(), [values[index].numel() for index in indices])
        for index, part in zip(indices, here, strict=True):
            values[index] = part.reshape(values[index].shape)
    return values


def _beside(old: Any, new: Any) -> Any:
    if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
        return new if new.device == old.device else new.to(old.device)
    return new


def _weights(answers: Answers) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([note.weight for note in answers.notes])


def _reduce_large(
    operation: Operation,
    call: Call,
    values: Sequence[Any],
    leaves: Sequence[Leaf],
    answers: Answers,
    holders: Sequence[Sequence[int]] | None = None,
) -> list[Any]:
    """Reduce by ``all_reduce``; ``values`` are None where this rank has nothing to add.

    ``holders`` are the places of the ranks that have each leaf; all of them by default.
    """
    circle = call.circle
    device = torch.device("cpu")
    if circle.size > 1:
        everywhere = all(note.on_accelerator for note in answers.notes)
        device = road_for(circle, all_on_accelerator=everywhere)
    elif answers.notes[0].on_accelerator:
        device = next(value.device for value in values if isinstance(value, torch.Tensor))
    weights = _weights(answers)
    mine = weights[circle.place]
    parts = [
        torch.zeros(leaf.size, dtype=torch.float64, device=device)
        if value is None
        else bulk.to_flat(value, leaf, device)
        for value, leaf in zip(values, leaves, strict=True)
    ]
    buffer = bulk.encode(operation, parts, None if mine == 1 else [mine] * len(parts))
    if circle.size > 1:
        dist.all_reduce(buffer, REDUCE_OPS[operation], group=circle.group)
    reduced = bulk.decode(operation, buffer, leaves)
    if operation == "mean":
        everybody = [range(circle.size)] * len(leaves)
        reduced = [
            part / weights[list(places)].sum()
            for part, places in zip(reduced, holders or everybody, strict=True)
        ]
    return [
        bulk.rebuild_bulk_leaf(operation, leaf, part)
        for leaf, part in zip(leaves, reduced, strict=True)
    ]


def _agree(brought: Sequence[Leaf | None]) -> bool:
    """Whether all ranks have a leaf of one shape, and their kinds of number go together."""
    leaves = [leaf for leaf in brought if leaf is not None]
    return len(leaves) == len(brought) and _go_together(leaves)


def _agree_but_for_missing(brought: Sequence[Leaf | None]) -> bool:
    return _go_together([leaf for leaf in brought if leaf is not None])


def _go_together(leaves: Sequence[Leaf]) -> bool:
    return len({leaf.shape for leaf in leaves}) == 1 and common_kind(leaves) is not None


def _of_paths(brought: Brought) -> Any:
    return unflatten(brought.tree, brought.structure, brought.plan.paths)


def _reduce_unlike(
    operation: Operation, call: Call, brought: Brought, answers: Answers, skip_missing: bool
) -> Any:
    """Reduce what differs between ranks as far as that is agreed on: number kinds, missing keys.

    All ranks know everybody's leaves by now, and take the same decisions.
    """
    assert answers.came is not None
    tree = _merged(call, answers.came) if skip_missing else _of_paths(brought)
    layout: dict[str, Leaf] = {}
    holders: dict[str, list[int]] = {}
    own = answers.came[call.circle.place].terms
    for path in dict.fromkeys(path for each in answers.came for path in each.terms):
        having = {i: each.terms[path] for i, each in enumerate(answers.came) if path in each.terms}
        kind = common_kind(having.values())
        assert kind is not None
        holders[path] = list(having)
        layout[path] = replace(own.get(path) or next(iter(having.values())), kind=kind)
    values = dict(zip(brought.plan.paths, brought.values, strict=True))
    if max(note.size for note in answers.notes) <= SMALL:
        results = _reduce_small_unlike(operation, call, answers, layout, holders)
    else:
        results = dict(
            zip(
                layout,
                _reduce_large(
                    operation,
                    call,
                    [values.get(path) for path in layout],
                    list(layout.values()),
                    answers,
                    list(holders.values()),
                ),
                strict=True,
            )
        )
    return map_leaves(lambda path: _beside(values.get(path), results[path]), tree)


def _reduce_small_unlike(
    operation: Operation,
    call: Call,
    answers: Answers,
    layout: Mapping[str, Leaf],
    holders: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    assert answers.came is not None
    by_rank = []
    for note, payload, each in zip(answers.notes, answers.payloads, answers.came, strict=True):
        plan = plan_of(each.operation, list(each.terms), list(each.terms.values()))
        row = payload[: 8 * note.size].view(np.int64)
        by_rank.append(
            dict(zip(each.terms, plan.parts(from_row(operation, row, plan)), strict=True))
        )
    weights = _weights(answers)
    results = {}
    for path, leaf in layout.items():
        plan = plan_of(call.operation, [path], [leaf])
        rows = [to_row(operation, by_rank[place][path], plan) for place in holders[path]]
        stacked = np.frombuffer(b"".join(rows), np.int64).reshape(len(rows), leaf.size)
        reduced = reduce_rows(operation, stacked, plan.floats, weights[list(holders[path])])
        results[path] = rebuild_leaf(operation, leaf, reduced)
    return results


def _merged(call: Call, came: Sequence[Came]) -> Any:
    """Return this rank's tree with the others' keys, its leaves being paths.

    Raises:
        RanksDisagreeError: The trees differ by more than missing keys; alike on all ranks.
    """
    trees = [each.tree for each in came]
    try:
        merge(trees)
    except ValueError as error:
        raise RanksDisagreeError(
            f"{call.operation}: the ranks differ at {error} by more than keys that are missing "
            f"from a dictionary (called at {came[0].site})"
        ) from None
    own = call.circle.place
    return merge([trees[own], *trees[:own], *trees[own + 1 :]])
