"""``run_distributed`` runs functions on ranks, and tells what went wrong there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_utils import RankFailedError, get_rank, get_world_size
from ddp_utils.testing import run_distributed


def describe(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return get_rank(), get_world_size(), dist.get_backend(), args, kwargs


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_by_rank(world_size: int) -> None:
    expected = [(rank, world_size, "gloo", (1,), {"b": 2}) for rank in range(world_size)]
    assert run_distributed(describe, 1, b=2, world_size=world_size) == expected


def test_closures_and_tensors_travel() -> None:
    offset = torch.ones(2)

    def add() -> torch.Tensor:
        return offset + get_rank()

    first, second = run_distributed(add)
    assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])


def fails_on_one() -> None:
    if get_rank() == 1:
        raise KeyError("the cause")
    dist.barrier()


def test_the_first_cause_is_raised() -> None:
    with pytest.raises(RankFailedError, match="KeyError: 'the cause'") as caught:
        run_distributed(fails_on_one)
    assert caught.value.rank == 1
    assert isinstance(caught.value.cause, KeyError)


def never_meets() -> None:
    if get_rank() == 1:
        threading.Event().wait()
    dist.barrier()


def test_a_hang_ends_with_the_stacks_of_every_rank() -> None:
    with pytest.raises(RankFailedError, match="did not end within 2 s") as caught:
        run_distributed(never_meets, timeout=2)
    of_zero, of_one = str(caught.value).split("Stacks of rank ")[1:]
    assert "in barrier" in of_zero
    assert "in never_meets" in of_zero
    assert "in wait" in of_one
    assert "in never_meets" in of_one


def returns_early_while_the_other_pauses() -> None:
    if get_rank() == 1:
        threading.Event().wait()


def test_a_rank_that_has_returned_does_not_hide_one_that_hangs() -> None:
    with pytest.raises(RankFailedError, match="did not end within 2 s") as caught:
        run_distributed(returns_early_while_the_other_pauses, timeout=2)
    assert caught.value.rank == 1
