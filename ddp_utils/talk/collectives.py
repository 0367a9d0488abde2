"""Which collectives does the user call?

All of them begin with the exchange of :mod:`ddp_utils.talk.exchange`, which makes sure that all
ranks came for the same.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import numpy as np
import torch.distributed as dist

from ddp_utils.ground.errors import RanksDisagreeError
from ddp_utils.ground.trees import flatten, unflatten
from ddp_utils.talk import packing
from ddp_utils.talk.exchange import PAYLOAD, Note, circle_of, exchange, tell_if_failing

T = TypeVar("T")


def all_reduce_mean(
    value: Any,
    *,
    weight: float | None = None,
    missing: Literal["error", "skip"] = "error",
    group: dist.ProcessGroup | None = None,
) -> Any:
    return _reduce("mean", value, weight=weight, group=group)


def all_reduce_sum(value: T, *, group: dist.ProcessGroup | None = None) -> T:
    return _reduce("sum", value, group=group)


def all_reduce_min(value: T, *, group: dist.ProcessGroup | None = None) -> T:
    return _reduce("min", value, group=group)


def all_reduce_max(value: T, *, group: dist.ProcessGroup | None = None) -> T:
    return _reduce("max", value, group=group)


def barrier(timeout: float | None = None, *, group: dist.ProcessGroup | None = None) -> None:
    circle = circle_of(group, "barrier")
    exchange(circle, "barrier", Note(b"barrier".ljust(16)))


def _reduce(operation: packing.Operation, value: Any, *, group: Any, weight: Any = None) -> Any:
    name = f"all_reduce_{operation}"
    circle = circle_of(group, name)
    with tell_if_failing(circle, name):
        structure, values = flatten(value)
        leaves = tuple([packing.leaf_of(leaf) for leaf in values])
        plan = packing.plan_for(name, structure, leaves)
        numbers: list[Any] = []
        for leaf, of in zip(values, leaves, strict=True):
            numbers += packing.numbers_of(leaf, of)
        row = packing.to_row(operation, numbers, plan.floats)
        assert len(row) <= PAYLOAD
    notes, payloads = exchange(circle, name, Note(plan.digest, plan.size, weight or 1.0), row)
    if len({note.digest for note in notes}) > 1:
        raise RanksDisagreeError(name)
    rows = payloads[:, : 8 * plan.size].view(np.int64)
    weights = None if weight is None else np.array([note.weight for note in notes])
    reduced = packing.reduce_rows(operation, rows, plan.floats, weights)
    results = []
    start = 0
    for old, leaf in zip(values, leaves, strict=True):
        results.append(
            packing.rebuild_leaf(operation, leaf, reduced[start : start + leaf.size], old)
        )
        start += leaf.size
    return unflatten(value, structure, results)
