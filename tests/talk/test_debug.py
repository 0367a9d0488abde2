"""DDP_UTILS_DEBUG=1: the same place in the program on all ranks, and where they are if not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_utils import (
    all_reduce_mean,
    any_rank,
    barrier,
    get_rank,
    make_sampler,
    rank_zero_first,
    rank_zero_only,
)
from ddp_utils.process_group import shared_store
from ddp_utils.talk import stacks
from ddp_utils.testing import run_distributed


@pytest.fixture(autouse=True)
def debug(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DDP_UTILS_DEBUG", "1")
    return


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as error:  # noqa: PT011  # the text is compared
        call()
    return f"{error.type.__name__}: {error.value}"


def agree() -> tuple[list[Any], list[bool]]:
    rank = get_rank()
    even, odd = dist.new_group([0]), dist.new_group([1, 2])
    results: list[Any] = []
    for _ in range(2):
        results += [all_reduce_mean(rank), any_rank(rank == 1)]
        barrier()
        with rank_zero_first():
            pass
    with rank_zero_first(local=True):
        pass
    results.append(rank_zero_only(os.getpid, broadcast=True)())
    results.append(any_rank(rank == 2, group=odd if rank else even))
    barrier()
    return results, [shared_store().check([f"debug/0/{n}/{rank}"]) for n in range(11)]


def test_ranks_that_agree_notice_nothing_and_leave_nothing_behind() -> None:
    (first, left), (second, _), (third, _) = run_distributed(agree, world_size=3)
    assert first[:-1] == second[:-1] == third[:-1]
    assert [first[-1], second[-1], third[-1]] == [False, True, True]
    assert left.count(True) == 2


def skip_a_barrier() -> list[str]:
    texts = []
    if get_rank() == 0:
        texts.append(error_of(lambda: barrier()))
    texts.append(error_of(lambda: barrier()))
    return texts


def test_another_line_is_an_error_on_all_naming_every_ranks_line() -> None:
    first, second = run_distributed(skip_a_barrier)
    assert first[0] == second[0]
    head, ours, theirs = first[0].splitlines()
    assert head == "RanksDisagreeError: the ranks came to different places in the program:"
    assert ours.startswith(f"  rank 0: barrier at {__file__}:")
    assert theirs.startswith(f"  rank 1: barrier at {__file__}:")
    assert int(theirs.rpartition(":")[2]) == int(ours.rpartition(":")[2]) + 1
    assert "rank 1 has returned without coming to barrier" in first[1]


def be_in_another_epoch() -> str:
    sampler = make_sampler(8)
    list(sampler)  # the first pass is compared by the sampler itself
    if get_rank() == 1:
        sampler.set_epoch(3)
    list(sampler)
    return error_of(lambda: all_reduce_mean(1.0))


def test_another_epoch_is_an_error_on_all_that_tells_it() -> None:
    first, second = run_distributed(be_in_another_epoch)
    assert first == second
    assert "the ranks came to different places" in first
    assert [line.rpartition(" ")[2] for line in first.splitlines()[1:]] == ["1", "3"]


def call_something_else(first: bool) -> str:
    def section() -> None:
        with rank_zero_first():
            pass

    if get_rank() == 1:
        return error_of(lambda: all_reduce_mean(1.0))
    return error_of(section if first and get_rank() else barrier)


@pytest.mark.parametrize("first", [False, True])
def test_another_operation_is_an_error_on_all(first: bool) -> None:
    texts = run_distributed(call_something_else, first, world_size=3)
    for text in texts:
        assert "barrier at" in text
        assert "all_reduce_mean at" in text or (first and "rank_zero_first at" in text)
        assert "RanksDisagreeError" in text


def be_elsewhere() -> str | None:
    if get_rank() == 1:
        stacks.watch()
        sleep_until("debug/0/0/verdict")
        return None
    return error_of(lambda: barrier(0.5))


def sleep_until(key: str) -> None:
    while not shared_store().check([key]):
        time.sleep(0.01)


def test_the_absent_are_told_with_the_line_that_they_are_at() -> None:
    text, _ = run_distributed(be_elsewhere)
    assert text is not None
    head, where = text.splitlines()
    assert "rank 1 did not come to barrier within 0.5 s; rank 0 did" in head
    assert "pid" in where
    assert f", at {__file__}:" in where
    assert where.endswith("in sleep_until")


def wait_in_vain(kind: str) -> None:
    """Rank 1 stays away until rank zero has said where all ranks are."""
    barrier()
    if get_rank() == 1:
        sleep_until("stacks/0/reported")
    if kind == "torch's own":
        dist.all_reduce(torch.zeros(3))
    else:
        all_reduce_mean(1.0)
    barrier()


@pytest.mark.parametrize("kind", ["torch's own", "ours"])
def test_a_long_wait_prints_all_stacks_once_in_one_report(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDP_UTILS_DEBUG_WAIT", "0.3")
    run_distributed(wait_in_vain, kind, world_size=3)
    err = capfd.readouterr().err
    assert err.count("Where each rank is:") == 1
    report = err[err.index("has waited 0.3 s in one call. Where each rank is:") :]
    assert report.count("in sleep_until") == 1
    assert report.index("  rank 1:") < report.index("in sleep_until")
    waiting = "work.wait()" if kind == "torch's own" else "in wait_for_word"
    assert waiting in report
    assert "start/entry.py" not in report


def ask_for_stacks() -> list[str]:
    barrier()
    where = stacks.where_are([0, 1]) if get_rank() == 0 else []
    sleep_until("stacks/0/reported")
    return where


def test_everybody_says_where_it_is_when_asked() -> None:
    (ours, theirs), _ = run_distributed(ask_for_stacks)
    assert ours.startswith(f"at {__file__}:")
    assert ours.endswith("in ask_for_stacks")
    assert theirs.endswith("in sleep_until")


def test_only_calls_that_may_wait_for_others_count() -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(stacks._waiting_call()))
    thread.start()
    thread.join()
    assert seen == [None]
    assert stacks._is_library(os.path.join(os.path.dirname(torch.__file__), "nn", "x.py"))
    assert stacks._is_library(os.__file__)
    assert not stacks._is_library(__file__)
    assert not stacks._is_library(pytest.__file__)
