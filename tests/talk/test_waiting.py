"""Waiting at the store: barriers, those who are absent, and those who have left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ddp_utils import RankFailedError, any_rank, barrier, get_rank
from ddp_utils.ground._torch_private import group_timeout
from ddp_utils.process_group import find_rank, shared_store, whereabouts
from ddp_utils.talk.waiting import Meeting
from ddp_utils.testing import run_distributed


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as error:  # noqa: PT011  # the text is compared
        call()
    return f"{error.type.__name__}: {error.value}"


def test_alone_there_is_nobody_to_wait_for() -> None:
    barrier()
    barrier(timeout=0)


def pass_barriers() -> tuple[int, int, list[bool]]:
    rank = get_rank()
    seen = []
    for turn in range(20):
        shared_store().set(f"seen/{turn}/{rank}", "")
        barrier()
        seen.append(all(shared_store().check([f"seen/{turn}/{i}"]) for i in range(3)))
    barrier(timedelta(seconds=30))
    any_rank(False)  # so that all have cleared up before somebody counts
    left = [turn for turn in range(21) if shared_store().check([f"barrier/0/{turn}/{rank}"])]
    return len(left), left[-1], seen


def test_nobody_passes_before_all_have_come_and_nothing_piles_up_in_the_store() -> None:
    for left, last, seen in run_distributed(pass_barriers, world_size=3):
        assert (left, last) == (2, 20)
        assert seen == [True] * 20


def come_late() -> list[str]:
    if get_rank() == 2:
        while not shared_store().check(["barrier/0/0/verdict"]):
            time.sleep(0.01)
    texts = [error_of(lambda: barrier(0.3))]
    barrier()  # all are together again
    return texts


def test_the_absent_are_named_with_host_and_process_also_to_themselves() -> None:
    first, second, third = run_distributed(come_late, world_size=3)
    assert first == second == third
    head, whereabouts = first[0].splitlines()
    assert head.startswith("AbsentRanksError: rank 2 did not come to barrier within 0.3 s; ranks 0")
    assert f"{__file__}:" in head
    assert whereabouts.startswith("  rank 2: host ")
    assert "pid" in whereabouts


def leave_early(how: str) -> str | None:
    if get_rank() == 1:
        if how == "exited":
            sys.exit(0)
        return None
    return error_of(barrier)


def test_a_rank_that_has_returned_is_not_waited_for() -> None:
    text, _ = run_distributed(leave_early, "returned")
    assert text is not None
    assert text.startswith("AbsentRanksError: rank 1 has returned without coming to barrier")


def test_a_rank_that_has_exited_is_not_waited_for() -> None:
    with pytest.raises(RankFailedError):  # since it left the others by sys.exit
        run_distributed(leave_early, "exited")


def meet() -> list[Any]:
    rank = get_rank()
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    from ddp_utils.talk.circle import circle_of

    circle = circle_of(odd if rank % 2 else even, "a test")
    meeting = Meeting(circle, "test", "a test", f"word of {rank}")
    heard = meeting.hear(1)
    meeting.wait_for_all(20)
    barrier(group=odd if rank % 2 else even)
    barrier()
    return [heard, whereabouts(1 - rank % 2), find_rank(0, rank), find_rank(1, 0), os.getpid()]


def test_words_are_heard_within_a_group_and_whereabouts_of_all() -> None:
    results = run_distributed(meet, world_size=4)
    assert [result[0] for result in results] == ["word of 2", "word of 3"] * 2
    assert results[1][1].endswith(f"pid {results[0][4]}")
    assert [result[2:4] for result in results] == [[rank, None] for rank in range(4)]


def timeout_of(seconds: float | None) -> list[float]:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=7))
    return [group_timeout(None), group_timeout(group)]


def test_a_groups_timeout_can_be_asked_for() -> None:
    assert run_distributed(timeout_of, None)[0] == [1800.0, 7.0]


def expire_at_the_groups_timeout() -> str | None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if get_rank() == 0:
        return error_of(lambda: barrier(group=group)).splitlines()[0]
    while not shared_store().check([f"barrier/{group.group_name}/0/verdict"]):
        time.sleep(0.01)
    return None


def test_a_barrier_keeps_to_its_groups_timeout() -> None:
    text, _ = run_distributed(expire_at_the_groups_timeout)
    assert text is not None
    assert "rank 1 did not come to barrier within 0.5 s" in text
