"""How is a tree of numbers reduced over the ranks, all of them made sure to mean the same?

Small trees travel whole in the first message, and each rank reduces everybody's numbers by
itself, in the same order. Larger ones go by one ``all_reduce`` after it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
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
    Leaf,
    Operation,
    Plan,
    common_kind,
    from_row,
    leaf_of,
    numbers_of,
    plan_for,
    plan_for_types,
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

    operation: Operation
    name: str
    tree: Any
    structure: Hashable
    values: list[Any]
    plan: Plan

    @classmethod
    def of(cls, operation: Operation, name: str, tree: Any) -> Brought:
        """Take a tree apart.

        Raises:
            TypeError: It does not only hold real numbers; names the path.
        """
        structure, values = flatten(tree)
        plan = plan_for_types(name, structure, tuple(map(type, values)))
        if plan is not None:  # the common case, and this makes it fast
            return cls(operation, name, tree, structure, values, plan)
        try:
            leaves = tuple(map(leaf_of, values))
        except TypeError:
            _blame(name, paths_of(structure), leaf_of, values)
            raise
        return cls(operation, name, tree, structure, values, plan_for(name, structure, leaves))

    def row(self) -> bytes:
        """Return the numbers for the first message.

        Raises:
            OverflowError: An int is too large; names the path.
        """
        numbers = self.values
        if not self.plan.plain:
            values, leaves = _on_host(self.values, self.plan.leaves), self.plan.leaves
            parts = map(numbers_of, values, leaves)
            numbers = list(chain.from_iterable(parts))
        try:
            return to_row(self.operation, numbers, self.plan)
        except OverflowError:
            self.flat()
            raise

    def flat(self) -> list[torch.Tensor]:
        """Return the leaves for an ``all_reduce``, each on its own device.

        Raises:
            OverflowError: An int is too large; names the path.
        """

        def to_flat(value: Any, leaf: Leaf) -> torch.Tensor:
            return bulk.to_flat(self.operation, value, leaf)

        return _blame(self.name, self.plan.paths, to_flat, self.values, self.plan.leaves)

    def rebuild(self, rebuild: Callable[..., Any], reduced: Sequence[Any]) -> Any:
        """Return the tree with its leaves rebuilt; tensors go back to their own's device.

        Raises:
            OverflowError: A sum of ints is too large; names the path.
        """
        plan = self.plan
        results = _rebuilt(self.operation, self.name, rebuild, plan.paths, plan.leaves, reduced)
        beside = list(map(_beside, self.values, plan.leaves, results))
        return unflatten(self.tree, self.structure, beside)


def _blame(
    name: str, paths: Iterable[str], fn: Callable[..., Any], *columns: Iterable[Any]
) -> list[Any]:
    """Return ``fn`` of each row of the columns; an error of it names the path."""
    results = []
    for path, *row in zip(paths, *columns, strict=True):
        try:
            results.append(fn(*row))
        except (TypeError, OverflowError) as error:
            what = f"what is at {path}" if path else "the value"
            raise type(error)(f"{name}: {what} {error}") from None
    return results


def _rebuilt(
    operation: Operation,
    name: str,
    rebuild: Callable[..., Any],
    paths: Iterable[str],
    leaves: Iterable[Leaf],
    reduced: Iterable[Any],
) -> list[Any]:
    with np.errstate(over="ignore"):  # too large for a float32 is infinity, as in torch
        return _blame(name, paths, partial(rebuild, operation), leaves, reduced)


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
        brought = Brought.of(operation, name, value)
        size = brought.plan.size
        # All is made before the exchange: what is wrong with it must reach the others.
        row = brought.row() if size <= SMALL else b""
        flat = brought.flat() if size > SMALL else None
        tree = pickle.dumps(_of_paths(brought)) if skip_missing else b""
        note = Note(
            brought.plan.digest,
            on_accelerator=not brought.plan.plain
            and _on_accelerator(brought.values, brought.plan.leaves),
            size=size,
            weight=1.0 if weight is None else _checked_weight(weight),
        )
    answers = call.exchange(
        note,
        row,
        lambda: dict(zip(brought.plan.paths, brought.plan.leaves, strict=True)),
        agree=_agree_but_for_missing if skip_missing else _agree,
        tree=tree,
    )
    if answers.came is not None:
        return _reduce_unlike(call, brought, answers, skip_missing)
    if flat is not None:
        reduced = _reduce_large(operation, call, flat, brought.plan.leaves, answers)
        return brought.rebuild(bulk.rebuild_bulk_leaf, reduced)
    rows = answers.payloads[:, : 8 * size].view(np.int64)
    weights = None if weight is None else _weights(answers)
    numbers = reduce_rows(operation, rows, brought.plan.floats, weights)
    if brought.plan.plain and (operation == "mean" or brought.plan.all_floats):
        return unflatten(value, brought.structure, numbers)
    return brought.rebuild(rebuild_leaf, brought.plan.parts(numbers))


def _checked_weight(weight: Any) -> float:
    number = float(weight)
    if not 0 <= number < float("inf"):
        raise ValueError(f"weight must be a finite number of at least 0, not {weight!r}")
    return number


def _on_accelerator(values: Sequence[Any], leaves: Sequence[Leaf]) -> bool:
    """Whether there are tensors, and all of them are on an accelerator."""
    tensors = [v for v, leaf in zip(values, leaves, strict=True) if leaf.form == "tensor"]
    return bool(tensors) and not any(tensor.is_cpu for tensor in tensors)


def _on_host(values: Sequence[Any], leaves: Sequence[Leaf]) -> Sequence[Any]:
    """Bring accelerator tensors to the CPU, with one copy for all of a dtype."""
    away: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, (value, leaf) in enumerate(zip(values, leaves, strict=True)):
        if leaf.form == "tensor" and not value.is_cpu:
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


def _beside(old: Any, leaf: Leaf, new: Any) -> Any:
    """Return ``new`` on the device of ``old``, if both are tensors."""
    if leaf.form != "tensor" or not isinstance(old, torch.Tensor) or old.device == new.device:
        return new
    return new.to(old.device)


def _weights(answers: Answers) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([note.weight for note in answers.notes])


def _reduce_large(
    operation: Operation,
    call: Call,
    flat: Sequence[torch.Tensor],
    leaves: Sequence[Leaf],
    answers: Answers,
    holders: Sequence[Sequence[int]] | None = None,
) -> list[torch.Tensor]:
    """Reduce by ``all_reduce``, and return what :func:`bulk.rebuild_bulk_leaf` takes.

    ``holders`` are the places of the ranks that have each leaf; all of them by default.
    """
    circle = call.circle
    weights = _weights(answers)
    if circle.size > 1:
        everywhere = all(note.on_accelerator for note in answers.notes)
        road = road_for(circle, all_on_accelerator=everywhere)
        flat = [part.to(road) for part in flat]
        buffer = bulk.encode(operation, flat, weights[circle.place])
        dist.all_reduce(buffer, REDUCE_OPS[operation], group=circle.group)
    else:
        device = flat[0].device
        buffer = bulk.encode(operation, [part.to(device) for part in flat], weights[0])
    reduced = bulk.decode(operation, buffer, leaves)
    if operation == "mean":
        everybody = [range(circle.size)] * len(leaves)
        reduced = [
            part / weights[list(places)].sum()
            for part, places in zip(reduced, holders or everybody, strict=True)
        ]
    return reduced


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


def _reduce_unlike(call: Call, brought: Brought, answers: Answers, skip_missing: bool) -> Any:
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
    if max(note.size for note in answers.notes) <= SMALL:
        rebuild: Callable[..., Any] = rebuild_leaf
        reduced: Sequence[Any] = _reduce_small_unlike(
            brought.operation, call, answers, layout, holders
        )
    else:
        rebuild = bulk.rebuild_bulk_leaf
        flat = _flat_unlike(brought, layout)
        reduced = _reduce_large(
            brought.operation, call, flat, list(layout.values()), answers, list(holders.values())
        )
    results = _rebuilt(brought.operation, brought.name, rebuild, layout, layout.values(), reduced)
    by_path = dict(zip(layout, results, strict=True))
    values = dict(zip(brought.plan.paths, brought.values, strict=True))
    return map_leaves(lambda path: _beside(values.get(path), layout[path], by_path[path]), tree)


def _flat_unlike(brought: Brought, layout: Mapping[str, Leaf]) -> list[torch.Tensor]:
    """Return this rank's numbers by the common layout: of the common kind, zeros where missing."""
    mine = dict(zip(brought.plan.paths, brought.flat(), strict=True))
    flat = []
    for path, leaf in layout.items():
        as_float = leaf.kind == "float" or brought.operation == "mean"
        dtype = torch.float64 if as_float else torch.int64
        flat.append(mine[path].to(dtype) if path in mine else torch.zeros(leaf.size, dtype=dtype))
    return flat


