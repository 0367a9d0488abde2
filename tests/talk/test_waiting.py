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
from ranks import from_all_ranks

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


@pytest.mark.distributed(world_size=3)
def test_nobody_passes_before_all_have_come_and_nothing_piles_up_in_the_store() -> None:
    rank = get_rank()
    seen = []
    for turn in range(20):
        shared_store().set(f"seen/{turn}/{rank}", "")
        barrier()
        seen.append(all(shared_store().check([f"seen/{turn}/{i}"]) for i in range(3)))
    barrier(timedelta(seconds=30))
    any_rank(False)  # so that all have cleared up before somebody counts
    left = [turn for turn in range(21) if shared_store().check([f"barrier/0/{turn}/{rank}"])]
    assert (len(left), left[-1]) == (2, 20)
    assert seen == [True] * 20


@pytest.mark.distributed(world_size=3)
def test_the_absent_are_named_with_host_and_process_also_to_themselves() -> None:
    if get_rank() == 2:
        while not shared_store().check(["barrier/0/0/verdict"]):
            time.sleep(0.01)
    text = error_of(lambda: barrier(0.3))
    barrier()  # all are together again
    assert from_all_ranks(text) == [text] * 3
    head, place = text.splitlines()
    assert head.startswith("AbsentRanksError: rank 2 did not come to barrier within 0.3 s; ranks 0")
    assert f"{__file__}:" in head
    assert place.startswith("  rank 2: host ")
    assert "pid" in place


@pytest.mark.distributed(world_size=2)
def test_a_rank_that_has_returned_is_not_waited_for() -> None:
    if get_rank() == 1:
        return
    text = error_of(barrier)
    assert text.startswith("AbsentRanksError: rank 1 has returned without coming to barrier")


def exit_early() -> None:
    if get_rank() == 1:
        sys.exit(0)
    error_of(barrier)


def test_a_rank_that_has_exited_is_not_waited_for() -> None:
    with pytest.raises(RankFailedError):  # since it left the others by sys.exit
        run_distributed(exit_early)


@pytest.mark.distributed(world_size=4)
def test_words_are_heard_within_a_group_and_whereabouts_of_all() -> None:
    rank = get_rank()
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    from ddp_utils.talk.circle import circle_of

    circle = circle_of(odd if rank % 2 else even, "a test")
    meeting = Meeting(circle, "test", "a test", f"word of {rank}")
    heard = meeting.hear(1)
    meeting.wait_for_all(20)
    barrier(group=odd if rank % 2 else even)
    barrier()
    assert heard == ["word of 2", "word of 3"][rank % 2]
    pids, other = from_all_ranks(os.getpid()), 1 - rank % 2
    assert whereabouts(other).endswith(f"pid {pids[other]}")
    assert (find_rank(0, rank), find_rank(1, 0)) == (rank, None)


@pytest.mark.distributed(world_size=2)
def test_a_groups_timeout_can_be_asked_for() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=7))
    assert [group_timeout(None), group_timeout(group)] == [1800.0, 7.0]


@pytest.mark.distributed(world_size=2)
def test_a_barrier_keeps_to_its_groups_timeout() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if get_rank() == 0:
        head = error_of(lambda: barrier(group=group)).splitlines()[0]
        assert "rank 1 did not come to barrier within 0.5 s" in head
        return
    while not shared_store().check([f"barrier/{group.group_name}/0/verdict"]):
        time.sleep(0.01)
