"""Which collectives does the user call?

All of them make sure that all ranks came for the same; how is said in
:mod:`ddp_utils.talk.exchange`. Without a process group, or alone in one, each gives the answer
for a single rank, with the same types.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, TypeVar, overload

import torch.distributed as dist
from torch import Tensor

from ddp_utils.ground import settings
from ddp_utils.ground._torch_private import group_timeout
from ddp_utils.talk import debug
from ddp_utils.talk.agreement import digest_of
from ddp_utils.talk.exchange import Call, Note
from ddp_utils.talk.gathering import broadcast_value, gather_rows, gather_values
from ddp_utils.talk.reducing import reduce_tree
from ddp_utils.talk.waiting import Meeting

T = TypeVar("T")
K = TypeVar("K")
Group = dist.ProcessGroup | None

__all__ = [
    "all_gather",
    "all_ranks",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_sum",
    "any_rank",
    "barrier",
    "broadcast",
    "gather_cat",
]


@overload
def all_reduce_mean(
    value: float,
    *,
    weight: Any = None,
    missing: Literal["error", "skip"] = "error",
    group: Group = None,
) -> float: ...
@overload
def all_reduce_mean(
    value: Tensor,
    *,
    weight: Any = None,
    missing: Literal["error", "skip"] = "error",
    group: Group = None,
) -> Tensor: ...
@overload
def all_reduce_mean(
    value: dict[K, int] | dict[K, float],
    *,
    weight: Any = None,
    missing: Literal["error", "skip"] = "error",
    group: Group = None,
) -> dict[K, float]: ...
@overload
def all_reduce_mean(
    value: dict[K, Tensor],
    *,
    weight: Any = None,
    missing: Literal["error", "skip"] = "error",
    group: Group = None,
) -> dict[K, Tensor]: ...
@overload
def all_reduce_mean(
    value: Any,
    *,
    weight: Any = None,
    missing: Literal["error", "skip"] = "error",
    group: Group = None,
) -> Any: ...
def all_reduce_mean(
    value: Any,
    *,
    weight: Any = None,
    missing: Literal["error", "skip"] = "error",
    group: Group = None,
) -> Any:
    """Average a tree of numbers over the ranks; a collective.

    Up to 256 numbers take one message, the check that all ranks mean the same included. More
    take one ``all_reduce`` after it, of float64.

    Args:
        value: A tensor, a NumPy array, a Python or NumPy number, or any nesting of containers of
            them. Dictionaries may be filled in different orders.
        weight: This rank's weight, such as its number of samples; the result is then
            ``sum(w x) / sum(w)``. A rank of weight 0 does not count, even if its value is NaN.
        missing: With ``"skip"`` a key that only some ranks have in a dictionary is averaged over
            those, and given to all. That costs one exchange more where it happens.
        group: The ranks to average over; all of them by default.

    Returns:
        The same structure, new and detached; floats of the dtype they were, ints and bools as
        float64 or Python floats.

    Raises:
        RanksDisagreeError: Structure, shape or kind of number differ; alike on all ranks. A
            plain Python number goes with a wider kind: the ``loss = 0`` of a rank without data
            beside the others' tensors of floats.
        TypeError: There is something else than real numbers in the tree.

    Example:
        >>> all_reduce_mean({"loss": 0.5, "correct": [3, 4]}, weight=32)
        {'loss': 0.5, 'correct': [3.0, 4.0]}
    """
    if missing not in ("error", "skip"):
        raise ValueError(f"missing must be 'error' or 'skip', not {missing!r}")
    return reduce_tree("mean", value, group, weight, skip_missing=missing == "skip")


def all_reduce_sum(value: T, *, group: Group = None) -> T:
    """Add up a tree of numbers over the ranks; a collective, as :func:`all_reduce_mean`.

    Ints are exact, and bools counted: tensors and arrays of them come back 64 bits wide, as from
    ``torch.sum``, and Python's as ints of any size.

    Raises:
        OverflowError: An int has more than 64 bits, or the sum for a tensor or array has.
        RanksDisagreeError: See :func:`all_reduce_mean`.

    Example:
        >>> all_reduce_sum({"seen": 128, "right": True})
        {'seen': 128, 'right': 1}
    """
    return reduce_tree("sum", value, group)  # type: ignore[no-any-return]


def all_reduce_min(value: T, *, group: Group = None) -> T:
    """Return the smallest of each number over the ranks; a collective.

    Types stay as they are. A NaN on any rank makes the result NaN. See :func:`all_reduce_mean`.

    Example:
        >>> all_reduce_min([2, 0.5])
        [2, 0.5]
    """
    return reduce_tree("min", value, group)  # type: ignore[no-any-return]


def all_reduce_max(value: T, *, group: Group = None) -> T:
    """Return the largest of each number over the ranks; a collective.

    Types stay as they are. A NaN on any rank makes the result NaN. See :func:`all_reduce_mean`.

    Example:
        >>> all_reduce_max([2, 0.5])
        [2, 0.5]
    """
    return reduce_tree("max", value, group)  # type: ignore[no-any-return]


def all_gather(value: T, *, group: Group = None) -> list[T]:
    """Return every rank's value, by rank; a collective.

    Values may be anything that pickles, and differ between ranks in type, shape and size.
    Tensors in them arrive detached, by value; those of an accelerator on this rank's own.

    Example:
        >>> all_gather({"name": "a", "scores": None})
        [{'name': 'a', 'scores': None}]
    """
    return gather_values(value, group)


def gather_cat(tree: T, *, group: Group = None) -> T:
    """Join the tensors of all ranks along their first dimension, by rank; a collective.

    Args:
        tree: A tensor or NumPy array of shape ``(n, ...)``, or any nesting of containers of them.
            ``n`` may differ between ranks, and be 0. A 0-dim one is one row. None stays None.
        group: The ranks to gather from; all of them by default.

    Returns:
        The same structure, with leaves of shape ``(sum of n, ...)``, on the same device.

    Raises:
        RanksDisagreeError: dtype, structure or a row's shape differ; alike on all ranks.
        TypeError: There is something else in the tree.

    Example:
        >>> import torch
        >>> gather_cat({"label": torch.tensor([3, 1])})
        {'label': tensor([3, 1])}
    """
    return gather_rows(tree, group)  # type: ignore[no-any-return]


def broadcast(value: T, src: int = 0, *, group: Group = None) -> T:
    """Return the value of rank ``src`` on every rank; a collective.

    Args:
        value: Anything that pickles. What the other ranks pass is ignored.
        src: The rank whose value it is, counted among all ranks also where a group is given.
        group: The ranks that take part; all of them by default.

    Example:
        >>> broadcast("runs/2024-05-01")
        'runs/2024-05-01'
    """
    return broadcast_value(value, src, group)  # type: ignore[no-any-return]


def any_rank(flag: Any, *, group: Group = None) -> bool:
    """Return whether ``flag`` is true on any rank; a collective.

    Example:
        >>> loss = float("nan")
        >>> any_rank(loss != loss)  # the same on all ranks: all stop, or none
        True
    """
    return any(_flags("any_rank", flag, group))


def all_ranks(flag: Any, *, group: Group = None) -> bool:
    """Return whether ``flag`` is true on all ranks; a collective.

    Example:
        >>> all_ranks(True)
        True
    """
    return all(_flags("all_ranks", flag, group))


def _flags(operation: str, flag: Any, group: Group) -> list[int]:
    call = Call.of(operation, group)
    with call.preparing():
        note = Note(digest_of(operation), size=int(bool(flag)))
    return [each.size for each in call.exchange(note).notes]


def barrier(timeout: float | timedelta | None = None, *, group: Group = None) -> None:
    """Wait until all ranks have come here, at the store; a collective.

    Args:
        timeout: In seconds or as a ``timedelta``; by default that of the group.
        group: The ranks that come; all of them by default.

    Raises:
        AbsentRanksError: Some have not come in time, or have left the job. It names them with
            host and process, and under ``DDP_UTILS_DEBUG=1`` says where they are; the same on
            all ranks, also on those that come later.

    Example:
        >>> barrier(timeout=60)
    """
    call = Call.of("barrier", group)
    if call.circle.size == 1:
        return
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if limit is None:
        limit = group_timeout(group)
    if settings.DEBUG.get():
        debug.compare(call.circle, "barrier", limit)
    Meeting(call.circle, "barrier", "barrier").wait_for_all(limit)