def _reduce_small_unlike(
    operation: Operation,
    call: Call,
    answers: Answers,
    layout: Mapping[str, Leaf],
    holders: Mapping[str, Sequence[int]],
) -> list[list[Any]]:
    assert answers.came is not None
    by_rank = []
    for note, payload, each in zip(answers.notes, answers.payloads, answers.came, strict=True):
        plan = plan_of(each.operation, list(each.terms), list(each.terms.values()))
        row = payload[: 8 * note.size].view(np.int64)
        parts = plan.parts(from_row(operation, row, plan))
        by_rank.append(dict(zip(each.terms, parts, strict=True)))
    weights = _weights(answers)
    reduced = []
    for path, leaf in layout.items():
        plan = plan_of(call.operation, [path], [leaf])
        rows = [to_row(operation, by_rank[place][path], plan) for place in holders[path]]
        stacked = np.frombuffer(b"".join(rows), np.int64).reshape(len(rows), leaf.size)
        reduced.append(reduce_rows(operation, stacked, plan.floats, weights[list(holders[path])]))
    return reduced


def _merged(call: Call, came: Sequence[Came]) -> Any:
    """Return this rank's tree with the others' keys, its leaves being paths.

    Raises:
        RanksDisagreeError: The trees differ by more than missing keys; alike on all ranks.
    """
    trees = [pickle.loads(each.tree) for each in came]
    try:
        merge(trees)
    except ValueError as error:
        raise RanksDisagreeError(
            f"{call.operation}: the ranks differ at {error} by more than keys that are missing "
            f"from a dictionary (called at {came[0].site})"
        ) from None
    own = call.circle.place
    return merge([trees[own], *trees[:own], *trees[own + 1 :]])
