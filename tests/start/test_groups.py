"""What happens to process groups inside ranks."""

from __future__ import annotations

import ddp_utils
from ddp_utils.testing import run_distributed


def leave_and_join_again() -> list[int]:
    sums = []
    for _ in range(3):
        ddp_utils.init_distributed()
        sums.append(ddp_utils.all_reduce_sum(1))
        ddp_utils.shutdown_distributed()
    return sums


def test_a_rank_may_leave_its_group_and_make_another() -> None:
    assert run_distributed(leave_and_join_again) == [[2, 2, 2]] * 2


def leave_at_once() -> int:
    return ddp_utils.get_rank()


def test_ranks_with_nothing_to_do_do_not_spoil_the_start_of_others() -> None:
    for _ in range(10):
        assert run_distributed(leave_at_once, world_size=4) == [0, 1, 2, 3]
