"""Gathers, broadcasts and flags between real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddp_utils import all_gather, all_ranks, any_rank, broadcast, gather_cat, get_rank
from ddp_utils.testing import run_distributed


class Odd(Exception):
    """Something that is no plain value."""


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as error:  # noqa: PT011  # the text is compared
        call()
    return f"{error.type.__name__}: {error.value}"


def test_alone_each_gives_its_answer() -> None:
    tensor = torch.arange(3, dtype=torch.uint8)
    (gathered,) = all_gather([tensor, None, "a"])
    assert gathered[0].tolist() == [0, 1, 2]
    assert gathered[0] is not tensor
    assert gathered[1:] == [None, "a"]
    assert gather_cat({"x": np.ones((2, 3)), "none": None})["x"].shape == (2, 3)
    assert gather_cat(torch.tensor(5)).tolist() == [5]
    assert broadcast({"a": 1}) == {"a": 1}
    assert (any_rank(0), any_rank(torch.tensor(True)), all_ranks([])) == (False, True, False)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"src=1 is not among the group's ranks \[0\]"):
        broadcast(1, src=1)
    with pytest.raises(TypeError, match=r"what is at \['a'\] is a float; all_gather takes any"):
        gather_cat({"a": 1.0})
    with pytest.raises(Exception, match="pickle"):
        all_gather(lambda: None)


# -- all_gather ---------------------------------------------------------------------------------


def gather_anything() -> list[Any]:
    rank = get_rank()
    values: list[Any] = [
        rank,
        None if rank else {"a": [1, (2, "x")]},
        torch.arange(rank * 3, dtype=torch.bfloat16),
        torch.ones(rank + 1, 2, dtype=torch.int64 if rank else torch.float32),
        {"big": torch.full((1000 * (rank + 1),), rank), "small": torch.tensor(rank)},
        b"x" * 5000 if rank else b"",
        Odd("odd", rank),
        torch.ones(2, requires_grad=True) * rank,
    ]
    return [all_gather(value) for value in values]


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_of_any_type_shape_and_size_are_gathered_by_rank(world_size: int) -> None:
    results = run_distributed(gather_anything, world_size=world_size)
    for ranks, nested, uneven, unlike, trees, sizes, odd, grown in results:
        assert ranks == list(range(world_size))
        assert nested == [{"a": [1, (2, "x")]}] + [None] * (world_size - 1)
        assert [each.tolist() for each in uneven] == [
            list(range(3 * rank)) for rank in range(world_size)
        ]
        assert uneven[0].dtype == torch.bfloat16
        assert [each.dtype for each in unlike[:2]] == [torch.float32, torch.int64]
        assert [tuple(each.shape) for each in unlike] == [(r + 1, 2) for r in range(world_size)]
        for rank, tree in enumerate(trees):
            assert tree["big"].tolist() == [rank] * (1000 * (rank + 1))
            assert tree["small"].item() == rank
        assert sizes == [b""] + [b"x" * 5000] * (world_size - 1)
        assert [(type(each), each.args) for each in odd] == [
            (Odd, ("odd", rank)) for rank in range(world_size)
        ]
        assert [each.tolist() for each in grown] == [[rank, rank] for rank in range(world_size)]
        assert not any(each.requires_grad for each in grown)


def gather_what_does_not_pickle() -> str:
    return error_of(lambda: all_gather((lambda: 1) if get_rank() else 1))


def test_a_value_that_does_not_pickle_is_an_error_on_all() -> None:
    first, second = run_distributed(gather_what_does_not_pickle)
    assert "rank 1 could not take part in all_gather" in first
    assert "pickle" in second


# -- gather_cat ---------------------------------------------------------------------------------


def join_rows() -> list[Any]:
    rank = get_rank()
    return [
        gather_cat({"x": torch.full((rank, 2), float(rank)), "y": (np.array([rank]), None)}),
        gather_cat(torch.arange(1000 * rank).reshape(-1, 4)),
        gather_cat(torch.tensor(rank)),
        gather_cat(torch.zeros(0, 7)),
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_of_uneven_numbers_are_joined_by_rank(world_size: int) -> None:
    for tree, large, numbers, empty in run_distributed(join_rows, world_size=world_size):
        assert tree["x"].tolist() == [[float(r)] * 2 for r in range(world_size) for _ in range(r)]
        assert tree["y"][0].tolist() == list(range(world_size))
        assert tree["y"][1] is None
        rows = [torch.arange(1000 * rank).reshape(-1, 4) for rank in range(world_size)]
        assert torch.equal(large, torch.cat(rows))
        assert numbers.tolist() == list(range(world_size))
        assert empty.shape == (0, 7)


UNLIKE: list[tuple[Any, Any, str]] = [
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "in what they brought"),
    (torch.zeros(2, 3), torch.zeros(2, 4), "in what they brought"),
    (torch.zeros(2, 3), torch.zeros(2), "in what they brought"),
    (torch.zeros(2), np.zeros(2, np.float32), "in what they brought"),
    ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, "at ['a']"),
    ([torch.zeros(2), None], [torch.zeros(2), torch.zeros(2)], "at [1]"),
    (torch.zeros(10**6), torch.zeros(10**6, dtype=torch.int32), "in what they brought"),
]


def join_what_does_not_fit() -> list[str]:
    rank = get_rank()
    return [error_of(lambda pair=pair: gather_cat(pair[rank])) for pair in UNLIKE] + [
        error_of(lambda: gather_cat("text" if rank else torch.zeros(2)))
    ]


def test_rows_that_do_not_fit_are_the_same_error_on_all() -> None:
    first, second = run_distributed(join_what_does_not_fit)
    assert first[:-1] == second[:-1]
    for text, (_, _, where) in zip(first[:-1], UNLIKE, strict=True):
        head, *lines = text.splitlines()
        assert head == f"RanksDisagreeError: gather_cat: the ranks differ {where}:"
        assert [line.split(":")[0] for line in lines] == ["  rank 0", "  rank 1"]
    assert "rank 1 could not take part in gather_cat: TypeError" in first[-1]
    assert second[-1].startswith("TypeError: gather_cat joins tensors and arrays")


# -- broadcast and flags ------------------------------------------------------------------------


def send() -> list[Any]:
    rank = get_rank()
    own = {"rank": rank, "weights": torch.full((2000,), float(rank))}
    sent = broadcast(own, src=1)
    assert (sent is own) == (rank == 1)
    return [
        sent["rank"],
        sent["weights"].sum().item(),
        broadcast(f"run {rank}"),
        broadcast(object() if rank else None),
        error_of(lambda: broadcast(1, src=5)),
        error_of(lambda: broadcast(1, src=rank)),
        error_of(lambda: broadcast(1 if rank else (lambda: 1))),
    ]


def test_a_value_is_broadcast_from_any_rank() -> None:
    first, second = run_distributed(send)
    assert first[:5] == second[:5]
    assert first[:4] == [1, 2000.0, "run 0", None]
    assert first[4] == "ValueError: src=5 is not among the group's ranks [0, 1]"
    assert first[5] == second[5]
    assert "rank 0: broadcast(src=0) at" in first[5]
    assert "pickle" in first[6]
    assert "rank 0 could not take part in broadcast(src=0)" in second[6]


def ask() -> list[Any]:
    rank = get_rank()
    return [
        any_rank(rank == 1),
        any_rank(rank == 5),
        all_ranks(rank < 5),
        all_ranks(rank != 1),
        error_of(lambda: any_rank(torch.ones(2) if rank else True)),
    ]


def test_flags_are_the_same_on_all() -> None:
    first, second, third = run_distributed(ask, world_size=3)
    assert first[:4] == second[:4] == third[:4] == [True, False, True, False]
    assert "ranks" not in first[4]
    assert "rank 1 could not take part in any_rank: RuntimeError" in first[4]
    assert second[4].startswith("RuntimeError: Boolean value of Tensor")


# -- different operations, and groups -----------------------------------------------------------


def mix_up() -> list[str]:
    rank = get_rank()
    mixed: list[list[Callable[[], Any]]] = [
        [lambda: all_gather(1), lambda: broadcast(1)],
        [lambda: gather_cat(torch.zeros(10**6)), lambda: any_rank(True)],
        [lambda: any_rank(True), lambda: all_ranks(True)],
    ]
    return [error_of(pair[rank % 2]) for pair in mixed]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_in_different_collectives_are_told_so(world_size: int) -> None:
    first, *others = run_distributed(mix_up, world_size=world_size)
    assert all(other == first for other in others)
    names = [("all_gather", "broadcast(src=0)"), ("gather_cat", "any_rank"), ("any_rank", "all_r")]
    for text, (ours, theirs) in zip(first, names, strict=True):
        head, *lines = text.splitlines()
        assert head == "RanksDisagreeError: the ranks came to different collectives:"
        assert f": {ours} at {__file__}:" in lines[0]
        assert f"  rank 1: {theirs}" in lines[1]


def gather_in_groups() -> list[Any]:
    rank = get_rank()
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = odd if rank % 2 else even
    return [
        all_gather(rank, group=mine),
        gather_cat(torch.full((rank,), rank), group=mine).tolist(),
        broadcast(rank, src=rank % 2 + 2, group=mine),
        any_rank(rank == 3, group=mine),
        error_of(lambda: broadcast(rank, src=(rank + 1) % 4, group=mine)).split(":")[0],
    ]


def test_groups_gather_by_themselves() -> None:
    results = run_distributed(gather_in_groups, world_size=4)
    even = [[0, 2], [2, 2], 2, False, "ValueError"]
    odd = [[1, 3], [1, 3, 3, 3], 3, True, "ValueError"]
    assert results == [even, odd, even, odd]
