"""Do all ranks come to the same, from the same line? (``DDP_UTILS_DEBUG=1``)

Before each collective of this package the ranks compare, through the store, what they are about
to do. That costs some round trips to the store each time, and finds what the exchange cannot: a
rank that skipped a call and comes to the next one while the others are still at the first. What
the ranks bring is compared in the exchange itself, always.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from ddp_utils.callsite import call_site, last_epoch
from ddp_utils.ground._torch_private import group_timeout
from ddp_utils.ground.errors import RanksDisagreeError
from ddp_utils.talk import stacks
from ddp_utils.talk.agreement import told_by_rank
from ddp_utils.talk.circle import Circle
from ddp_utils.talk.waiting import Meeting

__all__ = ["compare", "compare_with_zero"]


def compare(circle: Circle, operation: str, timeout: float | None = None) -> None:
    """Wait until all ranks have come, and make sure that they came for the same.

    Raises:
        AbsentRanksError: Some did not come within the group's timeout, or have left the job.
        RanksDisagreeError: They came for different operations, from different lines, or after
            different epochs.
    """
    meeting = _arrive(circle, operation)
    meeting.wait_for_all(group_timeout(circle.group) if timeout is None else timeout)
    _judge([meeting.hear(place) for place in range(circle.size)], circle.ranks)


def compare_with_zero(circle: Circle, operation: str) -> None:
    """Make sure that rank zero came for the same, where it does not wait for the others."""
    meeting = _arrive(circle, operation)
    if circle.place != 0:
        own = _word(operation)
        _judge([meeting.hear(0), own], [circle.ranks[0], circle.ranks[circle.place]])


def _arrive(circle: Circle, operation: str) -> Meeting:
    stacks.watch()
    return Meeting(circle, "debug", operation, _word(operation))


def _word(operation: str) -> str:
    return json.dumps([operation, call_site(), last_epoch()])


def _judge(words: Sequence[str], ranks: Sequence[int]) -> None:
    came: list[tuple[str, str, int | None]] = [tuple(json.loads(word)) for word in words]
    # Machines may keep the program in different folders.
    if len({(operation, os.path.basename(site), epoch) for operation, site, epoch in came}) > 1:
        told = told_by_rank([_place(*each) for each in came], ranks)
        raise RanksDisagreeError(f"the ranks came to different places in the program:\n{told}")


def _place(operation: str, site: str, epoch: int | None) -> str:
    after = "" if epoch is None else f", its last finished pass over data being of epoch {epoch}"
    return f"{operation} at {site}{after}"
