"""Which collectives does the user call?

All of them begin with the exchange of :mod:`ddp_utils.talk.exchange`, which makes sure that all
ranks came for the same.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch.distributed as dist

from ddp_utils.ground import settings
from ddp_utils.ground._torch_private import group_timeout
from ddp_utils.talk import debug
from ddp_utils.talk.agreement import digest_of
from ddp_utils.talk.exchange import Call, Note
from ddp_utils.talk.gathering import broadcast_value, gather_rows, gather_values
from ddp_utils.talk.reducing import reduce_tree
from ddp_utils.talk.waiting import Meeting

T = TypeVar("T")


def all_reduce_mean(
    value: Any,
    *,
    weight: float | None = None,
    missing: Literal["error", "skip"] = "error",
    group: dist.ProcessGroup | None = None,
) -> Any:
    return reduce_tree("mean", value, group, weight, skip_missing=missing == "skip")


def all_reduce_sum(value: T, *, group: dist.ProcessGroup | None = None) -> T:
    return reduce_tree("sum", value, group)  # type: ignore[no-any-return]


def all_reduce_min(value: T, *, group: dist.ProcessGroup | None = None) -> T:
    return reduce_tree("min", value, group)  # type: ignore[no-any-return]


def all_reduce_max(value: T, *, group: dist.ProcessGroup | None = None) -> T:
    return reduce_tree("max", value, group)  # type: ignore[no-any-return]


def barrier(timeout: float | None = None, *, group: dist.ProcessGroup | None = None) -> None:
    call = Call.of("barrier", group)
    if call.circle.size == 1:
        return
    limit = group_timeout(group) if timeout is None else timeout
    if settings.DEBUG.get():
        debug.compare(call.circle, "barrier", limit)
    Meeting(call.circle, "barrier", "barrier").wait_for_all(limit)


def all_gather(value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    return gather_values(value, group)


def gather_cat(tree: T, *, group: dist.ProcessGroup | None = None) -> T:
    return gather_rows(tree, group)  # type: ignore[no-any-return]


def broadcast(value: T, src: int = 0, *, group: dist.ProcessGroup | None = None) -> T:
    return broadcast_value(value, src, group)  # type: ignore[no-any-return]


def any_rank(flag: Any, *, group: dist.ProcessGroup | None = None) -> bool:
    return any(_flags("any_rank", flag, group))


def all_ranks(flag: Any, *, group: dist.ProcessGroup | None = None) -> bool:
    return all(_flags("all_ranks", flag, group))


def _flags(operation: str, flag: Any, group: dist.ProcessGroup | None) -> list[int]:
    call = Call.of(operation, group)
    with call.preparing():
        note = Note(digest_of(operation), size=int(bool(flag)))
    return [each.size for each in call.exchange(note).notes]
